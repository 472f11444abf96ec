"""Arrays on a GPU, by framework. KVSPLICE_WITHOUT_TORCH=1 hides torch, to show that CuPy alone is enough."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

WITHOUT_TORCH = os.environ.get("KVSPLICE_WITHOUT_TORCH") == "1"
if WITHOUT_TORCH:
    sys.modules["torch"] = None  # type: ignore[assignment]


class CuPy:
    """Arrays of bits: CuPy has no bfloat16 or fp8, so layouts are told the dtype."""

    name = "cupy"
    typed = False

    def place(self, bits: np.ndarray, dtype: str) -> Any:
        import cupy

        return cupy.asarray(bits)

    def fetch(self, array: Any) -> np.ndarray:
        return array.get()

    def pin(self, bits: np.ndarray, dtype: str) -> Any:
        import cupyx

        pinned = cupyx.empty_pinned(bits.shape, bits.dtype)
        pinned[...] = bits
        return pinned.view(_numpy(dtype))

    def stream(self) -> Any:
        import cupy

        return cupy.cuda.Stream(non_blocking=True)


class Torch:
    """Tensors of the dtype itself."""

    name = "torch"
    typed = True

    def place(self, bits: np.ndarray, dtype: str) -> Any:
        return self._host(bits, dtype).cuda()

    def fetch(self, array: Any) -> np.ndarray:
        import torch

        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.element_size()]
        return array.view(signed).cpu().numpy().view(f"uint{8 * array.element_size()}")

    def pin(self, bits: np.ndarray, dtype: str) -> Any:
        return self._host(bits, dtype).pin_memory()

    def stream(self) -> Any:
        import torch

        return torch.cuda.Stream()

    def _host(self, bits: np.ndarray, dtype: str) -> Any:
        import torch

        signed = bits.view({1: np.uint8, 2: np.int16, 4: np.int32}[bits.itemsize])
        return torch.from_numpy(signed.copy()).view(getattr(torch, dtype))


def _numpy(dtype: str) -> np.dtype:
    from splice_reference import NUMPY

    return NUMPY[dtype]


@dataclass
class Frameworks:
    cupy: CuPy
    torch: Torch


@pytest.fixture(params=["cupy", "torch"], scope="session")
def framework(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch" and WITHOUT_TORCH:
        pytest.skip("runs in the other process, with torch")
    return CuPy() if request.param == "cupy" else Torch()
