"""Element types of KV caches and of cos/sin tables, under one name each."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "uint8": np.dtype(np.uint8),
}
"""Name -> numpy dtype. ``uint8`` is bytes of unknown meaning: they are copied and never rotated."""

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

TABLE_DTYPES = ("float32", "bfloat16", "float16")
"""What a cos/sin table may be made of."""


def dtype_name(dtype: object, argument: str = "dtype") -> str:
    """The name of a dtype given as a name, a numpy or ml_dtypes dtype, or a torch dtype.

    Raises
    ------
    ValueError
        If it is none that a KV cache is made of.
    """
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype)
    else:
        try:
            name = np.dtype(dtype).name  # type: ignore[call-overload]
        except TypeError:
            name = str(dtype)
    name = name.removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f"{argument}: {dtype} is no element type of a KV cache; one of {', '.join(DTYPES)}")
    return name


def largest_finite(name: str) -> float:
    """The largest finite value of an element type."""
    limits: Any = ml_dtypes.finfo(DTYPES[name])  # type: ignore[no-untyped-call]
    return float(limits.max)
