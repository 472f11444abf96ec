"""`kvsplice.hashing` against the definition, in Python integers."""

import struct

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvsplice import _core
from kvsplice.hashing import chained_chunk_hashes, chunk_fingerprints, rolling_fingerprints

BLOCK = 2048
"""Offsets that the core computes at a time."""

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
BASES = st.one_of(st.sampled_from([1, 3, 2**64 - 1]), st.integers(0, 2**63 - 1).map(lambda n: 2 * n + 1))


def fingerprint(window, base):
    value = 0
    for token in window:
        value = (value * base + int(token)) % 2**64
    return value


def rolling_model(tokens, chunk_size, base):
    return [fingerprint(tokens[at : at + chunk_size], base) for at in range(len(tokens) - chunk_size + 1)]


def chunk_model(tokens, chunk_size, base):
    return rolling_model(tokens, chunk_size, base)[::chunk_size]


@given(tokens=TOKENS, chunk_size=st.integers(1, 70), base=BASES)
def test_equal_to_the_definition(tokens, chunk_size, base):
    rolling = rolling_fingerprints(tokens, chunk_size, base)
    chunks = chunk_fingerprints(tokens, chunk_size, base)
    assert rolling.dtype == chunks.dtype == np.uint64
    assert rolling.tolist() == rolling_model(tokens, chunk_size, base)
    assert chunks.tolist() == chunk_model(tokens, chunk_size, base)


@pytest.mark.parametrize("chunk_size", [1, 2, 255, 256, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
@pytest.mark.parametrize("extra", [-1, 0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_at_the_borders_of_blocks(chunk_size, extra):
    length = max(chunk_size + extra, 0)
    tokens = np.random.default_rng(length).integers(0, 2**32, length, dtype=np.uint64).astype(np.uint32)
    base = 0x9E6D_62D0_6F6A_9A9B
    rolling = rolling_fingerprints(tokens, chunk_size, base)
    assert rolling.shape == (max(length - chunk_size + 1, 0),)
    assert np.array_equal(chunk_fingerprints(tokens, chunk_size, base), rolling[::chunk_size])
    if len(rolling):
        # The first by definition, the others by what makes them roll.
        assert int(rolling[0]) == fingerprint(tokens[:chunk_size].tolist(), base)
        wide, power = tokens.astype(np.uint64), np.uint64(pow(base, chunk_size, 2**64))
        follows = rolling[:-1] * np.uint64(base) + wide[chunk_size:] - wide[: len(rolling) - 1] * power
        assert np.array_equal(rolling[1:], follows)


def test_chunk_of_one_token():
    tokens = [0, 1, 2**32 - 1]
    assert rolling_fingerprints(tokens, 1, 7).tolist() == tokens
    assert chunk_fingerprints(tokens, 1, 7).tolist() == tokens


def test_largest_tokens_wrap():
    tokens = [2**32 - 1] * 300
    base = 2**64 - 1
    assert rolling_fingerprints(tokens, 256, base).tolist() == rolling_model(tokens, 256, base)


def test_chunk_longer_than_the_tokens():
    assert rolling_fingerprints([1, 2, 3], 4, 3).tolist() == []
    assert chunk_fingerprints([1, 2, 3], 4, 3).tolist() == []
    assert rolling_fingerprints([], 1, 3).tolist() == []


def test_documented_example():
    assert chunk_fingerprints([1, 2, 3, 4], 2, 10 + 1).tolist() == [1 * 11 + 2, 3 * 11 + 4]
    assert rolling_fingerprints([1, 2, 3], 2, 11).tolist() == [13, 25]


@pytest.mark.parametrize("function", [rolling_fingerprints, chunk_fingerprints])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], 1, 0), ValueError, "base"),
        (([1, 2], 1, 2), ValueError, "base must be odd"),
        (([1, 2], 1, 2**64), ValueError, "base"),
        (([1, 2], 1, 2**64 + 1), ValueError, "base"),
        (([1, 2], 1, -1), ValueError, "base"),
        (([1, 2], 1, 3.0), TypeError, "base"),
        (([1, 2], 1, True), TypeError, "base"),
        (([1, 2], 0, 3), ValueError, "chunk_size"),
        (([1, 2], -1, 3), ValueError, "chunk_size"),
        (([1, 2], 65_537, 3), ValueError, "chunk_size"),
        (([1, 2], 1.0, 3), TypeError, "chunk_size"),
        (([1, -2], 1, 3), ValueError, r"tokens\[1\]"),
        (([1, 2**32], 1, 3), ValueError, r"tokens\[1\]"),
        (([1, "2"], 1, 3), TypeError, r"tokens\[1\]"),
        ((np.ones((2, 2), dtype=np.uint32), 1, 3), ValueError, "tokens"),
        ((np.ones(2), 1, 3), TypeError, "tokens"),
    ],
)
def test_bad_arguments(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_base_of_a_seed_is_odd_and_its_own(seed):
    base = _core.base_for_seed(seed)
    assert 1 <= base < 2**64
    assert base % 2 == 1
    assert base == _core.base_for_seed(seed)
    assert base != _core.base_for_seed(seed ^ 1)


def chained(tokens, chunk_size, parent):
    """The definition, with another BLAKE3."""
    hashes = []
    for start in range(0, len(tokens) - chunk_size + 1, chunk_size):
        chunk = tokens[start : start + chunk_size]
        parent = blake3(parent + struct.pack(f">{chunk_size}I", *chunk)).digest()
        hashes.append(parent)
    return hashes


@given(st.lists(st.integers(0, 2**32 - 1), max_size=100), st.integers(1, 40), st.binary(max_size=64) | st.none())
def test_chained_hashes_are_those_of_the_definition(tokens, chunk_size, parent):
    root = blake3(bytes(12)).digest() if parent is None else parent
    assert chained_chunk_hashes(tokens, chunk_size, parent) == chained(tokens, chunk_size, root)


def test_a_parent_must_be_bytes():
    with pytest.raises(TypeError, match="parent must be bytes"):
        chained_chunk_hashes([1, 2], 2, "root")
