"""Preambles of random length, so that no request aligns with the prefix of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvsplice.cli.mix import mix64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_PREAMBLE_TOKENS", "Preambles", "shifted"]

MAX_PREAMBLE_TOKENS = 512

_FIRST_TOKEN = 1 << 31


class Preambles:
    """Makes the preamble of one request after the other.

    The length is uniform over 1 to `MAX_PREAMBLE_TOKENS` and depends on the seed and the request's number alone. The
    tokens count up from 2**31, beyond any vocabulary, so that each preamble token of a run is unique (until the count
    wraps after 2**31 of them).

    Parameters
    ----------
    seed : int
        Not negative.
    """

    def __init__(self, seed: int) -> None:
        self._key = mix64(seed)
        self._requests = 0
        self._tokens = 0

    def next_tokens(self) -> NDArray[np.uint32]:
        """Return the next request's preamble, dtype uint32."""
        # Of the high bits, a power of two of lengths: uniform.
        length = 1 + mix64(self._key ^ self._requests) * MAX_PREAMBLE_TOKENS // (1 << 64)
        count = np.arange(self._tokens, self._tokens + length, dtype=np.uint64) % np.uint64(_FIRST_TOKEN)
        self._requests += 1
        self._tokens += length
        return (count + np.uint64(_FIRST_TOKEN)).astype(np.uint32)


def shifted(tokens: NDArray[np.uint32], preambles: Preambles | None) -> tuple[NDArray[np.uint32], int]:
    """Put the next preamble before a request's tokens, if there are preambles; and its length."""
    if preambles is None:
        return tokens, 0
    front = preambles.next_tokens()
    return np.concatenate([front, tokens]), len(front)
