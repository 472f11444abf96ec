"""A plain model of `kvsplice.Matcher`: dictionaries, brute force, token-exact. The oracle of the tests.

It has no capacity, knows no fingerprints and checks only those arguments that change what happens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvsplice.matcher import Match, Matcher, MatcherStats, Matches

Key = tuple[bytes, bytes]
"""Scope and chunk hash."""


@dataclass
class Entry:
    """One registered chunk hash."""

    text: bytes
    start: int
    strikes: int = 0


@dataclass
class Scope:
    """What is registered in one scope."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    # The holders of each text, the one registered or confirmed last at the end.
    holders: dict[bytes, list[bytes]] = field(default_factory=dict)


def words(tokens) -> np.ndarray:
    """Tokens in any form as little-endian 32-bit words."""
    return np.asarray(tokens, dtype=np.int64).reshape(-1).astype("<u4")


class ModelMatcher:
    """`kvsplice.Matcher` without an index; see there for the methods."""

    def __init__(self, chunk_size=256, capacity=1 << 20, on_full="evict", dedup_content=False, seed=None):
        self.chunk_size = chunk_size
        self.capacity = capacity
        self.on_full = on_full
        self.dedup_content = dedup_content
        self._scopes: dict[bytes, Scope] = {}
        self._in_flight: Counter[Key] = Counter()
        self._counts: Counter[str] = Counter()

    def register(self, tokens, chunk_hashes, start_chunk=0, position_offset=0, scope=b""):
        data = words(tokens).tobytes()
        step = 4 * self.chunk_size
        chunks = len(data) // step
        if len(chunk_hashes) < chunks:
            raise ValueError(f"chunk_hashes has {len(chunk_hashes)} of {chunks}")
        held = self._scopes.setdefault(scope, Scope())
        new = 0
        for i in range(start_chunk, chunks):
            chunk_hash = bytes(chunk_hashes[i])
            text = data[i * step : (i + 1) * step]
            if chunk_hash in held.entries or (self.dedup_content and text in held.holders):
                continue
            held.entries[chunk_hash] = Entry(text, position_offset + i * self.chunk_size)
            held.holders.setdefault(text, []).append(chunk_hash)
            new += 1
        self._counts["registered"] += new
        return new

    def match(self, tokens, scope=b"", every_occurrence=False, all_holders=False):
        data = words(tokens).tobytes()
        held = self._scopes.get(scope, Scope())
        size = self.chunk_size
        seen = set()
        rows = []
        for at in range(len(data) // 4 - size + 1):
            text = data[4 * at : 4 * (at + size)]
            holders = held.holders.get(text)
            if not holders or (text in seen and not every_occurrence):
                continue
            seen.add(text)
            for chunk_hash in reversed(holders) if all_holders else holders[-1:]:
                start = held.entries[chunk_hash].start
                rows.append(Match(start, start + size, at, at + size, chunk_hash))
        return Matches.from_rows(rows)

    def _evict(self, chunk_hash, scope):
        held = self._scopes.get(scope)
        entry = held.entries.pop(chunk_hash, None) if held else None
        if entry is None:
            return False
        holders = held.holders[entry.text]
        holders.remove(chunk_hash)
        if not holders:
            del held.holders[entry.text]
        return True

    def remove(self, chunk_hashes, scope=b""):
        count = sum(self._evict(bytes(chunk_hash), scope) for chunk_hash in chunk_hashes)
        self._counts["removed"] += count
        return count

    def strike(self, chunk_hashes, threshold=2, scope=b""):
        evicted = []
        for chunk_hash in map(bytes, chunk_hashes):
            entry = self._entry(chunk_hash, scope)
            if entry is None or self._in_flight[scope, chunk_hash]:
                continue
            entry.strikes += 1
            if entry.strikes >= threshold:
                self._evict(chunk_hash, scope)
                evicted.append(chunk_hash)
        self._counts["struck_out"] += len(evicted)
        return evicted

    def confirm(self, chunk_hashes, scope=b""):
        for chunk_hash in map(bytes, chunk_hashes):
            entry = self._entry(chunk_hash, scope)
            if entry is None:
                continue
            entry.strikes = 0
            holders = self._scopes[scope].holders[entry.text]
            holders.remove(chunk_hash)
            holders.append(chunk_hash)

    def begin(self, chunk_hashes, scope=b""):
        self._in_flight.update((scope, bytes(chunk_hash)) for chunk_hash in chunk_hashes)

    def finish(self, chunk_hashes, scope=b""):
        for chunk_hash in chunk_hashes:
            key = (scope, bytes(chunk_hash))
            if self._in_flight[key]:
                self._in_flight[key] -= 1

    def contains(self, chunk_hash, scope=b""):
        return self._entry(bytes(chunk_hash), scope) is not None

    def _entry(self, chunk_hash, scope):
        held = self._scopes.get(scope)
        return held.entries.get(chunk_hash) if held else None

    def __len__(self):
        return sum(len(held.entries) for held in self._scopes.values())

    def stats(self):
        """As `Matcher.stats`; memory and what only an index has are 0."""
        contents = sum(len(held.holders) for held in self._scopes.values())
        counts = {name: self._counts[name] for name in MatcherStats._fields}
        counts |= {"entries": len(self), "contents": contents, "capacity": self.capacity}
        in_use = {scope for scope, held in self._scopes.items() if held.entries}
        counts["scopes"] = len(in_use | {scope for (scope, _), count in self._in_flight.items() if count})
        return MatcherStats(**counts)


# A method added to the matcher and not to its model should fail here, not go untested.
assert all(
    hasattr(ModelMatcher, name) for name in vars(Matcher) if not name.startswith("_") and name not in Matcher.__slots__
)
