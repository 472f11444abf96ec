"""From a store to the index: what was stored becomes findable, off the caller's path."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvsplice import events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvsplice.matcher import Matcher
    from kvsplice.ports import EventSink

__all__ = ["Registrar", "Registration"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Registration:
    """Chunks of one store that are to be indexed.

    Attributes
    ----------
    tokens : sequence of int
        Those of all chunks of the range.
    chunk_hashes : sequence of bytes
    chosen : sequence of bool
        Which of the chunks: those that storage holds, without a prompt's first.
    start : int
        Position of the first token.
    scope : bytes
    """

    tokens: Any
    chunk_hashes: Sequence[bytes]
    chosen: Sequence[bool]
    start: int
    scope: bytes

    def chosen_hashes(self) -> list[bytes]:
        """The hashes of the chosen chunks."""
        return [chunk_hash for chunk_hash, chosen in zip(self.chunk_hashes, self.chosen, strict=True) if chosen]


class Registrar:
    """A queue of registrations, and the thread that works it off.

    A hash is in flight from `announce` until its registration is done or has failed.
    """

    def __init__(self, matcher: Matcher, sink: EventSink, tick: Callable[[], None], interval_s: float) -> None:
        self._matcher = matcher
        self._sink = sink
        self._tick = tick
        self._interval_s = interval_s
        self._queue: deque[Registration] = deque()
        self._one_at_a_time = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="kvsplice-registrar", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def announce(self, registration: Registration) -> None:
        """Mark its hashes as in flight: a lookup that misses one does not strike it."""
        self._matcher.begin(registration.chosen_hashes(), scope=registration.scope)

    def withdraw(self, registration: Registration) -> None:
        """Undo `announce`, where the registration will not be put."""
        self._matcher.finish(registration.chosen_hashes(), scope=registration.scope)

    def put(self, registration: Registration) -> None:
        """Queue it. Does nothing else: a CUDA callback may call this."""
        self._queue.append(registration)
        self._wake.set()

    def drain(self) -> None:
        """Register what is pending, here and now."""
        # A registration that the thread has begun holds the lock, so it is waited for.
        while self._queue or self._one_at_a_time.locked():
            with self._one_at_a_time:
                self._register_next()

    def close(self) -> None:
        """Register what is pending, and stop. Safe to call twice."""
        self._stopping = True
        self._wake.set()
        self._thread.join()
        self.drain()

    def _work(self) -> None:
        due = time.monotonic() + self._interval_s
        while not self._stopping:
            self._wake.wait(max(due - time.monotonic(), 0.0))
            self._wake.clear()
            self.drain()
            if time.monotonic() < due:
                continue
            due = time.monotonic() + self._interval_s
            try:
                self._tick()
            except Exception:
                logger.exception("housekeeping failed; it is tried again")

    def _register_next(self) -> None:
        try:
            registration = self._queue.popleft()
        except IndexError:
            return
        size, scope = self._matcher.chunk_size, registration.scope
        registered, first = 0, 0
        try:
            for chosen, run in groupby(registration.chosen):
                end = first + len(list(run))
                if chosen:
                    registered += self._matcher.register(
                        registration.tokens[first * size : end * size],
                        registration.chunk_hashes[first:end],
                        position_offset=registration.start + first * size,
                        scope=scope,
                    )
                first = end
        except Exception:
            logger.exception("chunks at %d were not indexed", registration.start)
        finally:
            self._matcher.finish(registration.chosen_hashes(), scope=scope)
        if registered:
            self._sink.publish(events.FINGERPRINTS_REGISTERED, None, {"num_chunks": registered})
