"""Checks a splice before anything is written, and lays it out in columns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvsplice.arrays import CPU, Device, describe
from kvsplice.integers import as_integer
from kvsplice.rope import UNROTATED, RopeTables
from kvsplice.splicer.chunk import Chunk, StagedMemory
from kvsplice.splicer.layout import PagedLayout
from kvsplice.splicer.segments import Segment, cut

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MOST_POSITIONS = 1 << 31


class Source(NamedTuple):
    """Where a chunk's object lies. ``device`` is None where only its address is known."""

    pointer: int
    device: Device | None
    breaks: tuple[int, ...]
    location: str | None
    owner: object


class Reading(NamedTuple):
    """Chunks that passed the checks that concern each alone.

    Attributes
    ----------
    rows : list of (old start, current start, offset, count)
    sources : list of list of Source
        By group, then by chunk.
    """

    rows: list[tuple[int, int, int, int]]
    sources: list[list[Source]]


@dataclass(frozen=True)
class Plan:
    """A splice that passed all checks.

    Attributes
    ----------
    old_start, cur_start, offset, count : int64 arrays ``[chunks]``
        ``old_start`` is `kvsplice.rope.UNROTATED` for K that was stored without rope.
    sources : list of list of Source
        By group, then by chunk.
    block_tables : list of int32 arrays
        By group, as far as they are used.
    tokens : int
        Tokens to be written.
    """

    old_start: NDArray[np.int64]
    cur_start: NDArray[np.int64]
    offset: NDArray[np.int64]
    count: NDArray[np.int64]
    sources: list[list[Source]]
    block_tables: list[NDArray[np.int32]]
    tokens: int


class Planner:
    """Makes plans for one registration: its layouts, its rope, its chunk size."""

    def __init__(self, layouts: Sequence[PagedLayout], rope: RopeTables | None, chunk_tokens: int) -> None:
        if not layouts:
            raise ValueError("layouts: no group of layers is given")
        for group, layout in enumerate(layouts):
            if not isinstance(layout, PagedLayout):
                raise TypeError(f"layouts[{group}]: expected a PagedLayout, not {type(layout).__name__}")
            if layout.device != layouts[0].device:
                raise ValueError(f"layouts[{group}] is on {layout.device}, the first is on {layouts[0].device}")
        if rope is not None:
            if not isinstance(rope, RopeTables):
                raise TypeError(f"rope: expected RopeTables or None, not {type(rope).__name__}")
            rope.check_groups(len(layouts))
        self.layouts = tuple(layouts)
        self.rope = rope
        self.chunk_tokens = as_integer(chunk_tokens, "chunk_tokens")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {chunk_tokens} is not positive")
        self._sharing = _sharing(self.layouts)
        self.segments: tuple[tuple[Segment, ...], ...] = tuple(
            cut(layout, rope, group) for group, layout in enumerate(layouts)
        )
        self.shapes = tuple(layout.object_shape(self.chunk_tokens) for layout in layouts)
        self.nbytes = tuple(layout.object_bytes(self.chunk_tokens) for layout in layouts)
        ropes = [rope.for_group(group) for group in range(len(layouts))] if rope is not None else []
        lengths = [rope.max_position(turned.table) for turned in ropes if rope is not None and turned is not None]
        self.max_position = min(lengths) if lengths else None

    def plan(self, chunks: Sequence[Chunk], block_tables: Any) -> Plan:
        """Check a splice and lay it out.

        Raises
        ------
        ValueError, TypeError
            Naming the argument, the chunk and the group that is wrong.
        """
        return self.place(self.read(chunks), block_tables)

    def read(self, chunks: Sequence[Chunk]) -> Reading:
        """The first half of `plan`: check the chunks, each by itself."""
        if isinstance(chunks, Chunk) or not isinstance(chunks, Iterable):
            raise TypeError(f"chunks: expected a sequence of Chunk, not {type(chunks).__name__}")
        chunks = list(chunks)
        rows = [self._positions(chunk, index) for index, chunk in enumerate(chunks)]
        return Reading(rows, self._sources(chunks))

    def place(self, reading: Reading, block_tables: Any) -> Plan:
        """The second half of `plan`: check them against each other and against the block tables."""
        rows = reading.rows
        tables = self._block_tables(block_tables)
        spans = sorted((cur, cur + count, index) for index, (_, cur, _, count) in enumerate(rows))
        for (_, end, first), (start, _, second) in pairwise(spans):
            if start < end:
                raise ValueError(f"chunks[{first}] and chunks[{second}] overlap at position {start}")
        used, written = [], []
        for group, (layout, table) in enumerate(zip(self.layouts, tables, strict=True)):
            entries, blocks = _used_blocks(group, layout, table, spans)
            used.append(entries)
            written.append(blocks)
        for first, second in self._sharing:
            common = np.intersect1d(written[first], written[second], assume_unique=True)
            if len(common):
                raise ValueError(
                    f"block_tables[{second}]: block {common[0]} is written through block_tables[{first}] too, and both "
                    "groups lie in the same memory"
                )
        old, cur, offset, count = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return Plan(old, cur, offset, count, reading.sources, used, sum(taken for *_, taken in rows))

    def _positions(self, chunk: Chunk, index: int) -> tuple[int, int, int, int]:
        """Old start, current start, offset and count."""
        if not isinstance(chunk, Chunk):
            raise TypeError(f"chunks[{index}]: expected a Chunk, not {type(chunk).__name__}")
        tokens = self.chunk_tokens
        old = UNROTATED if chunk.old_start is None else _integer(chunk.old_start, index, "old_start")
        cur, offset = _integer(chunk.cur_start, index, "cur_start"), _integer(chunk.offset, index, "offset")
        if not 0 <= offset < tokens:
            raise ValueError(f"chunks[{index}].offset: {offset} is not in an object of {tokens} tokens")
        count = tokens - offset if chunk.count is None else _integer(chunk.count, index, "count")
        if not 1 <= count <= tokens - offset:
            raise ValueError(f"chunks[{index}].count: {count} of an object of {tokens} tokens, from {offset} on")
        if cur < 0:
            raise ValueError(f"chunks[{index}].cur_start: {cur} is negative")
        if old < 0 and chunk.old_start is not None:
            raise ValueError(f"chunks[{index}].old_start: {old} is negative")
        if max(old, cur) > _MOST_POSITIONS - tokens:
            raise ValueError(f"chunks[{index}]: position {max(old, cur)} is not below 2**31")
        if self.max_position is not None and old != cur and max(old, cur) + count > self.max_position:
            name, start = ("cur_start", cur) if cur + count > self.max_position else ("old_start", old)
            raise ValueError(
                f"chunks[{index}].{name}: positions up to {start + count - 1}, but the rope table ends at "
                f"{self.max_position - 1}"
            )
        return old, cur, offset, count

    def _sources(self, chunks: Sequence[Chunk]) -> list[list[Source]]:
        groups = len(self.layouts)
        sources: list[list[Source]] = [[] for _ in range(groups)]
        for index, chunk in enumerate(chunks):
            parts = chunk.source if isinstance(chunk.source, (list, tuple)) else (chunk.source,)
            if len(parts) != groups:
                raise ValueError(f"chunks[{index}].source: {len(parts)} objects for {groups} groups of layers")
            for group, part in enumerate(parts):
                sources[group].append(self._source(part, group, index))
        return sources

    def _source(self, part: object, group: int, index: int) -> Source:
        layout, expected = self.layouts[group], self.nbytes[group]
        if isinstance(part, StagedMemory):
            if part.nbytes != expected:
                raise ValueError(
                    f"{self._label(index, group)}: {part.nbytes} bytes, expected {expected} for "
                    f"{list(self.shapes[group])} of {layout.dtype}"
                )
            self._check_address(part.pointer, group, index)
            return Source(part.pointer, None, part.breaks, part.location, part)
        label = self._label(index, group)
        buffer = describe(part, label)
        flat = buffer.dtype == "uint8" and buffer.shape == (expected,)
        if not flat and buffer.shape != self.shapes[group]:
            raise ValueError(f"{label}: shape {list(buffer.shape)}, expected {list(self.shapes[group])}")
        if not flat and buffer.dtype != layout.dtype and (buffer.dtype != "uint8" or layout.itemsize != 1):
            raise ValueError(f"{label}: {buffer.dtype}, but the layout is {layout.dtype}")
        if not buffer.contiguous:
            raise ValueError(f"{label}: the object is not in C order (strides {list(buffer.strides)})")
        self._check_address(buffer.pointer, group, index)
        if buffer.device not in {CPU, layout.device}:
            raise ValueError(f"{label} is on {buffer.device}, the paged cache on {layout.device}")
        location = "device" if buffer.device.kind == "cuda" else None
        return Source(buffer.pointer, buffer.device, (), location, part)

    def _label(self, index: int, group: int) -> str:
        return f"chunks[{index}].source" + (f"[{group}]" if len(self.layouts) > 1 else "")

    def _check_address(self, pointer: int, group: int, index: int) -> None:
        itemsize = self.layouts[group].itemsize
        if pointer <= 0 or pointer % itemsize:
            raise ValueError(
                f"{self._label(index, group)}: address {pointer:#x} is not a multiple of the element size, {itemsize}"
            )

    def _block_tables(self, block_tables: Any) -> list[NDArray[np.integer[Any]]]:
        groups = len(self.layouts)
        if groups == 1 and not _is_nested(block_tables):
            block_tables = [block_tables]
        tables = list(block_tables)
        if len(tables) != groups:
            raise ValueError(f"block_tables: {len(tables)} for {groups} groups of layers")
        return [_block_table(table, group) for group, table in enumerate(tables)]


def _integer(value: Any, index: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"chunks[{index}].{name}: expected an integer, not {type(value).__name__}") from None


def _used_blocks(
    group: int, layout: PagedLayout, table: NDArray[np.integer[Any]], spans: Sequence[tuple[int, int, int]]
) -> tuple[NDArray[np.int32], NDArray[np.integer[Any]]]:
    """The table's entries up to the last that is written to, others set to 0; and the blocks written, in order.

    ``spans`` are positions in order: start, end, chunk.
    """
    size = layout.block_size
    if spans and spans[-1][1] > len(table) * size:
        raise ValueError(
            f"block_tables[{group}]: {len(table)} blocks of {size} tokens do not reach position {spans[-1][1] - 1}"
        )
    # Entries that are written to, as runs; chunks may share the block where they meet.
    runs: list[list[int]] = []
    for start, end, _ in spans:
        first, last = start // size, (end - 1) // size
        if runs and first <= runs[-1][1] + 1:
            runs[-1][1] = last
        else:
            runs.append([first, last])
    if not runs:
        return np.empty(0, dtype=np.int32), table[:0]
    written = [table[first : last + 1] for first, last in runs]
    ordered = np.sort(np.concatenate(written))
    if ordered[0] < 0 or ordered[-1] >= layout.num_blocks:
        index = next(i for first, last in runs for i in range(first, last + 1) if not 0 <= table[i] < layout.num_blocks)
        raise ValueError(f"block_tables[{group}][{index}]: block {table[index]} of {layout.num_blocks}")
    if (ordered[1:] == ordered[:-1]).any():
        twice = ordered[:-1][ordered[1:] == ordered[:-1]][0]
        raise ValueError(f"block_tables[{group}]: block {twice} stands twice among the blocks to be written")
    used = np.zeros(runs[-1][1] + 1, dtype=np.int32)
    for (first, last), entries in zip(runs, written, strict=True):
        used[first : last + 1] = entries
    return used, ordered


def _sharing(layouts: Sequence[PagedLayout]) -> list[tuple[int, int]]:
    """Groups that lie in the same memory, as those of vLLM's hybrid models do: they share a pool of blocks.

    Raises
    ------
    ValueError
        If their blocks are not equally large, so that no pool can hold both.
    """
    pairs = []
    for (first, one), (second, other) in combinations(enumerate(layouts), 2):
        places = {pointer: plane.block_stride for plane in one.planes for pointer in plane.pointers}
        for plane in other.planes:
            if {places.get(pointer, plane.block_stride) for pointer in plane.pointers} != {plane.block_stride}:
                raise ValueError(
                    f"layouts[{second}] lies in the memory of layouts[{first}], but its blocks are not as large"
                )
        if any(pointer in places for plane in other.planes for pointer in plane.pointers):
            pairs.append((first, second))
    return pairs


def _is_nested(block_tables: Any) -> bool:
    if hasattr(block_tables, "ndim"):
        return bool(block_tables.ndim == 2)
    if not isinstance(block_tables, Sequence):
        raise TypeError(f"block_tables: expected block numbers, not {type(block_tables).__name__}")
    return len(block_tables) > 0 and not isinstance(block_tables[0], (int, np.integer))


def _block_table(table: Any, group: int) -> NDArray[np.integer[Any]]:
    if hasattr(table, "__cuda_array_interface__") or getattr(getattr(table, "device", None), "type", "cpu") != "cpu":
        raise ValueError(f"block_tables[{group}]: the table is on a GPU; it is checked on the host, so give it there")
    try:
        array = np.asarray(table)
    except (TypeError, ValueError) as error:
        raise TypeError(f"block_tables[{group}]: expected block numbers: {error}") from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"block_tables[{group}]: expected one axis, got {array.ndim}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"block_tables[{group}]: expected integers, not {array.dtype}")
    return array
