"""The splice in plain loops and float64: one cell of a paged cache at a time, by each format's own indexing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint8": np.dtype(np.uint8),
}
BITS = {name: np.dtype(f"uint{8 * dtype.itemsize}") for name, dtype in NUMPY.items()}
SPLIT = {0, 1, 2, 4, 6, 7, 8, 9, 15, 16}
FUSED = {10, 11, 12, 13}
LATENT = {3, 5, 14, 17}


@dataclass(frozen=True)
class Geometry:
    """One group of layers. ``planes`` are the widths of format 17, ``keys`` which arrays of format 18 are K."""

    format: int
    dtype: str
    layers: int
    blocks: int
    block_size: int
    heads: int
    head_size: int
    planes: tuple[int, ...] = ()
    keys: tuple[bool, ...] = ()

    @property
    def hidden(self) -> int:
        if self.format == 17:
            return sum(self.planes)
        if self.format in LATENT:
            return self.head_size
        return self.heads * self.head_size * (2 if self.format in FUSED else 1)

    @property
    def kv_size(self) -> int:
        return 2 if self.format in SPLIT else 1

    def object_shape(self, tokens: int) -> tuple[int, ...]:
        return (self.kv_size, self.layers, tokens, self.hidden)

    def shapes(self) -> Any:
        """The shape of each array, nested like the arrays."""
        n, nb, bs, nh, hs = self.layers, self.blocks, self.block_size, self.heads, self.head_size
        return {
            0: (nb, n, 2, bs, nh, hs),
            1: [(2, nb, bs, nh, hs)] * n,
            2: [(nb, 2, bs, nh, hs)] * n,
            3: [(nb, bs, hs)] * n,
            4: [[(nb * bs, nh, hs)] * n] * 2,
            5: [(nb * bs, 1, hs)] * n,
            6: [(2, nb, nh, bs, hs)] * n,
            7: [(nb, 2, nh, bs, hs)] * n,
            8: (nb, n, 2, nh, bs, hs),
            9: [[(nb, bs, nh, hs)] * n] * 2,
            10: [(nb, nh, bs, 2, hs)] * n,
            11: [(nb, bs, nh, 2, hs)] * n,
            12: [(nb, nh, bs, 2 * hs)] * n,
            13: [(nb, bs, nh, 2 * hs)] * n,
            14: [(nb, bs, 132)] * n,
            15: [(2, nb, nh, 1, bs, hs)] * n,
            16: [[(nb, bs, nh, hs)] * 2] * n,
            17: [[(nb, bs, 1, width) for width in self.planes]] * n,
            18: [(nb, bs, nh, hs)] * n,
        }[self.format]

    def cell(  # noqa: PLR0911, PLR0912
        self, caches: Any, kv: int, layer: int, block: int, offset: int, head: int, e: int
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        """The array and the index of one element."""
        b, o, h, n, bs = block, offset, head, layer, self.block_size
        match self.format:
            case 0:
                return caches, (b, n, kv, o, h, e)
            case 1:
                return caches[n], (kv, b, o, h, e)
            case 2:
                return caches[n], (b, kv, o, h, e)
            case 3:
                return caches[n], (b, o, e)
            case 4:
                return caches[kv][n], (b * bs + o, h, e)
            case 5:
                return caches[n], (b * bs + o, 0, e)
            case 6:
                return caches[n], (kv, b, h, o, e)
            case 7:
                return caches[n], (b, kv, h, o, e)
            case 8:
                return caches, (b, n, kv, h, o, e)
            case 9:
                return caches[kv][n], (b, o, h, e)
            case 10:
                return caches[n], (b, h, o, kv, e)
            case 11:
                return caches[n], (b, o, h, kv, e)
            case 12:
                return caches[n], (b, h, o, kv * self.head_size + e)
            case 13:
                return caches[n], (b, o, h, kv * self.head_size + e)
            case 14:
                # Values of all tokens of a block, then the scales of all.
                at = o * 128 + e if e < 128 else bs * 128 + o * 4 + (e - 128)
                return caches[n], (b, at // 132, at % 132)
            case 15:
                return caches[n], (kv, b, h, 0, o, e)
            case 16:
                return caches[n][kv], (b, o, h, e)
            case 17:
                plane = 0
                while e >= self.planes[plane]:
                    e -= self.planes[plane]
                    plane += 1
                return caches[n][plane], (b, o, 0, e)
            case 18:
                return caches[n], (b, o, h, e)
        raise AssertionError(self.format)

    def staged(self, kv: int, layer: int, token: int, head: int, e: int) -> tuple[int, ...]:
        """The index of one element in a staged object."""
        if self.format in SPLIT:
            return (kv, layer, token, head * self.head_size + e)
        if self.format in FUSED:
            return (0, layer, token, (head * 2 + kv) * self.head_size + e)
        return (0, layer, token, head * self.head_size + e)

    def parts(self) -> list[tuple[int, int, int, bool]]:
        """(K or V, heads, elements, whether K) of a token in a layer."""
        if self.format in SPLIT | FUSED:
            return [(0, self.heads, self.head_size, True), (1, self.heads, self.head_size, False)]
        if self.format in LATENT:
            return [(0, 1, self.hidden, True)]
        return [(0, self.heads, self.head_size, True)]


@dataclass(frozen=True)
class Rope:
    """The rope of one group: a table in float64 and the elements that it turns."""

    table: np.ndarray
    offset: int
    is_neox: bool

    @property
    def width(self) -> int:
        return self.table.shape[1]

    def partner(self, e: int) -> tuple[int, int, int] | None:
        """(first element, second element, frequency) of the pair that ``e`` is in."""
        i = e - self.offset
        if not 0 <= i < self.width:
            return None
        half = self.width // 2
        frequency = i % half if self.is_neox else i // 2
        first = frequency if self.is_neox else 2 * frequency
        second = frequency + half if self.is_neox else 2 * frequency + 1
        return self.offset + first, self.offset + second, frequency

    def factor(self, old: int | None, new: int, frequency: int) -> complex:
        half = self.width // 2
        target = complex(self.table[new, frequency], self.table[new, half + frequency])
        if old is None:
            return target
        stored = complex(self.table[old, frequency], self.table[old, half + frequency])
        return target / stored


def round_to(value: float, dtype: str) -> np.generic:
    """The nearest value of an element type; 8-bit floats saturate."""
    if dtype.startswith("float8"):
        largest = float(ml_dtypes.finfo(NUMPY[dtype]).max)
        value = min(max(value, -largest), largest)
    with np.errstate(over="ignore"):
        return np.float64(value).astype(NUMPY[dtype])


def write(
    geometry: Geometry, caches: Any, obj: np.ndarray, chunk: Any, block_table: list[int], rope: Rope | None
) -> list[Any]:
    """Write one chunk into caches of bits.

    Rotated cells are returned instead: (array, index, lowest, highest allowed value).
    """
    bounded = []
    values = obj.view(NUMPY[geometry.dtype])
    for t in range(chunk.count):
        position = chunk.cur_start + t
        block, offset = block_table[position // geometry.block_size], position % geometry.block_size
        old = None if chunk.old_start is None else chunk.old_start + t
        for layer in range(geometry.layers):
            for kv, heads, elements, keys in geometry.parts():
                is_key = geometry.keys[layer] if geometry.keys else keys
                for head in range(heads):
                    for e in range(elements):
                        array, index = geometry.cell(caches, kv, layer, block, offset, head, e)
                        source = geometry.staged(kv, layer, chunk.offset + t, head, e)
                        pair = rope.partner(e) if rope is not None and is_key and old != position else None
                        if pair is None:
                            array[index] = obj[source]
                            continue
                        first, second, frequency = pair
                        x, y = (
                            float(values[geometry.staged(kv, layer, chunk.offset + t, head, i)])
                            for i in (first, second)
                        )
                        factor = rope.factor(old, position, frequency)
                        turned = complex(x, y) * factor
                        exact = turned.real if e == first else turned.imag
                        slack = 8 * float(np.finfo(np.float32).eps) * (abs(x) + abs(y)) * abs(factor)
                        bounded.append(
                            (
                                array,
                                index,
                                round_to(exact - slack, geometry.dtype),
                                round_to(exact + slack, geometry.dtype),
                            )
                        )
    return bounded


def read(geometry: Geometry, caches: Any, block_table: list[int], start: int, tokens: int) -> np.ndarray:
    """The staged object of a range of tokens, as bits."""
    obj = np.zeros(geometry.object_shape(tokens), f"uint{8 * NUMPY[geometry.dtype].itemsize}")
    for t in range(tokens):
        block, offset = block_table[(start + t) // geometry.block_size], (start + t) % geometry.block_size
        for layer in range(geometry.layers):
            for kv, heads, elements, _ in geometry.parts():
                for head in range(heads):
                    for e in range(elements):
                        array, index = geometry.cell(caches, kv, layer, block, offset, head, e)
                        obj[geometry.staged(kv, layer, t, head, e)] = array[index]
    return obj
