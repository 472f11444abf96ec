"""Chunk fingerprints: a polynomial in the tokens modulo 2**64; and chained chunk hashes, which are storage keys.

The fingerprint of tokens ``t[0..n)`` under an odd ``base`` is ``sum(t[i] * base**(n - 1 - i)) mod 2**64``, which is
also what LMCache's blend matcher computes. Equal texts have equal fingerprints; the reverse does not hold, and for a
base that is known, different texts with equal fingerprints are easy to build. `kvsplice.Matcher` therefore draws its
base at random and compares tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsplice import _core

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["chained_chunk_hashes", "chunk_fingerprints", "rolling_fingerprints"]


def rolling_fingerprints(tokens: Any, chunk_size: int, base: int) -> NDArray[np.uint64]:
    """Return the fingerprint of the window of ``chunk_size`` tokens at each offset.

    Parameters
    ----------
    tokens : sequence of int
        In any form that `kvsplice.Matcher.register` takes, length ``n``.
    chunk_size : int
        Window length in tokens, at least 1.
    base : int
        Odd, 1 to 2**64 - 1.

    Returns
    -------
    numpy.ndarray
        Shape ``(max(n - chunk_size + 1, 0),)``, dtype uint64.
    """
    return _core.rolling_fingerprints(tokens, chunk_size, base)


def chunk_fingerprints(tokens: Any, chunk_size: int, base: int) -> NDArray[np.uint64]:
    """Return the fingerprint of each full, non-overlapping chunk: shape ``(n // chunk_size,)``, dtype uint64.

    The parameters are those of `rolling_fingerprints`.
    """
    return _core.chunk_fingerprints(tokens, chunk_size, base)


def chained_chunk_hashes(tokens: Any, chunk_size: int, parent: bytes | None = None) -> list[bytes]:
    """Return the chained hash of each full chunk: it depends on the chunk's tokens and on all that came before.

    It is BLAKE3 of the parent's hash followed by the chunk's tokens as big-endian 32-bit integers, which is also what
    LMCache's ``TokenHasher`` computes with its algorithm ``blake3``.

    Parameters
    ----------
    tokens, chunk_size
        As in `rolling_fingerprints`.
    parent : bytes, optional
        Hash of the chunk before the first one; left out, the tokens begin a prompt.

    Returns
    -------
    list of bytes
        ``n // chunk_size`` hashes of 32 bytes.
    """
    return _core.chain(tokens, chunk_size, parent)
