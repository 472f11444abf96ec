"""A small splice whose outcome is known, to see that this machine's backend works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kvsplice.dtypes import DTYPES
from kvsplice.rope import RopeTables
from kvsplice.splicer.chunk import Chunk, StagedMemory
from kvsplice.splicer.cuda import require_cupy
from kvsplice.splicer.layout import PagedLayout
from kvsplice.splicer.splicer import Splicer

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ROTATABLE = tuple(name for name in DTYPES if name != "uint8")
"""The element types that have kernels of their own."""

_LAYERS, _BLOCKS, _BLOCK_SIZE, _HEADS, _SIZE, _TOKENS = 2, 4, 8, 2, 32, 16
_TABLE = [2, 0]
_OLD, _OFFSET, _COUNT = 21, 3, 9
"""Where the tokens stood. They go to positions 0 to 8: a whole block, and one token of another."""


def on_cpu(dtype: str) -> None:
    """Splice in host memory.

    Raises
    ------
    RuntimeError
        If the cache does not hold what it should.
    """
    _check(dtype, "cpu", place=np.copy, stage=np.copy, fetch=np.copy)


def on_gpu(dtype: str, device: int) -> None:
    """Splice on a GPU: from its memory, staged, and by reading pinned host memory.

    Raises
    ------
    RuntimeError
        If CuPy or the GPU is missing, the kernels do not load, or the cache does not hold what it should.
    """
    cupy = require_cupy()

    def pin(stored: NDArray[Any]) -> StagedMemory:
        memory = cupy.cuda.alloc_pinned_memory(stored.nbytes)
        np.frombuffer(memory, dtype=np.uint8, count=stored.size)[...] = stored
        kept.append(memory)
        return StagedMemory(memory.ptr, stored.nbytes, location="pinned")

    def on_device(stored: NDArray[Any]) -> StagedMemory:
        kept.append(cupy.asarray(stored))
        return StagedMemory(kept[-1].data.ptr, stored.nbytes, location="device")

    kept: list[Any] = []
    with cupy.cuda.Device(device):
        _check(dtype, "auto", place=cupy.asarray, stage=on_device, fetch=cupy.asnumpy)
        for path in ("staged", "direct"):
            _check(dtype, path, place=cupy.asarray, stage=pin, fetch=cupy.asnumpy)


def _check(
    dtype: str,
    path: str,
    place: Callable[[NDArray[Any]], Any],
    stage: Callable[[NDArray[Any]], Any],
    fetch: Callable[[Any], NDArray[Any]],
) -> None:
    rng = np.random.default_rng(0)
    kind, bits = DTYPES[dtype], np.dtype(f"u{DTYPES[dtype].itemsize}")
    angles = np.arange(64)[:, None] * 100.0 ** -(np.arange(_SIZE // 2) / (_SIZE // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    stored = rng.normal(0, 2, (2, _LAYERS, _TOKENS, _HEADS * _SIZE)).astype(np.float32).astype(kind)
    before = rng.integers(0, 255, (_LAYERS, _BLOCKS, 2, _BLOCK_SIZE, _HEADS, _SIZE)).astype(bits)
    caches = [place(layer) for layer in before]
    layout = PagedLayout.from_format("NL_X_NB_TWO_BS_NH_HS", caches, dtype=dtype)
    splicer = Splicer(layout, RopeTables([table], _SIZE), chunk_tokens=_TOKENS)
    chunk = Chunk(stage(stored.reshape(-1).view(np.uint8)), _OLD, 0, _OFFSET, _COUNT)
    result = splicer.splice([chunk], _TABLE, path="auto" if path == "cpu" else path)
    if result.event is not None:
        result.event.synchronize()
    after = np.stack([fetch(cache) for cache in caches])
    splicer.close()
    _compare(dtype, path, stored, before, after)


def _compare(dtype: str, path: str, stored: NDArray[Any], before: NDArray[Any], after: NDArray[Any]) -> None:
    """K against the rotation by the distance, in float64; everything else bit by bit."""
    kind = DTYPES[dtype]
    moved = stored[:, :, _OFFSET : _OFFSET + _COUNT].reshape(2, _LAYERS, _COUNT, _HEADS, _SIZE)
    positions = np.arange(_COUNT)
    blocks, slots = np.array(_TABLE)[positions // _BLOCK_SIZE], positions % _BLOCK_SIZE
    expected = before.copy()
    expected[:, blocks, 1, slots] = moved[1].view(before.dtype)
    found = after[:, blocks, 0, slots].view(kind).astype(np.float64)
    expected[:, blocks, 0, slots] = after[:, blocks, 0, slots]
    if not np.array_equal(after, expected):
        raise RuntimeError(f"{dtype}, {path}: V or bytes of other tokens are not as they should be")
    keys = moved[0].astype(np.float64)
    pairs = keys[..., : _SIZE // 2] + 1j * keys[..., _SIZE // 2 :]
    turned = pairs * np.exp(-1j * _OLD * 100.0 ** -(np.arange(_SIZE // 2) / (_SIZE // 2)))
    wanted = np.concatenate([turned.real, turned.imag], axis=-1)
    precision = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    allowed = np.abs(wanted) * precision.eps + precision.smallest_subnormal + 1e-5 * np.abs(keys).max()
    error = np.abs(found - wanted)
    if not (error <= allowed).all():
        raise RuntimeError(f"{dtype}, {path}: K is off by {np.nanmax(error):.3g}")
