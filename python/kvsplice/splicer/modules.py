"""Loads the prebuilt kernels."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "ptx"


@cache
def manifest() -> dict[str, Any]:
    """What is in the ``ptx`` folder: compiler, source and, per module, file, dtype, target and PTX version."""
    content: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
    return content


def ptx_path(dtype: str) -> Path:
    """The module for an element type.

    Bytes are copied by that of an 8-bit float, which never looks at what it copies.
    """
    wanted = "float8_e4m3fn" if dtype == "uint8" else dtype
    file: str = next(module["file"] for module in manifest()["modules"] if module["dtype"] == wanted)
    return FOLDER / file


def load(cupy: Any, dtype: str) -> tuple[Any, Any]:
    """The kernels that move vectors and elements, as CuPy raw kernels.

    Raises
    ------
    RuntimeError
        If the driver does not load the PTX.
    """
    path = ptx_path(dtype)
    try:
        module = cupy.RawModule(path=str(path))
        return module.get_function("splice_vectors"), module.get_function("splice_elements")
    except cupy.cuda.driver.CUDADriverError as error:
        version = next(entry["ptx_version"] for entry in manifest()["modules"] if entry["file"] == path.name)
        raise RuntimeError(
            f"the driver does not load {path.name} (PTX {version}, which drivers from 525 on know): {error}"
        ) from error
