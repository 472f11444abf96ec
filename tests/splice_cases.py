"""Random splices, set up in host memory, and their comparison with the reference.

Where the arrays live is up to the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from kvsplice.splicer.gather import gather
from splice_reference import BITS, FUSED, LATENT, NUMPY, SPLIT, Geometry, Rope, read, write

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
TABLE_DTYPES = ("float32", "bfloat16", "float16")
MAX_POSITION = 64

Place = Callable[[np.ndarray, str], Any]
"""Brings an array of bits, which are elements of a dtype, to where a test wants it."""


@dataclass(frozen=True)
class GroupCase:
    geometry: Geometry
    rope: tuple[int, int] | None
    """Offset and width of what is rotated."""
    padding: tuple[int, ...]
    """Extra length of each array's axes, which belongs to others."""


@dataclass(frozen=True)
class Case:
    """A splice."""

    groups: tuple[GroupCase, ...]
    is_neox: bool
    table_dtype: str
    magnitude: float
    chunk_tokens: int
    chunks: tuple[tuple[int | None, int, int, int], ...]
    """Old start, current start, offset, count."""
    seed: int


@st.composite
def group_cases(draw: st.DrawFn, format: int | None = None, width: int | None = None) -> GroupCase:
    number = draw(st.integers(0, 18)) if format is None else format
    dtype = "uint8" if number == 14 else draw(st.sampled_from(DTYPES))
    layers = draw(st.integers(1, 3))
    block_size = draw(st.integers(1, 6))
    heads = 1 if number in LATENT else draw(st.integers(1, 3))
    head_size = draw(st.sampled_from([4, 6, 16, 20, 32])) if width is None else width
    planes: tuple[int, ...] = ()
    keys: tuple[bool, ...] = ()
    rope: tuple[int, int] | None = None
    rotated = draw(st.booleans()) and number != 14
    if number == 14:
        head_size = 132
    elif number == 17:
        planes = (draw(st.sampled_from([4, 16])), head_size)
        if rotated:
            rope = (planes[0], head_size)
    elif number in LATENT:
        content = draw(st.sampled_from([0, 4, 16, 30]))
        if rotated:
            rope = (content, head_size)
        head_size += content
    elif rotated:
        span = head_size if draw(st.booleans()) else draw(st.sampled_from([2, head_size // 4 * 2]))
        rope = (draw(st.sampled_from([0, head_size - span])), span)
    if number == 18:
        keys = tuple(draw(st.booleans()) for _ in range(layers))
    axes = {0: 6, 3: 3, 4: 3, 5: 3, 8: 6, 9: 4, 12: 4, 13: 4, 14: 3, 15: 6, 16: 4, 17: 4, 18: 4}.get(number, 5)
    padding = tuple(draw(st.sampled_from([0, 0, 1])) for _ in range(axes))
    if number == 14:
        padding = (padding[0], 0, 0)
    if draw(st.booleans()):
        # Padding that keeps rows aligned to 16 bytes, so that vectors are moved.
        padding = (*padding[:-1], 0)
    geometry = Geometry(number, dtype, layers, draw(st.integers(20, 24)), block_size, heads, head_size, planes, keys)
    return GroupCase(geometry, rope, padding)


@st.composite
def cases(draw: st.DrawFn, format: int | None = None) -> Case:
    first = draw(group_cases(format))
    groups = [first]
    if draw(st.integers(0, 3)) == 0:
        # Heads of one model are equally large; latent rows are not heads.
        other = draw(
            st.sampled_from(sorted(set(range(19)) - {14} - (LATENT if first.geometry.format not in LATENT else set())))
        )
        size = first.geometry.head_size if first.geometry.format not in LATENT | {14} else 16
        groups.append(draw(group_cases(other, size if other not in LATENT else None)))
    chunk_tokens = draw(st.integers(1, 9))
    chunks = []
    position = draw(st.integers(0, 7))
    for _ in range(draw(st.integers(0, 3))):
        offset = draw(st.integers(0, chunk_tokens - 1))
        count = draw(st.integers(1, chunk_tokens - offset))
        old = draw(st.sampled_from([None, position, *range(0, MAX_POSITION - chunk_tokens, 11)]))
        if (
            position + count > min(group.geometry.block_size for group in groups) * 20
            or position + count > MAX_POSITION
        ):
            break
        chunks.append((old, position, offset, count))
        position += count + draw(st.sampled_from([0, 0, 1, 5]))
    return Case(
        groups=tuple(groups),
        is_neox=draw(st.booleans()),
        table_dtype=draw(st.sampled_from(TABLE_DTYPES)),
        magnitude=draw(st.sampled_from([1.0, 1.37])),
        chunk_tokens=chunk_tokens,
        chunks=tuple(chunks),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def table(case: Case, width: int, base: float) -> np.ndarray:
    """A cos/sin table as an engine makes it."""
    frequencies = base ** -(np.arange(width // 2) / (width // 2))
    angles = np.arange(MAX_POSITION)[:, None] * frequencies
    return (case.magnitude * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(NUMPY[case.table_dtype])


def map_nested(function: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to the leaves of nested lists."""
    return [map_nested(function, entry) for entry in nested] if isinstance(nested, list) else function(nested)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Arbitrary bits: NaNs, infinities and all."""
    bits = BITS[dtype]
    return rng.integers(0, np.iinfo(bits).max, shape, dtype=bits, endpoint=True)


def staged_object(rng: np.random.Generator, geometry: Geometry, tokens: int, rotates: bool) -> np.ndarray:
    """An object: K of ordinary size where it is rotated, arbitrary bits elsewhere."""
    obj = random_bits(rng, geometry.object_shape(tokens), geometry.dtype)
    if rotates:
        values = rng.normal(0, 3, obj.shape).astype(np.float32).astype(NUMPY[geometry.dtype]).view(obj.dtype)
        if geometry.format in SPLIT:
            obj[0] = values[0]
        elif geometry.format in FUSED:
            heads = obj.reshape(*obj.shape[:-1], geometry.heads, 2, geometry.head_size)
            heads[..., 0, :] = values.reshape(heads.shape)[..., 0, :]
        else:
            obj[...] = values
    return obj


class Rig:
    """A case with its arrays, built with numpy; a backend works on copies of them."""

    def __init__(self, case: Case, place: Place, object_place: Place | None = None) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        self.bases, self.objects, self.block_tables = [], [], []
        self.placed_bases, layouts = [], []
        tables, group_to_cache, windows = [], [], []
        self.ropes: list[Rope | None] = []
        for group in case.groups:
            geometry = group.geometry

            def base(shape: tuple[int, ...], group: GroupCase = group) -> np.ndarray:
                full = tuple(extent + extra for extent, extra in zip(shape, group.padding, strict=True))
                return random_bits(rng, full, group.geometry.dtype)

            bases = map_nested(base, geometry.shapes())
            placed = map_nested(lambda array, dtype=geometry.dtype: place(array, dtype), bases)
            self.bases.append(bases)
            self.placed_bases.append(placed)
            layouts.append(
                PagedLayout.from_format(
                    geometry.format,
                    _cut(geometry.shapes(), placed),
                    dtype=geometry.dtype,
                    block_size=geometry.block_size if geometry.format in {4, 5} else None,
                    key_layers=geometry.keys or None,
                )
            )
            rotates = group.rope is not None
            self.objects.append([staged_object(rng, geometry, case.chunk_tokens, rotates) for _ in case.chunks])
            self.block_tables.append(rng.permutation(geometry.blocks)[:20].tolist())
            if group.rope is None:
                group_to_cache.append(-1)
                windows.append(None)
                self.ropes.append(None)
            else:
                offset, width = group.rope
                rows = table(case, width, 100.0 + len(tables))
                self.ropes.append(Rope(rows.astype(np.float64), offset, case.is_neox))
                group_to_cache.append(len(tables))
                tables.append(rows)
                windows.append(group.rope)
        self.rope = None
        if tables:
            head_size = next(
                (group.geometry.head_size for group in case.groups if group.geometry.format not in LATENT), 1
            )
            self.rope = RopeTables(
                [
                    place(rows.view(BITS[case.table_dtype]), case.table_dtype) if _typed(place) else rows
                    for rows in tables
                ],
                head_size,
                case.is_neox,
                group_to_cache,
                group_windows=windows,
            )
        self.layouts = layouts
        move = object_place or place
        self.placed_objects = [
            [move(obj, group.geometry.dtype) for obj in objects]
            for group, objects in zip(case.groups, self.objects, strict=True)
        ]

    def splicer(self, **options: Any) -> Splicer:
        return Splicer(self.layouts, self.rope, chunk_tokens=self.case.chunk_tokens, **options)

    def chunks(self) -> list[Chunk]:
        return [
            Chunk([objects[index] for objects in self.placed_objects], old, cur, offset, count)
            for index, (old, cur, offset, count) in enumerate(self.case.chunks)
        ]

    def check(self, fetch: Callable[[Any], np.ndarray]) -> None:
        """Compare every byte of every array with the reference. ``fetch`` brings an array's bits back."""
        for index, group in enumerate(self.case.groups):
            geometry = group.geometry
            expected = map_nested(np.copy, self.bases[index])
            cells = _cut(geometry.shapes(), expected)
            bounded = []
            for number, (old, cur, offset, count) in enumerate(self.case.chunks):
                chunk = Chunk(None, old, cur, offset, count)
                bounded += write(
                    geometry, cells, self.objects[index][number], chunk, self.block_tables[index], self.ropes[index]
                )
            got = map_nested(fetch, self.placed_bases[index])
            pairs = _pairs(cells, _cut(geometry.shapes(), got))
            for array, position, low, high in bounded:
                other = next(found for own, found in pairs if own is array)
                value = other[position].view(NUMPY[geometry.dtype])
                assert float(low) <= float(value) <= float(high), (geometry, position, low, value, high)
                array[position] = other[position]
            for own, found in _pairs(expected, got):
                np.testing.assert_array_equal(found, own)

    def check_gather(self, start: int, tokens: int) -> None:
        """Read a range of tokens out of each group, and compare every byte with the reference."""
        for index, group in enumerate(self.case.groups):
            geometry, block_table = group.geometry, self.block_tables[index]
            cells = _cut(geometry.shapes(), self.bases[index])
            found = gather(self.layouts[index], block_table, start, tokens)
            expected = read(geometry, cells, block_table, start, tokens)
            np.testing.assert_array_equal(found.view(expected.dtype), expected)


def _typed(place: Place) -> bool:
    return getattr(place, "typed", False)


def _cut(shapes: Any, bases: Any) -> Any:
    """The parts of larger arrays that are the cache."""
    if isinstance(shapes, list):
        return [_cut(shape, entry) for shape, entry in zip(shapes, bases, strict=True)]
    return bases[tuple(slice(0, extent) for extent in shapes)]


def _pairs(first: Any, second: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    if isinstance(first, list):
        return [pair for one, other in zip(first, second, strict=True) for pair in _pairs(one, other)]
    return [(first, second)]
