"""Texts with equal fingerprints, made for the base of a test seed, are never taken for each other."""

import numpy as np
import pytest

from forging import SPREAD, forge
from kvsplice import Matcher, _core
from kvsplice.hashing import chunk_fingerprints

SEED = 5
CHUNK = 256


@pytest.fixture(scope="module")
def texts():
    base = _core.base_for_seed(SEED)
    texts = forge(base, CHUNK)
    assert len({row.tobytes() for row in texts}) == len(texts) >= 9, "more than a bucket of the table holds"
    assert len(set(chunk_fingerprints(texts.reshape(-1), CHUNK, base).tolist())) == 1
    changed = texts[1:] != texts[0]
    assert changed.sum(axis=1).max() <= 16
    assert np.abs(texts.astype(np.int64) - texts[0].astype(np.int64)).max() < 2 * SPREAD
    return texts


def key(n):
    return n.to_bytes(8, "little")


def found(matcher, query, **options):
    return [(match.cur_start, match.old_start, match.chunk_hash) for match in matcher.match(query, **options)]


def test_forged_text_is_not_found(texts):
    matcher = Matcher(CHUNK, seed=SEED)
    matcher.register(texts[0], [key(0)])
    for n, text in enumerate(texts[1:], 1):
        assert found(matcher, text) == []
        # What shows that it was a collision, and that the tokens decided.
        assert matcher.stats().rejected_collisions == n
    assert found(matcher, texts[0]) == [(0, 0, key(0))]


def test_colliding_texts_are_all_held_and_told_apart(texts):
    matcher = Matcher(CHUNK, seed=SEED)
    hashes = [key(n) for n in range(len(texts))]
    assert matcher.register(texts.reshape(-1), hashes) == len(texts)
    assert matcher.stats().contents == len(texts)
    backwards = texts[::-1].reshape(-1)
    expected = [(at * CHUNK, n * CHUNK, key(n)) for at, n in enumerate(reversed(range(len(texts))))]
    assert found(matcher, backwards) == expected
    assert found(matcher, backwards, every_occurrence=True, all_holders=True) == expected
    assert matcher._index.check() is None


def test_removing_one_leaves_the_others(texts):
    matcher = Matcher(CHUNK, seed=SEED)
    hashes = [key(n) for n in range(len(texts))]
    matcher.register(texts.reshape(-1), hashes)
    for n, gone in enumerate(hashes):
        assert matcher.remove([gone]) == 1
        assert [row[2] for row in found(matcher, texts.reshape(-1))] == hashes[n + 1 :]
    assert matcher.stats().contents == 0


def test_dedup_tells_them_apart(texts):
    matcher = Matcher(CHUNK, dedup_content=True, seed=SEED)
    assert matcher.register(texts.reshape(-1), [key(n) for n in range(len(texts))]) == len(texts)
    assert matcher.register(texts[1], [b"another"]) == 0


def test_another_seed_has_no_collision(texts):
    matcher = Matcher(CHUNK, seed=SEED + 1)
    matcher.register(texts[0], [key(0)])
    assert found(matcher, texts[1]) == []
    assert matcher.stats().rejected_collisions == 0


def test_default_base_is_drawn_anew(texts):
    for _ in range(20):
        matcher = Matcher(CHUNK)
        matcher.register(texts[0], [key(0)])
        matcher.match(texts[1:].reshape(-1))
        assert matcher.stats().rejected_collisions == 0
