"""The replay: match each request against what came before it, account for it, store it."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvsplice.cli.chain import chunk_keys
from kvsplice.cli.matching import TimedMatching
from kvsplice.cli.shift import Preambles, shifted
from kvsplice.matcher import Matcher, coverage, non_overlapping_after_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from kvsplice.cli.workload import Request
    from kvsplice.matcher import MatcherStats

__all__ = ["Replay", "Settings"]


class Settings(NamedTuple):
    """What shapes a replay, apart from its requests."""

    chunk_size: int = 256
    capacity: int = 1 << 20
    threads: int = 1
    every_occurrence: bool = True
    shift: bool = False
    seed: int = 0
    limit: int | None = None


class Replay:
    """Replays requests and keeps what a report needs: five numbers for each request and thread, no tokens.

    Parameters
    ----------
    settings : Settings
        The same settings and requests give the same counts, whatever ``threads`` is.

    Attributes
    ----------
    tokens, preamble, prefix, other : array.array
        For each request its tokens, and of these the preamble that ``shift`` put in front, those in leading chunks that
        were stored before behind the same text, and those in other chunks that were stored before.
    latencies : array.array
        Nanoseconds of each match, ``threads`` for each request.
    complete : bool
        False if the run was interrupted.
    elapsed : float
        Seconds that the run took.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # The seed makes runs alike down to the table's layout; a prompt made to collide costs time, no more.
        self._matcher = Matcher(settings.chunk_size, settings.capacity, seed=settings.seed)
        self._preambles = Preambles(settings.seed) if settings.shift else None
        self.tokens, self.preamble, self.prefix, self.other, self.latencies = (array("q") for _ in range(5))
        self.complete = True
        self.elapsed = 0.0

    def run(self, requests: Iterable[Request], on_request: Callable[[int], None] | None = None) -> None:
        """Replay the requests; an interrupt ends the run early and leaves the counts so far.

        Parameters
        ----------
        requests : iterable of Request
            In the order of their arrival.
        on_request : callable, optional
            Called with its tokens after each request.
        """
        settings = self.settings
        begin = time.perf_counter()
        try:
            with TimedMatching(self._matcher, settings.threads, settings.every_occurrence) as matching:
                for request in itertools.islice(requests, settings.limit):
                    self._step(request, matching)
                    if on_request is not None:
                        on_request(self.tokens[-1])
        except KeyboardInterrupt:
            self.complete = False
        self.elapsed = time.perf_counter() - begin

    def _step(self, request: Request, matching: TimedMatching) -> None:
        tokens, scope = request
        tokens, preamble = shifted(tokens, self._preambles)
        keys = chunk_keys(tokens, self.settings.chunk_size)
        prefix = self.settings.chunk_size * self._leading_stored(keys, scope)
        matches, times = matching.match(tokens, scope)
        other = coverage(non_overlapping_after_prefix(matches, prefix))
        self._matcher.register(tokens, keys, scope=scope)
        # Last and together, so that an interrupt leaves no half-counted request but at worst one.
        self.latencies.extend(times)
        self.prefix.append(prefix)
        self.other.append(other)
        self.preamble.append(preamble)
        self.tokens.append(len(tokens))

    def _leading_stored(self, keys: list[bytes], scope: bytes) -> int:
        # Asked of the matcher, so that what it evicted is no prefix hit either and nothing here grows with the run.
        stored = itertools.takewhile(lambda key: self._matcher.contains(key, scope), keys)
        return sum(1 for _ in stored)

    @property
    def requests(self) -> int:
        """Requests replayed."""
        return len(self.tokens)

    def stats(self) -> MatcherStats:
        """Return the matcher's counters."""
        return self._matcher.stats()

    def columns(self) -> dict[str, NDArray[np.int64]]:
        """Return the numbers of each request, shape ``(requests,)``, and ``latencies``, ``(requests, threads)``."""
        count = self.requests
        threads = self.settings.threads
        names = ("tokens", "preamble", "prefix", "other")
        # Cut to the requests that were counted whole, should an interrupt have come in between.
        columns = {name: np.array(getattr(self, name)[:count], dtype=np.int64) for name in names}
        columns["latencies"] = np.array(self.latencies[: count * threads], dtype=np.int64).reshape(count, threads)
        return columns
