"""Mooncake traces: ``{"hash_ids": […], "input_length": n}``, where each id stands for a block of 512 tokens.

The traces hold no text. An id is expanded to tokens that are its own: token ``j`` of block ``id`` is a bijective mix of
``512 * id + j`` on 31 bits. So for ids below 2**22 no two (id, ``j``) share a token, equal windows of tokens are
equal windows of blocks, and what a replay finds can be checked by counting ids alone. (A mix into a real vocabulary
would repeat single tokens, and a chunk that reaches one token into a block would now and then match by chance.) Ids
from 2**22 on are mixed with their high bits and may share single tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.cli.errors import BadLineError
from kvsplice.cli.formats.tokens import integer_list
from kvsplice.cli.mix import mix64
from kvsplice.cli.record import field_of, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BLOCK_TOKENS", "MAX_REQUEST_TOKENS", "expand", "mooncake_tokens"]

BLOCK_TOKENS = 512

MAX_REQUEST_TOKENS = 1 << 24
"""Bounds what a short line of ids can make us allocate: 64 MiB of tokens."""

_MAX_ID = (1 << 63) - 1
_ID_BITS = 22
_MASK = np.uint32((1 << 31) - 1)
_OFFSETS = np.arange(BLOCK_TOKENS, dtype=np.uint32)


def expand(hash_ids: list[int], length: int) -> NDArray[np.uint32]:
    """Return the first ``length`` tokens of the given blocks, all below 2**31."""
    ids = np.array(hash_ids, dtype=np.uint64)
    low = (ids & np.uint64((1 << _ID_BITS) - 1)).astype(np.uint32) * np.uint32(BLOCK_TOKENS)
    tokens = low[:, None] + _OFFSETS
    if ids.size and int(ids.max()) >> _ID_BITS:
        keys = [mix64(high) if high else 0 for high in (ids >> np.uint64(_ID_BITS)).tolist()]
        tokens ^= (np.array(keys, dtype=np.uint64).astype(np.uint32) & _MASK)[:, None]
    # Shifts to the right, and products with odd numbers cut to 31 bits, are each bijective on 31 bits.
    tokens ^= tokens >> np.uint32(16)
    tokens *= np.uint32(0x21F0AAAD)
    tokens &= _MASK
    tokens ^= tokens >> np.uint32(15)
    tokens *= np.uint32(0x735A2D97)
    tokens &= _MASK
    tokens ^= tokens >> np.uint32(15)
    return tokens.reshape(-1)[:length]


def mooncake_tokens(record: dict[str, Any]) -> NDArray[np.uint32]:
    """Return the tokens of an object of format ``mooncake``."""
    hash_ids = integer_list(record, "hash_ids", _MAX_ID)
    length = field_of(record, "input_length")
    if type(length) is not int:
        raise BadLineError(f'field "input_length" is not an integer but {kind_of(length)}')
    if length < 0:
        raise BadLineError(f'field "input_length": {length} is negative')
    if length > MAX_REQUEST_TOKENS:
        raise BadLineError(f'field "input_length": more than {MAX_REQUEST_TOKENS:,} tokens')
    blocks = -(-length // BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise BadLineError(
            f'field "hash_ids" has {len(hash_ids):,} ids where "input_length" {length:,} needs {blocks:,} '
            f"(blocks of {BLOCK_TOKENS} tokens)"
        )
    return expand(hash_ids, length)
