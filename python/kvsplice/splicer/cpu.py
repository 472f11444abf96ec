"""Splices in host memory, with numpy. It is also what the kernels are checked against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvsplice.arrays import CPU, strided_view
from kvsplice.dtypes import DTYPES, largest_finite
from kvsplice.rope import UNROTATED
from kvsplice.splicer.segments import Operation, Segment

if TYPE_CHECKING:
    from kvsplice.splicer.plan import Plan, Planner

_BITS = {size: np.dtype(f"uint{8 * size}") for size in (1, 2, 4)}

Factors = tuple[NDArray[np.float32], NDArray[np.float32]]


class CpuBackend:
    """Writes plans into paged caches in host memory."""

    def __init__(self, planner: Planner) -> None:
        for group, layout in enumerate(planner.layouts):
            if layout.device != CPU:
                raise ValueError(f"layouts[{group}] is on {layout.device}; the CPU backend writes to host memory")
        self.planner = planner

    def check(self, plan: Plan) -> None:
        """Raise ValueError if a source is not in host memory."""
        for sources in plan.sources:
            for index, source in enumerate(sources):
                if source.device not in {None, CPU} or source.location == "device":
                    raise ValueError(f"chunks[{index}].source is on a GPU, the paged cache is not")

    def write(self, plan: Plan) -> None:
        """Write all chunks of a plan."""
        for group, layout in enumerate(self.planner.layouts):
            table = plan.block_tables[group]
            for index, source in enumerate(plan.sources[group]):
                old, cur, offset, count = (
                    int(c[index]) for c in (plan.old_start, plan.cur_start, plan.offset, plan.count)
                )
                positions = np.arange(cur, cur + count)
                cells = table[positions // layout.block_size].astype(np.int64), positions % layout.block_size
                factors: dict[int, Factors] = {}
                for segment in self.planner.segments[group]:
                    moved = None
                    if segment.table is not None and old != cur:
                        if segment.table not in factors:
                            factors[segment.table] = self._factors(segment.table, old, positions)
                        moved = factors[segment.table]
                    self._write_segment(group, segment, source.pointer, (offset, count), cells, moved)

    def _factors(self, table: int, old: int, positions: NDArray[np.int64]) -> Factors:
        rope = self.planner.rope
        assert rope is not None
        old_positions = None if old == UNROTATED else np.arange(old, old + len(positions))
        return rope.factors(table, old_positions, positions)

    def _write_segment(
        self,
        group: int,
        segment: Segment,
        source: int,
        taken: tuple[int, int],
        cells: tuple[NDArray[np.int64], NDArray[np.int64]],
        factors: Factors | None,
    ) -> None:
        layout, plane = self.planner.layouts[group], segment.plane
        size = layout.itemsize
        bits = _BITS[size]
        _, layers, tokens, hidden = self.planner.shapes[group]
        offset, count = taken
        for layer, pointer in zip(plane.layers, plane.pointers, strict=True):
            row = (plane.source_plane * layers + layer) * tokens + offset
            column = plane.source_column + segment.start
            staged = strided_view(
                source + (row * hidden + column) * size,
                (count, plane.heads, segment.width),
                (hidden * size, plane.source_head_stride * size, size),
                bits,
            )
            paged = strided_view(
                pointer + segment.start * plane.element_stride,
                (layout.num_blocks, layout.block_size, plane.heads, segment.width),
                (plane.block_stride, plane.token_stride, plane.head_stride, plane.element_stride),
                bits,
            )
            paged[cells] = staged if factors is None else _rotate(staged, layout.dtype, segment.operation, factors)


def _rotate(staged: NDArray[Any], dtype: str, operation: Operation, factors: Factors) -> NDArray[Any]:
    """Rotated elements ``[tokens, heads, width]``, as bits."""
    # NaN is what rotating an infinity gives, here as on a GPU.
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.ascontiguousarray(staged).view(DTYPES[dtype]).astype(np.float32)
        half = values.shape[-1] // 2
        first, second = (
            (slice(0, half), slice(half, None))
            if operation is Operation.HALVES
            else (slice(0, None, 2), slice(1, None, 2))
        )
        re, im = (factor[:, None, :] for factor in factors)
        x, y = values[..., first], values[..., second]
        turned = np.empty_like(values)
        turned[..., first] = x * re - y * im
        turned[..., second] = x * im + y * re
        if dtype.startswith("float8"):
            largest = np.float32(largest_finite(dtype))
            turned = np.clip(turned, -largest, largest)
        return turned.astype(DTYPES[dtype]).view(staged.dtype)
