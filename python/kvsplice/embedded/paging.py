"""A paged KV cache, and the blocks of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.dtypes import DTYPES, dtype_name
from kvsplice.splicer import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockAllocator", "PagedCache"]


class PagedCache:
    """One array per layer, ``[blocks, 2, block_size, heads, head_size]``, zero at first.

    Parameters
    ----------
    layers, blocks, block_size, heads, head_size : int
    dtype : str
        See `kvsplice.dtypes.DTYPES`.
    framework : str
        ``numpy``, ``torch`` or ``cupy``.
    device : str, optional
        ``cpu``, ``cuda`` or ``cuda:N``, for torch; CuPy takes its current device.
    """

    def __init__(
        self,
        layers: int,
        blocks: int,
        *,
        block_size: int = 16,
        heads: int,
        head_size: int,
        dtype: str = "float32",
        framework: str = "numpy",
        device: str = "cpu",
    ) -> None:
        name = dtype_name(dtype)
        shape = (blocks, 2, block_size, heads, head_size)
        self.arrays: list[Any]
        if framework == "numpy":
            self.arrays = [np.zeros(shape, DTYPES[name]) for _ in range(layers)]
        elif framework == "torch":
            import torch

            self.arrays = [torch.zeros(shape, dtype=getattr(torch, name), device=device) for _ in range(layers)]
        elif framework == "cupy":
            import cupy

            # CuPy has no bfloat16 and no fp8: the layout is told.
            bits = np.dtype(f"uint{8 * DTYPES[name].itemsize}")
            self.arrays = [cupy.zeros(shape, bits) for _ in range(layers)]
        else:
            raise ValueError(f"framework: {framework!r} is none of numpy, torch, cupy")
        self.layout = PagedLayout.from_format("NL_X_NB_TWO_BS_NH_HS", self.arrays, dtype=name)
        self.allocator = BlockAllocator(blocks)


class BlockAllocator:
    """Hands out blocks of a paged cache. Not thread-safe."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._used: set[int] = set()

    def __len__(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """So many blocks.

        Raises
        ------
        ValueError
            If fewer are free; none is taken then.
        """
        if count > len(self._free):
            raise ValueError(f"count: {count} blocks are wanted and {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

        Raises
        ------
        ValueError
            If one is not allocated, or is given twice; none is freed then.
        """
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise ValueError("blocks: one is not allocated, or is given twice")
        self._used.difference_update(blocks)
        self._free.extend(blocks)
