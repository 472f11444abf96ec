"""Timed matching in one thread or in several at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from kvsplice import Matcher, Matches

__all__ = ["TimedMatching"]


class TimedMatching:
    """Matches each query in ``threads`` threads at the same time, over one matcher.

    All threads get the same query and nothing is registered meanwhile, so each has the same answer, and what is found
    does not depend on ``threads``; only the latencies do.

    Parameters
    ----------
    matcher : Matcher
        The index.
    threads : int
        At least 1; the caller's own is one of them.
    every_occurrence : bool
        As in `Matcher.match`.
    """

    def __init__(self, matcher: Matcher, threads: int, every_occurrence: bool) -> None:
        self._matcher = matcher
        self._every_occurrence = every_occurrence
        self._others = threads - 1
        self._pool = ThreadPoolExecutor(self._others, "kvsplice-match") if self._others else None
        self._start = threading.Barrier(threads)

    def match(self, tokens: NDArray[np.uint32], scope: bytes) -> tuple[Matches, list[int]]:
        """Return the matches and the nanoseconds that each thread took for them."""
        if self._pool is None:
            matches, elapsed = self._timed(tokens, scope)
            return matches, [elapsed]
        futures = [self._pool.submit(self._together, tokens, scope) for _ in range(self._others)]
        matches, elapsed = self._together(tokens, scope)
        times = [elapsed]
        for future in futures:
            other, elapsed = future.result()
            if other.chunk_hashes != matches.chunk_hashes or not np.array_equal(other.cur_start, matches.cur_start):
                raise RuntimeError("two threads got different matches for one query: a bug in the matcher")
            times.append(elapsed)
        return matches, times

    def _together(self, tokens: NDArray[np.uint32], scope: bytes) -> tuple[Matches, int]:
        # Threads that start one after the other would hardly overlap on a short query.
        self._start.wait()
        return self._timed(tokens, scope)

    def _timed(self, tokens: NDArray[np.uint32], scope: bytes) -> tuple[Matches, int]:
        begin = time.perf_counter_ns()
        matches = self._matcher.match(tokens, scope, every_occurrence=self._every_occurrence)
        return matches, time.perf_counter_ns() - begin

    def close(self) -> None:
        """End the threads."""
        self._start.abort()
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> TimedMatching:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
