"""The CPU splicer on torch tensors, against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from splice_cases import Rig, cases

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def as_tensor(bits: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor that owns a copy of the bits."""
    signed = bits.view({1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize])
    return torch.from_numpy(signed.copy()).view(getattr(torch, dtype))


def fetch(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(INTEGERS[tensor.element_size()]).numpy().view(f"uint{8 * tensor.element_size()}")


def place(bits: np.ndarray, dtype: str) -> Any:
    return as_tensor(bits, dtype)


place.typed = True  # type: ignore[attr-defined]


def place_object(bits: np.ndarray, dtype: str) -> Any:
    """Groups of several dtypes share one object, which then is plain bytes."""
    return torch.from_numpy(bits.reshape(-1).view(np.uint8).copy())


@pytest.mark.parametrize("format", range(19))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_format_against_plain_loops(format: int, data: st.DataObject) -> None:
    case = data.draw(cases(format))
    rig = Rig(case, place, place_object)
    tables = [torch.tensor(table, dtype=torch.int64) for table in rig.block_tables]
    rig.splicer().splice(rig.chunks(), tables)
    rig.check(fetch)


def test_objects_and_tables_of_tensors() -> None:
    cache = torch.zeros(8, 2, 16, 2, 32, dtype=torch.bfloat16)
    stored = torch.randn(2, 1, 16, 64).to(torch.bfloat16)
    angles = torch.arange(256)[:, None] * 1e4 ** -(torch.arange(16) / 16)
    rope = RopeTables([torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.bfloat16)], 32)
    splicer = Splicer(PagedLayout.vllm([cache]), rope, chunk_tokens=16)
    splicer.splice([Chunk(stored, 7, 7)], torch.arange(8))
    assert torch.equal(cache[:, 1].reshape(-1, 64)[7:23], stored[1, 0])


def test_a_tensor_that_needs_its_gradient_is_written() -> None:
    cache = torch.zeros(4, 2, 16, 1, 16, requires_grad=True)
    rope = RopeTables([torch.cat([torch.ones(64, 8), torch.zeros(64, 8)], dim=1)], 16)
    splicer = Splicer(PagedLayout.vllm([cache.detach()]), rope, chunk_tokens=4)
    splicer.splice([Chunk(torch.ones(2, 1, 4, 16), 3, 3)], [list(range(4))])
    assert cache.detach()[0, 0, 3:7].eq(1).all()


def test_a_tensor_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        PagedLayout.vllm([torch.zeros(4, 2, 16, 1, 16, device="meta")])
