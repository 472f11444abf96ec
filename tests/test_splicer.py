"""The CPU splicer against the reference in plain loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from splice_cases import DTYPES, Case, Rig, cases
from splice_reference import NUMPY

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """Arrays of bits: the layout is told what they hold."""
    return array.copy()


def elements(array: np.ndarray, dtype: str) -> np.ndarray:
    """Arrays that know what they hold."""
    return array.copy().view(NUMPY[dtype])


@pytest.mark.parametrize("format", range(19))
@SLOW
@given(data=st.data())
def test_every_format_against_plain_loops(format: int, data: st.DataObject) -> None:
    case: Case = data.draw(cases(format))
    rig = Rig(case, elements)
    result = rig.splicer().splice(rig.chunks(), rig.block_tables)
    rig.check(lambda array: array.view(f"uint{8 * array.itemsize}"))
    assert result.tokens == sum(count for *_, count in case.chunks)
    assert result.path == ("cpu" if case.chunks else "none")


@pytest.mark.parametrize("format", range(19))
@SLOW
@given(data=st.data(), typed=st.booleans())
def test_reading_every_format_against_plain_loops(format: int, data: st.DataObject, typed: bool) -> None:
    rig = Rig(data.draw(cases(format)), elements if typed else bits)
    most = 20 * min(group.geometry.block_size for group in rig.case.groups)
    start = data.draw(st.integers(0, most - 1))
    rig.check_gather(start, data.draw(st.integers(0, min(9, most - start))))


class Single:
    """One head of one token, rotated by an eighth of a turn per position."""

    def __init__(self, dtype: str) -> None:
        self.dtype = NUMPY[dtype]
        self.cache = np.zeros((1, 2, 1, 1, 4), self.dtype)
        turn = np.arange(3)[:, None] * np.full(2, np.pi / 4)
        rope = RopeTables([np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)], 4)
        self.splicer = Splicer(PagedLayout.from_format(2, [self.cache]), rope, chunk_tokens=1)

    def key(self, values: list[float], old: int | None) -> np.ndarray:
        obj = np.zeros((2, 1, 1, 4), self.dtype)
        obj[0, 0, 0] = values
        self.splicer.splice([Chunk(obj, old, 0)], [0])
        return self.cache[0, 0, 0, 0].astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large(dtype: str) -> None:
    """Eight-bit floats saturate, as engines store them; the others become infinite."""
    largest = float(ml_dtypes.finfo(NUMPY[dtype]).max)
    x, other, y, _ = Single(dtype).key([largest, 1.0, largest, 0.0], old=1)
    if dtype.startswith("float8"):
        assert x == largest
    else:
        assert x == np.inf
    assert y == 0
    np.testing.assert_allclose(other, np.sqrt(0.5), rtol=2.0**-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_pair(dtype: str) -> None:
    values = Single(dtype).key([np.nan, 1.0, 1.0, 1.0], old=2)
    assert np.isnan(values[[0, 2]]).all()
    np.testing.assert_allclose(values[[1, 3]], [1, -1], rtol=2.0**-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_stored_before_the_rotation(dtype: str) -> None:
    """Position 0 turns by nothing."""
    np.testing.assert_array_equal(Single(dtype).key([1.0, 2.0, 3.0, -0.5], old=None), [1, 2, 3, -0.5])
