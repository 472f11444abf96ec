"""Checks a splice before anything is written, and lays it out in columns."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsplice.arrays import CPU, Device, describe
from kvsplice.dtypes import DTYPES
from kvsplice.rope import UNROTATED, RopeTables
from kvsplice.splicer.chunk import Chunk, StagedMemory
from kvsplice.splicer.layout import PagedLayout
from kvsplice.splicer.segments import Segment, cut


@dataclass(frozen=True)
class Source:
    """Where a chunk's object lies. ``device`` is None where only its address is known."""

    pointer: int
    device: Device | None
    breaks: tuple[int, ...]
    owner: object


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
        By group.
    """

    old_start: NDArray[np.int64]
    cur_start: NDArray[np.int64]
    offset: NDArray[np.int64]
    count: NDArray[np.int64]
    sources: list[list[Source]]
    block_tables: list[NDArray[np.int32]]

    @property
    def tokens(self) -> int:
        """Tokens to be written."""
        return int(self.count.sum())


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
        self.chunk_tokens = operator.index(chunk_tokens)
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens: {chunk_tokens} is not positive")
        self.segments: tuple[tuple[Segment, ...], ...] = tuple(cut(layout, rope, group) for group, layout in enumerate(layouts))
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
        chunks = list(chunks)
        old, cur, offset, count = self._positions(chunks)
        sources = self._sources(chunks)
        tables = self._block_tables(block_tables)
        order = np.argsort(cur, kind="stable")
        starts, ends = cur[order], (cur + count)[order]
        overlap = np.flatnonzero(starts[1:] < ends[:-1])
        if overlap.size:
            first, second = order[overlap[0]], order[overlap[0] + 1]
            raise ValueError(f"chunks[{first}] and chunks[{second}] overlap at position {int(starts[overlap[0] + 1])}")
        for group, (layout, table) in enumerate(zip(self.layouts, tables, strict=True)):
            self._check_slots(group, layout, table, starts, ends)
        return Plan(old, cur, offset, count, sources, tables)

    def _positions(self, chunks: Sequence[Chunk]) -> tuple[NDArray[np.int64], ...]:
        columns = np.empty((4, len(chunks)), dtype=np.int64)
        for index, chunk in enumerate(chunks):
            if not isinstance(chunk, Chunk):
                raise TypeError(f"chunks[{index}]: expected a Chunk, not {type(chunk).__name__}")
            old = UNROTATED if chunk.old_start is None else _integer(chunk.old_start, index, "old_start")
            cur, offset = _integer(chunk.cur_start, index, "cur_start"), _integer(chunk.offset, index, "offset")
            count = self.chunk_tokens - offset if chunk.count is None else _integer(chunk.count, index, "count")
            if not 0 <= offset < self.chunk_tokens:
                raise ValueError(f"chunks[{index}].offset: {offset} is not in an object of {self.chunk_tokens} tokens")
            if not 1 <= count <= self.chunk_tokens - offset:
                raise ValueError(f"chunks[{index}].count: {count} of an object of {self.chunk_tokens} tokens, from {offset} on")
            if cur < 0:
                raise ValueError(f"chunks[{index}].cur_start: {cur} is negative")
            if chunk.old_start is not None and old < 0:
                raise ValueError(f"chunks[{index}].old_start: {old} is negative")
            if self.max_position is not None and old != cur:
                for name, start in (("old_start", old), ("cur_start", cur)):
                    if start + count > self.max_position:
                        raise ValueError(
                            f"chunks[{index}].{name}: positions up to {start + count - 1}, but the rope table ends at {self.max_position - 1}"
                        )
            columns[:, index] = old, cur, offset, count
        return columns[0], columns[1], columns[2], columns[3]

    def _sources(self, chunks: Sequence[Chunk]) -> list[list[Source]]:
        groups = len(self.layouts)
        sources: list[list[Source]] = [[] for _ in range(groups)]
        for index, chunk in enumerate(chunks):
            parts = chunk.source if isinstance(chunk.source, (list, tuple)) else (chunk.source,)
            if len(parts) != groups:
                raise ValueError(f"chunks[{index}].source: {len(parts)} objects for {groups} groups of layers")
            for group, part in enumerate(parts):
                label = f"chunks[{index}].source" + (f"[{group}]" if groups > 1 else "")
                sources[group].append(self._source(part, group, label))
        return sources

    def _source(self, part: object, group: int, label: str) -> Source:
        layout, expected = self.layouts[group], self.nbytes[group]
        if isinstance(part, StagedMemory):
            if part.nbytes != expected:
                raise ValueError(f"{label}: {part.nbytes} bytes, expected {expected} for {list(self.shapes[group])} of {layout.dtype}")
            if part.pointer <= 0 or part.pointer % layout.itemsize:
                raise ValueError(f"{label}: address {part.pointer:#x} is not a multiple of the element size, {layout.itemsize}")
            return Source(part.pointer, None, part.breaks, part)
        buffer = describe(part, label)
        if DTYPES[buffer.dtype].itemsize == 1 and buffer.nbytes == expected and len(buffer.shape) == 1:
            pass  # the object's bytes
        elif buffer.shape != self.shapes[group]:
            raise ValueError(f"{label}: shape {list(buffer.shape)}, expected {list(self.shapes[group])}")
        elif buffer.dtype != layout.dtype and DTYPES[buffer.dtype].itemsize != layout.itemsize:
            raise ValueError(f"{label}: {buffer.dtype}, but the layout is {layout.dtype}")
        elif buffer.dtype not in {layout.dtype, "uint8"}:
            raise ValueError(f"{label}: {buffer.dtype}, but the layout is {layout.dtype}")
        if not buffer.contiguous:
            raise ValueError(f"{label}: the object is not in C order (strides {list(buffer.strides)})")
        if buffer.pointer % layout.itemsize:
            raise ValueError(f"{label}: address {buffer.pointer:#x} is not a multiple of the element size, {layout.itemsize}")
        if buffer.device not in {CPU, layout.device}:
            raise ValueError(f"{label} is on {buffer.device}, the paged cache on {layout.device}")
        return Source(buffer.pointer, buffer.device, (), part)

    def _block_tables(self, block_tables: Any) -> list[NDArray[np.int32]]:
        groups = len(self.layouts)
        if groups == 1 and not _is_nested(block_tables):
            block_tables = [block_tables]
        tables = list(block_tables)
        if len(tables) != groups:
            raise ValueError(f"block_tables: {len(tables)} for {groups} groups of layers")
        return [_block_table(table, layout, group) for group, (table, layout) in enumerate(zip(tables, self.layouts, strict=True))]

    @staticmethod
    def _check_slots(
        group: int, layout: PagedLayout, table: NDArray[np.int32], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> None:
        if not starts.size:
            return
        if int(ends[-1]) > len(table) * layout.block_size:
            raise ValueError(
                f"block_tables[{group}]: {len(table)} blocks of {layout.block_size} tokens do not reach position {int(ends[-1]) - 1}"
            )
        # Block indices that are written to: chunks are in order of position and may share the block where they meet.
        firsts, lasts = starts // layout.block_size, (ends - 1) // layout.block_size
        written = np.zeros(int(lasts[-1]) + 1, dtype=bool)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            written[first : last + 1] = True
        used = table[: written.size][written]
        outside = np.flatnonzero((used < 0) | (used >= layout.num_blocks))
        if outside.size:
            index = int(np.flatnonzero(written)[outside[0]])
            raise ValueError(f"block_tables[{group}][{index}]: block {int(table[index])} of {layout.num_blocks}")
        ordered = np.sort(used)
        twice = np.flatnonzero(ordered[1:] == ordered[:-1])
        if twice.size:
            raise ValueError(f"block_tables[{group}]: block {int(ordered[twice[0]])} stands twice among the blocks to be written")


def _integer(value: Any, index: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"chunks[{index}].{name}: expected an integer, not {type(value).__name__}") from None


def _is_nested(block_tables: Any) -> bool:
    if hasattr(block_tables, "ndim"):
        return bool(block_tables.ndim == 2)
    return len(block_tables) > 0 and not isinstance(block_tables[0], (int, np.integer))


def _block_table(table: Any, layout: PagedLayout, group: int) -> NDArray[np.int32]:
    device = getattr(table, "device", None)
    if hasattr(table, "__cuda_array_interface__") or getattr(device, "type", "cpu") != "cpu":
        raise ValueError(f"block_tables[{group}]: the table is on a GPU; it is checked on the host, so give it there")
    array = np.asarray(table)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"block_tables[{group}]: expected one axis, got {array.ndim}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"block_tables[{group}]: expected integers, not {array.dtype}")
    # Entries that do not fit cannot be blocks; -1 marks them, and is refused only if it is used.
    limit = np.iinfo(np.int32).max
    return np.where((array >= 0) & (array <= limit), array, -1).astype(np.int32)
