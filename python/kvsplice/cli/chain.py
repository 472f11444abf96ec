"""Storage keys of a request's chunks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["chunk_keys"]


def chunk_keys(tokens: NDArray[np.uint32], chunk_size: int) -> list[bytes]:
    """Return the key of each full chunk, chained over the prefix.

    Key ``i`` is BLAKE2b-256 of key ``i - 1`` (nothing for the first) and the chunk's tokens as little-endian uint32.
    Two requests have the same key ``i`` if they agree in the first ``i + 1`` chunks, which is how prefix caches key
    their chunks.
    """
    chunks = len(tokens) // chunk_size
    data = np.ascontiguousarray(tokens, dtype="<u4").view(np.uint8).data
    step = 4 * chunk_size
    keys: list[bytes] = []
    key = b""
    for start in range(0, chunks * step, step):
        digest = hashlib.blake2b(key, digest_size=32)
        digest.update(data[start : start + step])
        key = digest.digest()
        keys.append(key)
    return keys
