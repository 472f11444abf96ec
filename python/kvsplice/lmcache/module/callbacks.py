"""Calls behind what is on a stream, by LMCache's dispatcher: the driver's thread never waits for Python's lock."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from lmcache.v1.multiprocess.native_completion import submit_callback_to_stream

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Callbacks"]

_KIND = "kvsplice"


class Callbacks:
    """Actions by number, since only data goes through a stream.

    Parameters
    ----------
    transfer : lmcache.v1.multiprocess.modules.lmcache_driven_transfer.LMCacheDrivenTransferModule
        Whose dispatcher makes the calls.
    """

    def __init__(self, transfer: Any) -> None:
        self._actions: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count()
        transfer.register_host_func(_KIND, self._call, int)

    def after(self, stream: Any, action: Callable[[], None]) -> None:
        """Call this when all that is on a stream (CuPy's, or LMCache's stub of one) now is done."""
        number = next(self._numbers)
        self._actions[number] = action
        try:
            submit_callback_to_stream(stream, _KIND, number)
        except Exception:
            del self._actions[number]
            raise

    def _call(self, number: int) -> None:
        self._actions.pop(number)()
