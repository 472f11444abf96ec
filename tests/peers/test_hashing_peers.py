"""Our fingerprints are LMCache's, bit for bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache.v1.multiprocess.token_hasher import TokenHasher, chunk_hash_windows_numba, rolling_hash_windows_numba

from kvsplice.hashing import chained_chunk_hashes, chunk_fingerprints, rolling_fingerprints

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)
BASES = st.integers(0, 2**63 - 1).map(lambda n: 2 * n + 1)


@settings(deadline=None)
@given(tokens=TOKENS, chunk_size=st.integers(1, 90), base=BASES)
def test_equal_to_numba(tokens, chunk_size, base):
    wide = np.array(tokens, dtype=np.uint64)
    chunks = chunk_hash_windows_numba(wide, chunk_size, np.uint64(base))
    assert np.array_equal(chunk_fingerprints(tokens, chunk_size, base), chunks)
    if len(tokens) < chunk_size:
        # The reference's reads out of bounds there; its matcher does not call it.
        assert rolling_fingerprints(tokens, chunk_size, base).shape == (0,)
    else:
        rolling = rolling_hash_windows_numba(wide, chunk_size, np.uint64(base))
        assert np.array_equal(rolling_fingerprints(tokens, chunk_size, base), rolling)


def test_equal_to_numba_over_many_blocks():
    tokens = np.random.default_rng(3).integers(0, 2**32, 50_001, dtype=np.uint64).astype(np.uint32)
    base = 0x1234_5678_9ABC_DEF1
    wide = tokens.astype(np.uint64)
    for chunk_size in (1, 16, 256, 4097):
        rolling = rolling_hash_windows_numba(wide, chunk_size, np.uint64(base))
        assert np.array_equal(rolling_fingerprints(tokens, chunk_size, base), rolling)
        chunks = chunk_hash_windows_numba(wide, chunk_size, np.uint64(base))
        assert np.array_equal(chunk_fingerprints(tokens, chunk_size, base), chunks)


@settings(deadline=None)
@given(tokens=TOKENS, chunk_size=st.integers(1, 40))
def test_chained_hashes_are_the_servers(tokens, chunk_size):
    theirs = TokenHasher(chunk_size, "blake3").compute_chunk_hashes(tokens)
    assert chained_chunk_hashes(tokens, chunk_size) == theirs
    if theirs:
        assert chained_chunk_hashes(tokens[chunk_size:], chunk_size, theirs[0]) == theirs[1:]
