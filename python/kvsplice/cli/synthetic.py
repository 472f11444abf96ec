"""KV that follows from a token, its position and its scope alone, so that KV from elsewhere can be checked exactly."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

from kvsplice.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["MODEL_DTYPES", "Deviation", "SyntheticModel"]

MODEL_DTYPES = ("float32", "float16", "bfloat16")

_PIECE = 1 << 22
"""Elements that are computed at once: bounds the memory of a long prompt."""

_POISON = 0x7B
"""Fills what has to be written: as a float of any dtype, far outside of what the model computes."""


class Deviation(NamedTuple):
    """How far KV in a paged cache is from what the model computes."""

    keys: float
    """The largest absolute error of an element of K."""
    wrong_values: int
    """Elements of V that differ."""


class SyntheticModel:
    """Stands in for a model whose KV of a token does not depend on the text before it.

    V is a hash of token, scope, layer, head and element, uniform in [-1, 1); K is another one, rotated to the token's
    position (NeoX, base 10000). The paged cache's arrays are ``[blocks, 2, block_size, heads, head_size]`` per layer.

    Parameters
    ----------
    arrays : sequence of array
        Of numpy or CuPy; bfloat16 as its bits where the library has no such dtype.
    dtype : str
        One of `MODEL_DTYPES`.
    positions : int
        The longest prompt.
    xp : module
        numpy or cupy.

    Attributes
    ----------
    bound : float
        64 units of the dtype's rounding: what K may be off after it was moved again and again.
    rope_table : array ``[positions, head_size]``, float32
        Cosines, then sines.
    """

    def __init__(self, arrays: Sequence[Any], dtype: str, positions: int, xp: Any = np) -> None:
        self.bound = 64 * float(ml_dtypes.finfo(DTYPES[dtype]).eps)  # type: ignore[no-untyped-call]
        _, _, self._block_size, self._heads, self._size = arrays[0].shape
        angles = np.arange(positions)[:, None] * 10000.0 ** -(np.arange(self._size // 2) / (self._size // 2))
        self.rope_table: NDArray[np.float32] = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self._arrays = arrays
        self._xp = xp
        self._bits = np.dtype(f"uint{8 * DTYPES[dtype].itemsize}")
        self._dtype = dtype
        self._cos, self._sin = xp.split(xp.asarray(self.rope_table).astype(xp.float64), 2, axis=1)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with what no model computes."""
        if not blocks:
            return
        at = self._xp.asarray(blocks)
        for array in self._arrays:
            array.view(self._bits)[at] = int.from_bytes(bytes([_POISON]) * self._bits.itemsize, "little")

    def is_poison(self, blocks: Sequence[int]) -> bool:
        """Whether nothing wrote into these blocks since."""
        at = self._xp.asarray(blocks)
        return all(bool((array.view(np.uint8)[at] == _POISON).all()) for array in self._arrays)

    def compute(
        self, tokens: NDArray[np.uint32], positions: NDArray[np.int64], blocks: Sequence[int], scope: bytes
    ) -> None:
        """Write the KV of tokens at these positions of a prompt into the prompt's blocks."""
        for piece in self._pieces(len(positions)):
            cells = self._cells(positions[piece], blocks)
            for layer, array in enumerate(self._arrays):
                keys, values = self._kv(tokens[piece], positions[piece], layer, scope)
                for part, wanted in enumerate((keys, values)):
                    array.view(self._bits)[cells[0], part, cells[1]] = self._rounded(wanted)

    def check(self, tokens: NDArray[np.uint32], blocks: Sequence[int], scope: bytes) -> Deviation:
        """Compare the KV of a whole prompt."""
        xp, error, wrong = self._xp, 0.0, 0
        positions = np.arange(len(tokens))
        for piece in self._pieces(len(tokens)):
            cells = self._cells(positions[piece], blocks)
            for layer, array in enumerate(self._arrays):
                keys, values = self._kv(tokens[piece], positions[piece], layer, scope)
                held = array.view(self._bits)
                distance = xp.abs(self._floats(held[cells[0], 0, cells[1]]) - keys).max()
                # A NaN is as far off as can be.
                error = max(error, float(xp.where(xp.isnan(distance), xp.inf, distance)))
                wrong += int((held[cells[0], 1, cells[1]] != self._rounded(values)).sum())
        return Deviation(error, wrong)

    def _pieces(self, tokens: int) -> Iterator[slice]:
        step = max(1, _PIECE // (self._heads * self._size))
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))

    def _cells(self, positions: NDArray[np.int64], blocks: Sequence[int]) -> tuple[Any, Any]:
        xp, size = self._xp, self._block_size
        return xp.asarray(np.asarray(blocks)[positions // size]), xp.asarray(positions % size)

    def _kv(
        self, tokens: NDArray[np.uint32], positions: NDArray[np.int64], layer: int, scope: bytes
    ) -> tuple[Any, Any]:
        """K in float64 and V in float32, ``[tokens, heads, head_size]``."""
        xp = self._xp
        seed = np.uint32(zlib.crc32(scope))
        columns = xp.arange(2 * self._heads * self._size, dtype=xp.uint32) + xp.uint32(layer << 16)
        drawn = _uniform(xp.asarray(tokens ^ seed)[:, None], columns[None, :])
        keys, values = xp.split(drawn.reshape(len(tokens), 2 * self._heads, self._size), 2, axis=1)
        rows = xp.asarray(positions)
        cos, sin = self._cos[rows][:, None], self._sin[rows][:, None]
        one, other = xp.split(keys.astype(xp.float64), 2, axis=-1)
        return xp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1), values

    def _rounded(self, numbers: Any) -> Any:
        """To the cache's dtype, as bits."""
        if self._dtype != "bfloat16":
            return numbers.astype(self._dtype).view(self._bits)
        wide = numbers.astype(np.float32).view(np.uint32)
        # To the nearest, ties to even: the upper half of a float32.
        return ((wide + np.uint32(0x7FFF) + (wide >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)

    def _floats(self, bits: Any) -> Any:
        if self._dtype != "bfloat16":
            return bits.view(self._dtype).astype(np.float64)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _uniform(rows: Any, columns: Any) -> Any:
    """A hash of two integers as a float32 in [-1, 1): Wellons' ``lowbias32`` over a sum of odd multiples."""
    x = rows * np.uint32(0x9E3779B1) + columns * np.uint32(0x85EBCA77)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
