"""The CPU splicer against the reference in plain loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splice_cases import Case, Rig, cases
from splice_reference import NUMPY

if TYPE_CHECKING:
    import numpy as np

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
