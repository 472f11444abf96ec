"""Planes cut into runs of elements that are treated alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsplice.rope import GroupRope, RopeTables
    from kvsplice.splicer.layout import PagedLayout, Plane


class Operation(Enum):
    """What happens to a run of elements."""

    COPY = 0
    HALVES = 1
    PAIRS = 2


@dataclass(frozen=True)
class Segment:
    """Elements ``[start, start + width)`` of every head of a plane."""

    plane: Plane
    start: int
    width: int
    operation: Operation
    table: int | None


def cut(layout: PagedLayout, rope: RopeTables | None, group: int) -> tuple[Segment, ...]:
    """The segments of a group of layers.

    Raises
    ------
    ValueError
        If the rope does not fit the layout.
    """
    turned = rope.for_group(group) if rope is not None else None
    if rope is None or turned is None:
        return tuple(Segment(plane, 0, plane.width, Operation.COPY, None) for plane in layout.planes)
    if layout.unrotatable is not None:
        raise ValueError(f"layouts[{group}]: {layout.format} cannot be rotated: {layout.unrotatable}")
    if layout.latent and not rope.has_window(group) and turned.width != layout.hidden:
        raise ValueError(
            f"group_windows: layouts[{group}] has one row of {layout.hidden} elements for all heads, of which "
            f"{turned.width} carry rope; say which"
        )
    segments: list[Segment] = []
    rotated = False
    for plane in layout.planes:
        if not layout.latent and plane.width != rope.head_size:
            raise ValueError(f"head_size: {rope.head_size}, but layouts[{group}] has heads of {plane.width} elements")
        start = turned.offset - plane.source_column if layout.latent else turned.offset
        if not plane.keys or start < 0 or start + turned.width > plane.width:
            segments.append(Segment(plane, 0, plane.width, Operation.COPY, None))
            continue
        rotated = True
        segments += _around(plane, start, turned)
    if not rotated and any(plane.keys for plane in layout.planes):
        raise ValueError(
            f"group_windows: elements {turned.offset} to {turned.offset + turned.width} do not lie in one plane of "
            f"layouts[{group}], whose widths are {', '.join(str(plane.width) for plane in layout.planes)}"
        )
    return tuple(segments)


def _around(plane: Plane, start: int, rope: GroupRope) -> list[Segment]:
    end = start + rope.width
    parts = [
        Segment(plane, 0, start, Operation.COPY, None),
        Segment(plane, start, rope.width, Operation.HALVES if rope.is_neox else Operation.PAIRS, rope.table),
        Segment(plane, end, plane.width - end, Operation.COPY, None),
    ]
    return [part for part in parts if part.width]
