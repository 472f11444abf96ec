"""Chunk fingerprints: a polynomial in the tokens modulo 2**64.

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

__all__ = ["chunk_fingerprints", "rolling_fingerprints"]


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
