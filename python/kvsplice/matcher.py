"""The matcher: which stored chunks occur in a prompt, at any offset."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from kvsplice import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Positions = NDArray[np.int64]

__all__ = ["Match", "Matcher", "MatcherStats", "Matches", "coverage", "non_overlapping_after_prefix"]

logger = logging.getLogger(__name__)


class Match(NamedTuple):
    """One stored chunk found in a query. All positions count tokens; ends are exclusive."""

    old_start: int
    """Where the chunk began when it was stored."""
    old_end: int
    """Where it ended when it was stored."""
    cur_start: int
    """Where it begins in the query."""
    cur_end: int
    """Where it ends in the query."""
    chunk_hash: bytes
    """The storage key under which its KV was stored."""


class Matches(Sequence[Match]):
    """The matches of one query, as columns, in order of ``cur_start``.

    Reads like a sequence of `Match`; the columns are there for vectorized use.

    Attributes
    ----------
    old_start, old_end, cur_start, cur_end : numpy.ndarray
        Token positions, shape ``(n,)``, dtype int64.
    chunk_hashes : list of bytes
        The storage key of each match, length ``n``.
    """

    __slots__ = ("chunk_hashes", "cur_end", "cur_start", "old_end", "old_start")

    def __init__(
        self,
        old_start: Positions,
        old_end: Positions,
        cur_start: Positions,
        cur_end: Positions,
        chunk_hashes: list[bytes],
    ) -> None:
        lengths = {len(old_start), len(old_end), len(cur_start), len(cur_end), len(chunk_hashes)}
        if len(lengths) != 1:
            raise ValueError(f"columns of different lengths: {sorted(lengths)}")
        self.old_start = old_start
        self.old_end = old_end
        self.cur_start = cur_start
        self.cur_end = cur_end
        self.chunk_hashes = chunk_hashes

    @classmethod
    def from_rows(cls, rows: Iterable[Match | tuple[int, int, int, int, bytes]]) -> Matches:
        """Build the columns from rows in the field order of `Match`."""
        rows = list(rows)
        numbers = np.array([row[:4] for row in rows], dtype=np.int64).reshape(-1, 4)
        old_start, old_end, cur_start, cur_end = np.ascontiguousarray(numbers.T)
        return cls(old_start, old_end, cur_start, cur_end, [bytes(row[4]) for row in rows])

    def take(self, indices: NDArray[np.intp] | Sequence[int]) -> Matches:
        """Return the matches at ``indices``, in that order."""
        chosen = np.asarray(indices, dtype=np.intp)
        return Matches(
            self.old_start[chosen],
            self.old_end[chosen],
            self.cur_start[chosen],
            self.cur_end[chosen],
            [self.chunk_hashes[i] for i in chosen.tolist()],
        )

    def __len__(self) -> int:
        return len(self.chunk_hashes)

    @overload
    def __getitem__(self, index: int) -> Match: ...
    @overload
    def __getitem__(self, index: slice) -> Matches: ...
    def __getitem__(self, index: int | slice) -> Match | Matches:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return Match(
            int(self.old_start[index]),
            int(self.old_end[index]),
            int(self.cur_start[index]),
            int(self.cur_end[index]),
            self.chunk_hashes[index],
        )

    def __iter__(self) -> Iterator[Match]:
        columns = (self.old_start, self.old_end, self.cur_start, self.cur_end)
        return map(Match, *(column.tolist() for column in columns), self.chunk_hashes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Matches):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Matches({list(self)!r})"


class MatcherStats(NamedTuple):
    """Counters of one `Matcher`. Counts are since it was made unless said otherwise."""

    entries: int
    """Chunk hashes registered now."""
    contents: int
    """Different chunk texts held now (several chunk hashes can hold one text)."""
    scopes: int
    """Scopes in use now."""
    capacity: int
    """The most chunk hashes that can be registered at once."""
    token_bytes: int
    """Memory for the chunk texts, in bytes: ``4 * chunk_size`` for each content, free slots included."""
    overhead_bytes: int
    """Memory for all else: keys, tables, filter, in bytes."""
    registered: int
    """Chunk hashes newly indexed."""
    removed: int
    """Chunk hashes removed by `Matcher.remove`."""
    struck_out: int
    """Chunk hashes evicted by `Matcher.strike`."""
    evicted: int
    """Chunk hashes evicted to make room (``on_full="evict"``)."""
    rejected_full: int
    """Chunks not indexed for want of room (``on_full="reject"``)."""
    rejected_collisions: int
    """Fingerprint hits whose tokens differed."""
    table_rebuilds: int
    """Times a table was rebuilt, to grow or to shed removed words."""


class Matcher:
    """Finds stored chunks at any offset of a token sequence.

    An entry's key is its scope and chunk hash. All methods may be called from any number of threads at once. `match`
    takes no lock and never waits for a registration. The GIL is released while the index works.

    Parameters
    ----------
    chunk_size : int
        Tokens per chunk, at least 1 and at most 65536.
    capacity : int
        The most chunk hashes held at once. A bound, not an allocation: memory grows with use, about
        ``4 * chunk_size`` bytes for each different text and 160 for each chunk hash.
    on_full : {"evict", "reject"}
        What `register` does when ``capacity`` is reached: drop the chunk hash that went unused for longest (second
        chance, an approximation), or index no more.
    dedup_content : bool
        Do not index a chunk whose text is indexed already under another chunk hash of the same scope.
    seed : int, optional
        Seed of the fingerprint base and of the table hash, 0 to 2**64 - 1. Random by default, which keeps outsiders
        from building texts that collide; give one only to reproduce a run.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range or of the wrong type; the message names it.
    """

    __slots__ = ("_index", "capacity", "chunk_size", "dedup_content", "on_full")

    def __init__(
        self,
        chunk_size: int = 256,
        capacity: int = 1 << 20,
        on_full: Literal["evict", "reject"] = "evict",
        dedup_content: bool = False,
        seed: int | None = None,
    ) -> None:
        self._index = _core.Index(chunk_size, capacity, on_full, dedup_content, seed)
        self.chunk_size = chunk_size
        self.capacity = capacity
        self.on_full = on_full
        self.dedup_content = dedup_content

    def register(
        self,
        tokens: Any,
        chunk_hashes: Sequence[bytes],
        start_chunk: int = 0,
        position_offset: int = 0,
        scope: bytes = b"",
    ) -> int:
        """Index the full chunks of a stored sequence.

        Chunk ``i`` is ``tokens[i * chunk_size:(i + 1) * chunk_size]``, is indexed under ``chunk_hashes[i]``, and was
        stored at position ``position_offset + i * chunk_size``. A chunk hash already registered in ``scope``, or just
        being registered by another thread, is skipped, as are tokens at the end short of a chunk.

        Parameters
        ----------
        tokens : sequence of int
            A list or tuple of ints, a numpy integer array (read in place where it is contiguous uint32 or int32),
            `array.array`, a torch CPU tensor, or anything else with a one-dimensional integer buffer.
            It must not be modified during the call.
        chunk_hashes : sequence of bytes
            A storage key of 1 to 64 bytes for each full chunk; more are ignored.
        start_chunk : int
            The first chunk to index.
        position_offset : int
            Position of ``tokens[0]`` when it was stored.
        scope : bytes
            Only a `match` with the same scope sees the chunks. Any length.

        Returns
        -------
        int
            How many chunks were newly indexed.

        Raises
        ------
        ValueError, TypeError
            Too few chunk hashes, a chunk hash of a wrong length or type, a token that is negative, above 32 bits or
            no integer; the message names the argument and the first bad index. Nothing was indexed.
        """
        count, first_time_full = self._index.register(tokens, chunk_hashes, start_chunk, position_offset, scope)
        if first_time_full:
            what = "evicting what went unused longest" if self.on_full == "evict" else "indexing no more chunks"
            logger.warning("matcher is full at %d chunk hashes: %s (said once)", self.capacity, what)
        return count

    def match(
        self, tokens: Any, scope: bytes = b"", every_occurrence: bool = False, all_holders: bool = False
    ) -> Matches:
        """Find the stored chunks of ``scope`` that occur in ``tokens``, at any offset.

        Parameters
        ----------
        tokens : sequence of int
            The query, in any form that `register` takes.
        scope : bytes
            As given to `register`.
        every_occurrence : bool
            Report a text at each offset where it occurs, not only at the first.
        all_holders : bool
            Report each chunk hash that holds a text, not only the one registered or confirmed last.

        Returns
        -------
        Matches
            In order of ``cur_start``. Token-exact: equal fingerprints are not enough. They may overlap.

        Raises
        ------
        ValueError, TypeError
            As in `register`.
        """
        return Matches(*self._index.match(tokens, scope, every_occurrence, all_holders))

    def remove(self, chunk_hashes: Sequence[bytes], scope: bytes = b"") -> int:
        """Evict the given chunk hashes; unknown ones are ignored. Return how many were there."""
        return self._index.remove(chunk_hashes, scope)

    def strike(self, chunk_hashes: Sequence[bytes], threshold: int = 2, scope: bytes = b"") -> list[bytes]:
        """Note that storage no longer held these chunks; evict those at ``threshold`` strikes (1 to 255).

        A chunk hash in flight (`begin` without its `finish`) takes no strike; one given twice takes two. Return the
        evicted chunk hashes.
        """
        return self._index.strike(chunk_hashes, threshold, scope)

    def confirm(self, chunk_hashes: Sequence[bytes], scope: bytes = b"") -> None:
        """Note that storage holds these chunks.

        Clears their strikes, and lets them be reported before other holders of their text.
        """
        self._index.confirm(chunk_hashes, scope)

    def begin(self, chunk_hashes: Sequence[bytes], scope: bytes = b"") -> None:
        """Mark a registration of each chunk hash as in flight. Counted: each `begin` needs its own `finish`.

        The chunk hashes need not be registered yet. Marks are not bounded by ``capacity``: a `begin` that never gets
        its `finish` costs some 70 bytes for good. Marked entries are not evicted to make room; if all are, the matcher
        rejects.

        Raises
        ------
        ValueError
            More than 16,383 registrations of one chunk hash in flight; none of this call's was counted.
        """
        self._index.begin(chunk_hashes, scope)

    def finish(self, chunk_hashes: Sequence[bytes], scope: bytes = b"") -> None:
        """End one registration in flight of each chunk hash, also when it failed; one not in flight is ignored."""
        self._index.finish(chunk_hashes, scope)

    def contains(self, chunk_hash: bytes, scope: bytes = b"") -> bool:
        """Whether the chunk hash is registered in ``scope``."""
        return self._index.contains(chunk_hash, scope)

    def __len__(self) -> int:
        return len(self._index)

    def stats(self) -> MatcherStats:
        """Return the counters. Exact when no other thread is at work."""
        return MatcherStats(**self._index.stats())

    def __repr__(self) -> str:
        return f"<Matcher chunk_size={self.chunk_size} entries={len(self)} capacity={self.capacity}>"


def _columns(matches: Iterable[Match]) -> Matches:
    return matches if isinstance(matches, Matches) else Matches.from_rows(matches)


def coverage(matches: Iterable[Match]) -> int:
    """Return the number of distinct query tokens that the matches cover, overlaps counted once."""
    columns = _columns(matches)
    return _core.coverage(columns.cur_start, columns.cur_end)


def non_overlapping_after_prefix(matches: Iterable[Match], prefix_tokens: int) -> Matches:
    """Select matches that overlap neither the prefix nor each other.

    Matches that start before ``prefix_tokens`` are dropped first; of the rest, in order of ``cur_start``, each is
    kept that starts at or after the end of the last one kept. Of several that start together the first given wins.
    """
    columns = _columns(matches)
    return columns.take(_core.non_overlapping(columns.cur_start, columns.cur_end, prefix_tokens))
