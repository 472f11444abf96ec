"""Segments as the kernel's structures. They mirror those of ``cuda/splice.cu``."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.dtypes import DTYPES
from kvsplice.splicer.segments import Operation, Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvsplice.splicer.layout import PagedLayout

THREADS = 256
MAX_SEGMENTS = 8
LAYERS_IN_FLIGHT = 4

SLAB = np.dtype([("paged", "u8"), ("staged", "i8")])
CHUNK = np.dtype([("source", "u8"), ("old_start", "i8"), ("cur_start", "i8"), ("offset", "i8"), ("count", "i8")])
SEGMENT = np.dtype(
    [
        ("slabs", "u8"),
        ("block_stride", "i8"),
        ("token_stride", "i8"),
        ("head_stride", "i8"),
        ("element_stride", "i8"),
        ("staged_token_stride", "i8"),
        ("staged_head_stride", "i8"),
        ("table", "u8"),
        ("table_stride", "i8"),
        ("table_kind", "i4"),
        ("operation", "i4"),
        ("heads", "i4"),
        ("items", "i4"),
        ("step", "i4"),
        ("partner", "i4"),
        ("half", "i4"),
        ("unused", "i4"),
    ]
)
PART = np.dtype([("first_unit", "i4"), ("tiles", "i4"), ("first_slab", "i4"), ("slabs", "i4")])
LAUNCH = np.dtype(
    [
        ("chunks", "u8"),
        ("blocks", "u8"),
        ("source", "u8"),
        ("units", "i8"),
        ("units_per_chunk", "i4"),
        ("block_size", "i4"),
        ("segments", "i4"),
        ("slabs_per_unit", "i4"),
        ("part", PART, MAX_SEGMENTS),
        ("segment", SEGMENT, MAX_SEGMENTS),
    ]
)

TABLE_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}


@dataclass(frozen=True)
class DeviceTable:
    """A cos/sin table on the device. ``stride`` is elements from row to row, ``width`` those of a row."""

    pointer: int
    stride: int
    width: int
    dtype: str


@dataclass(frozen=True)
class LoweredSegment:
    """A segment for the kernel.

    Attributes
    ----------
    fields : dict
        Values of `SEGMENT` except ``slabs``.
    slabs : array of `SLAB`
        In order of ``staged``.
    rows : list of int
        For each slab its row of the staged object, counted over planes and layers.
    vectors : bool
        Whether whole vectors may be moved, if sources are aligned to them.
    """

    fields: dict[str, int]
    slabs: NDArray[Any]
    rows: list[int]
    vectors: bool

    def tiles(self, tokens: int) -> int:
        """Blocks of threads that cover the items of so many tokens."""
        return -(-tokens * self.fields["heads"] * self.fields["items"] // THREADS)

    def slab_range(self, first_row: int, end_row: int) -> tuple[int, int]:
        """Which slabs lie in rows ``[first_row, end_row)`` of the object: the first, and how many."""
        first = bisect_left(self.rows, first_row)
        return first, bisect_left(self.rows, end_row) - first


def vector_bytes(itemsize: int) -> int:
    """Bytes of one of the kernel's vectors."""
    return 8 if itemsize == 1 else 16


def lower(
    layout: PagedLayout, segments: Sequence[Segment], tokens: int, tables: Sequence[DeviceTable], *, elements: bool
) -> list[LoweredSegment]:
    """The segments of a group as the kernel takes them.

    ``elements`` forgoes vectors, for sources that are not aligned.
    """
    lowered = []
    for segment in segments:
        whole = not elements and _vectors(layout, segment, tokens)
        size = vector_bytes(layout.itemsize) // layout.itemsize
        if not whole:
            lowered.append(_lower(layout, segment, tokens, tables, 0))
        elif segment.operation is not Operation.HALVES and (segment.width // size) % 2 and segment.width > size:
            # An even number of vectors goes in pairs, the odd one alone.
            cut = segment.width - size
            lowered.append(_lower(layout, _slice(segment, 0, cut), tokens, tables, size))
            lowered.append(_lower(layout, _slice(segment, cut, size), tokens, tables, size, column=cut))
        else:
            lowered.append(_lower(layout, segment, tokens, tables, size))
    return lowered


def _slice(segment: Segment, start: int, width: int) -> Segment:
    return Segment(segment.plane, segment.start + start, width, segment.operation, segment.table)


def _vectors(layout: PagedLayout, segment: Segment, tokens: int) -> bool:
    plane, size = segment.plane, layout.itemsize
    vector = vector_bytes(size)
    half = segment.width // 2 if segment.operation is Operation.HALVES else segment.width
    lengths = (
        plane.block_stride,
        plane.token_stride,
        plane.head_stride,
        segment.start * size,
        half * size,
        layout.hidden * size,
        plane.source_column * size,
        plane.source_head_stride * size,
    )
    return plane.element_stride == size and not any(length % vector for length in (*lengths, *plane.pointers))


def _lower(
    layout: PagedLayout, segment: Segment, tokens: int, tables: Sequence[DeviceTable], vector: int, column: int = 0
) -> LoweredSegment:
    """Lower one segment.

    ``vector`` is the elements of one, or 0 to move single ones; ``column`` where in a cut rotation the segment begins.
    """
    plane, size, width = segment.plane, layout.itemsize, segment.width
    half = width // 2
    if segment.operation is Operation.HALVES:
        step, partner = vector or 1, half
        items = half // step
    elif segment.operation is Operation.PAIRS and not vector:
        step, partner, items = 2, 1, half
    else:
        step = vector or 1
        items = width // step
        partner = half if items % 2 == 0 else 0
        items = items // 2 if partner else items
    table = tables[segment.table] if segment.table is not None else None
    order = sorted(range(len(plane.layers)), key=lambda i: plane.layers[i])
    slabs = np.zeros(len(order), dtype=SLAB)
    rows = []
    for index, i in enumerate(order):
        row = plane.source_plane * layout.num_layers + plane.layers[i]
        rows.append(row)
        slabs[index] = (
            plane.pointers[i] + segment.start * plane.element_stride,
            (row * tokens * layout.hidden + plane.source_column + segment.start) * size,
        )
    fields = {
        "block_stride": plane.block_stride,
        "token_stride": plane.token_stride,
        "head_stride": plane.head_stride,
        "element_stride": plane.element_stride,
        "staged_token_stride": layout.hidden * size,
        "staged_head_stride": plane.source_head_stride * size,
        "table": 0 if table is None else table.pointer + column // 2 * DTYPES[table.dtype].itemsize,
        "table_stride": 0 if table is None else table.stride,
        "table_kind": 0 if table is None else TABLE_KINDS[table.dtype],
        "operation": segment.operation.value,
        "heads": plane.heads,
        "items": items,
        "step": step,
        "partner": partner,
        "half": 0 if table is None else table.width // 2,
    }
    return LoweredSegment(fields, slabs, rows, bool(vector))
