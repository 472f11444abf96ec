"""CUDA streams of CuPy, torch and others, as handles."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def handle(stream: object, device: int, owners: Sequence[object]) -> int:
    """The ``cudaStream_t`` to work on.

    Parameters
    ----------
    stream : None, int, cupy.cuda.Stream, torch.cuda.Stream, or an object with ``__cuda_stream__``
        None means the current stream of the framework that the paged cache belongs to: torch if its arrays are torch's,
        else CuPy.
    device : int
    owners : sequence of object
        The arrays of the paged cache.

    Raises
    ------
    TypeError
        If it is no stream.
    """
    if stream is None:
        torch: Any = sys.modules.get("torch")
        if torch is not None and any(isinstance(owner, torch.Tensor) for owner in owners):
            current: int = torch.cuda.current_stream(device).cuda_stream
            return current
        import cupy

        pointer: int = cupy.cuda.get_current_stream().ptr
        return pointer
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for name in ("cuda_stream", "ptr"):
        value = getattr(stream, name, None)
        if isinstance(value, int):
            return value
    if hasattr(stream, "__cuda_stream__"):
        # https://nvidia.github.io/cuda-python/cuda-core/latest/interoperability.html
        protocol = stream.__cuda_stream__
        _, value = protocol() if callable(protocol) else protocol
        return int(value)
    raise TypeError(f"stream: {type(stream).__name__} is no CUDA stream")
