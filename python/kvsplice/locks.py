"""Who owes the store a release of which read locks."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvsplice.ports import ChunkStore, Fetched, Key, Ticket

__all__ = ["Locks", "Orphans"]

logger = logging.getLogger(__name__)


class Locks:
    """Read locks that its owner has to release. Each is released once: what is given back is no longer held here."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._held: Counter[Key] = Counter()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        with self._mutex:
            return self._held.total()

    def hold(self, keys: Iterable[Key], count: int = 1) -> None:
        """Owe the release of so many locks of each key."""
        with self._mutex:
            self._held.update(dict.fromkeys(keys, count))

    def take(self, keys: Iterable[Key]) -> Locks:
        """Move a lock of each key, where one is held, to a new owner."""
        taken = Locks(self._store)
        with self._mutex:
            for key in keys:
                if self._held[key] > 0:
                    self._held[key] -= 1
                    taken._held[key] += 1
            self._held = +self._held
        return taken

    def forget(self, keys: Iterable[Key], count: int) -> None:
        """Owe so many releases of each key less: somebody else took them over."""
        with self._mutex:
            for key in keys:
                self._held[key] -= count
            self._held = +self._held

    def holds(self, keys: Iterable[Key]) -> bool:
        """Whether each key has a lock here."""
        with self._mutex:
            return all(self._held[key] > 0 for key in keys)

    def absorb(self, other: Locks) -> None:
        """Take over all that another owner holds."""
        with other._mutex:
            held, other._held = other._held, Counter()
        with self._mutex:
            self._held.update(held)

    def release(self, keys: Iterable[Key]) -> None:
        """Release all locks of these keys that are held here."""
        with self._mutex:
            held = {key: self._held.pop(key) for key in keys if key in self._held}
        self._give_back(held)

    def release_all(self) -> None:
        """Release everything."""
        with self._mutex:
            held, self._held = self._held, Counter()
        self._give_back(held)

    def _give_back(self, held: Mapping[Key, int]) -> None:
        by_count: defaultdict[int, list[Key]] = defaultdict(list)
        for key, count in held.items():
            if count > 0:
                by_count[count].append(key)
        for count, keys in by_count.items():
            try:
                self._store.release(keys, count)
            except Exception:
                # Whether it took effect is not known, and doing it twice would release somebody else's.
                logger.exception("the store did not release %d read locks on each of %d keys", count, len(keys))


class Orphans:
    """Prefetches that nobody waits for any more. Once they end, what they locked is released."""

    _ATTEMPTS = 3

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._waiting: list[tuple[Ticket, list[Key], int, int]] = []
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        with self._mutex:
            return len(self._waiting)

    def add(self, ticket: Ticket, keys: list[Key], locks: int) -> None:
        """Look after a prefetch of these keys that takes so many locks of each."""
        with self._mutex:
            self._waiting.append((ticket, keys, locks, 0))

    def reap(self) -> None:
        """Poll each once."""
        with self._mutex:
            waiting, self._waiting = self._waiting, []
        still = []
        for ticket, keys, locks, failures in waiting:
            try:
                fetched = self._store.poll(ticket)
            except Exception:
                if failures + 1 < self._ATTEMPTS:
                    still.append((ticket, keys, locks, failures + 1))
                else:
                    logger.exception("gave up a prefetch of %d keys that cannot be polled", len(keys))
                continue
            if fetched is None:
                still.append((ticket, keys, locks, failures))
                continue
            owned = Locks(self._store)
            owned.hold(loaded_keys(keys, fetched), locks)
            owned.release_all()
        with self._mutex:
            self._waiting += still


def loaded_keys(keys: list[Key], fetched: Fetched) -> list[Key]:
    """The keys that were loaded, and so are locked."""
    return [key for key, loaded in zip(keys, fetched.loaded.tolist(), strict=True) if loaded]
