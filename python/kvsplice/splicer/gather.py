"""Reads KV out of a paged cache, into stored objects: what a splice without rope undoes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.arrays import strided_view
from kvsplice.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvsplice.splicer.layout import PagedLayout

__all__ = ["gather"]


def gather(
    layout: PagedLayout, block_table: Sequence[int], start: int, tokens: int, out: NDArray[Any] | None = None
) -> Any:
    """The KV of a range of tokens of one group of layers.

    Parameters
    ----------
    layout : PagedLayout
    block_table : sequence of int
        The token at position ``p`` is in slot ``p % block_size`` of block ``block_table[p // block_size]``.
    start, tokens : int
        The range.
    out : array, optional
        Host memory to copy to, of the result's size; pinned, if the copy is not to block.

    Returns
    -------
    array ``[kv_size, layers, tokens, hidden]``
        In host memory, of the layout's dtype. On a GPU the copy is made on CuPy's current stream and has ended.

    Raises
    ------
    ValueError
        If the range reaches beyond the block table, or a block does not exist.
    """
    blocks, offsets = _slots(layout, block_table, start, tokens)
    shape = layout.object_shape(tokens)
    bits = np.dtype(f"uint{8 * layout.itemsize}")
    if layout.device.kind == "cpu":
        staged = np.zeros(shape, bits) if out is None else out.view(bits).reshape(shape)
        _copy(layout, (blocks, offsets), staged, strided_view, bits)
        return staged.view(DTYPES[layout.dtype])
    import cupy

    def view(pointer: int, extents: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        span = sum((extent - 1) * step for extent, step in zip(extents, strides, strict=True)) + dtype.itemsize
        memory = cupy.cuda.UnownedMemory(pointer, span, layout, layout.device.index)
        return cupy.ndarray(extents, dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)

    with cupy.cuda.Device(layout.device.index):
        staged = cupy.zeros(shape, bits)
        _copy(layout, (cupy.asarray(blocks), cupy.asarray(offsets)), staged, view, bits)
        host = staged.get(out=None if out is None else out.view(bits).reshape(shape))
    return host.view(DTYPES[layout.dtype])


def _slots(
    layout: PagedLayout, block_table: Sequence[int], start: int, tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.asarray(block_table, np.int64)
    if start < 0 or start + tokens > len(table) * layout.block_size:
        raise ValueError(
            f"block_table: tokens {start} to {start + tokens} are beyond its {len(table)} blocks of {layout.block_size}"
        )
    positions = np.arange(start, start + tokens)
    blocks = table[positions // layout.block_size]
    if tokens and not (blocks.min() >= 0 and blocks.max() < layout.num_blocks):
        raise ValueError(f"block_table: a block is none of {layout.num_blocks}")
    return blocks, positions % layout.block_size


def _copy(layout: PagedLayout, cells: tuple[Any, Any], staged: Any, view: Any, bits: np.dtype[Any]) -> None:
    for plane in layout.planes:
        columns = plane.source_column + np.add.outer(
            np.arange(plane.heads) * plane.source_head_stride, np.arange(plane.width)
        )
        for layer, pointer in zip(plane.layers, plane.pointers, strict=True):
            paged = view(
                pointer,
                (layout.num_blocks, layout.block_size, plane.heads, plane.width),
                (plane.block_stride, plane.token_stride, plane.head_stride, plane.element_stride),
                bits,
            )
            rows = staged[plane.source_plane, layer]
            first = int(columns[0, 0])
            if plane.heads == 1 or plane.source_head_stride == plane.width:
                rows[:, first : first + columns.size] = paged[cells].reshape(len(rows), columns.size)
            else:
                for head in range(plane.heads):
                    at = int(columns[head, 0])
                    rows[:, at : at + plane.width] = paged[(*cells, head)]
