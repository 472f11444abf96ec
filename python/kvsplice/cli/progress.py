"""The progress bar on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Progress"]


class Progress:
    """Counts bytes of input, or requests where ``limit`` says how many there will be.

    Parameters
    ----------
    paths : list of str
        The input files.
    limit : int, optional
        The most requests that will be replayed.
    enabled : bool
        Show the bar if stderr is a terminal; never otherwise.
    """

    def __init__(self, paths: list[str], limit: int | None, enabled: bool) -> None:
        self._by_request = limit is not None
        self._requests = 0
        self._tokens = 0
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]

            if self._by_request:
                self._bar = tqdm(total=limit, unit="req", leave=False)
            else:
                self._bar = tqdm(total=_total_bytes(paths), unit="B", unit_scale=True, leave=False)

    def at_byte(self, position: int) -> None:
        """Note how far into the input we are."""
        if self._bar is not None and not self._by_request:
            self._bar.update(position - self._bar.n)

    def request_done(self, tokens: int) -> None:
        """Note that one more request was replayed."""
        if self._bar is None:
            return
        self._requests += 1
        self._tokens += tokens
        self._bar.set_postfix_str(f"{self._requests:,} requests, {self._tokens / 1e6:,.1f}M tokens", refresh=False)
        if self._by_request:
            self._bar.update()

    def close(self) -> None:
        """Take the bar away. Safe to call twice."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _total_bytes(paths: list[str]) -> int | None:
    try:
        return sum(Path(path).stat().st_size for path in paths) or None
    except OSError:  # standard input
        return None
