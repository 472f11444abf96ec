"""What is open between a request's lookup and its end."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from kvsplice.locks import Locks
    from kvsplice.matcher import Match
    from kvsplice.ports import Key

__all__ = ["Applied", "OpenRequest"]

Applied = dict["Match", "Hashable"]
"""Matches that were written, and into which blocks."""


@dataclass
class OpenRequest:
    """A request whose lookup is done.

    Attributes
    ----------
    scope : bytes
        `Request.scope` of the lookup: a chunk's keys serve no other.
    locks : Locks
        Read locks that its retrieves have not used yet.
    keys_of : dict of bytes to sequence of Key
        Each chunk's keys, one per rank.
    callers : int
        Instances that are expected to retrieve; 0 where no lookup said.
    touched : float
        When it was last used, by the engine's clock.
    applied : dict of int to Applied
        By instance.
    turns : dict of int to Lock
        By instance, which retrieves one call after the other.
    retrieved : set of int
        Instances whose retrieve has ended.
    open : bool
        Whether the request's span is open.
    """

    scope: bytes
    locks: Locks
    keys_of: dict[bytes, Sequence[Key]]
    callers: int
    touched: float
    open: bool
    applied: defaultdict[int, Applied] = field(default_factory=lambda: defaultdict(dict))
    turns: defaultdict[int, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    retrieved: set[int] = field(default_factory=set)
