"""Where LMCache's matcher is wrong: each test shows that it fails and that ours does not."""

import itertools
import threading
from queue import Queue

import numpy as np
import pytest
from lmcache.v1.multiprocess.modules.blend.store import StoreMixin
from lmcache_reference import reference, rows, slot_of

from forging import forge
from kvsplice import Matcher, _core
from kvsplice.hashing import chunk_fingerprints
from kvsplice.lmcache import TokenRangeMatcher

CHUNK = 256
OLDER, NEWER, THIRD = b"older---", b"newer---", b"third---"


def random_text(seed, chunk_size=CHUNK):
    return np.random.default_rng(seed).integers(0, 128_000, chunk_size).tolist()


def texts_in_one_slot(matcher):
    """Two different texts that share a slot of the reference's real table."""
    seen = {}
    for seed in itertools.count():
        text = random_text(seed, matcher.chunk_size)
        other = seen.setdefault(slot_of(matcher, text), text)
        if other is not text:
            return other, text
    raise AssertionError


def keys(results):
    return [row[4] for row in rows(results)]


def test_forged_fingerprint():
    seed = 11
    base = _core.base_for_seed(seed)
    stored, forged = forge(base)[:2].tolist()
    assert stored != forged
    assert len(set(chunk_fingerprints(stored + forged, CHUNK, base).tolist())) == 1
    theirs, ours = reference(base=base), TokenRangeMatcher(seed=seed)
    for matcher in (theirs, ours):
        assert matcher.on_new_token_hashes(stored, [OLDER]) == 1
        assert keys(matcher.match_sub_sequence(stored)) == [OLDER]
    assert keys(theirs.match_sub_sequence(forged)) == [OLDER], "the reference hands one text the KV of another"
    assert keys(ours.match_sub_sequence(forged)) == []
    assert ours.matcher.stats().rejected_collisions == 1


def test_forged_fingerprint_hides_a_text_from_dedup():
    seed = 12
    base = _core.base_for_seed(seed)
    stored, forged = forge(base)[:2].tolist()
    theirs, ours = reference(dedup_content=True, base=base), TokenRangeMatcher(dedup_content=True, seed=seed)
    for matcher in (theirs, ours):
        assert matcher.on_new_token_hashes(stored, [OLDER]) == 1
    assert theirs.on_new_token_hashes(forged, [NEWER]) == 0, "the reference takes it for the other text"
    assert ours.on_new_token_hashes(forged, [NEWER]) == 1
    assert keys(ours.match_sub_sequence(forged)) == [NEWER]


def test_shared_slot_loses_the_older_at_once():
    theirs, ours = reference(), TokenRangeMatcher()
    older, newer = texts_in_one_slot(theirs)
    for matcher in (theirs, ours):
        assert matcher.on_new_token_hashes(older, [OLDER]) == 1
        assert keys(matcher.match_sub_sequence(older)) == [OLDER]
        assert matcher.on_new_token_hashes(newer, [NEWER]) == 1
        assert keys(matcher.match_sub_sequence(newer)) == [NEWER]
    assert keys(theirs.match_sub_sequence(older)) == [], "the reference lost it"
    assert theirs.on_new_token_hashes(older, [OLDER]) == 0, "and holds it to be indexed: it never comes back"
    assert keys(ours.match_sub_sequence(older)) == [OLDER]


def test_removal_deletes_the_newer_in_a_shared_slot():
    theirs, ours = reference(), TokenRangeMatcher()
    older, newer = texts_in_one_slot(theirs)
    for matcher in (theirs, ours):
        matcher.on_new_token_hashes(older, [OLDER])
        matcher.on_new_token_hashes(newer, [NEWER])
        matcher.remove_chunks([OLDER])
    assert keys(theirs.match_sub_sequence(newer)) == [], "the reference deleted the other one"
    assert keys(ours.match_sub_sequence(newer)) == [NEWER]


@pytest.mark.parametrize("removed", [OLDER, NEWER])
def test_removal_of_one_holder_loses_the_text_for_all(removed):
    theirs, ours = reference(), TokenRangeMatcher()
    text = random_text(1)
    for matcher in (theirs, ours):
        matcher.on_new_token_hashes(text, [OLDER], position_offset=512)
        matcher.on_new_token_hashes(text, [NEWER], position_offset=1024)
        assert rows(matcher.match_sub_sequence(text)) == [(1024, 1280, 0, 256, NEWER)]
        matcher.remove_chunks([removed])
    assert rows(theirs.match_sub_sequence(text)) == []
    kept, start = {OLDER: (NEWER, 1024), NEWER: (OLDER, 512)}[removed]
    assert rows(ours.match_sub_sequence(text)) == [(start, start + 256, 0, 256, kept)]


def test_chunk_hash_twice_in_one_call_mixes_text_and_position():
    first, second = random_text(1), random_text(2)
    theirs, ours = reference(), TokenRangeMatcher()
    assert theirs.on_new_token_hashes(first + second, [OLDER, OLDER]) == 2
    assert ours.on_new_token_hashes(first + second, [OLDER, OLDER]) == 1
    # The key and the position of the second chunk, whose KV is that of another text.
    assert rows(theirs.match_sub_sequence(first)) == [(256, 512, 0, 256, OLDER)]
    assert rows(ours.match_sub_sequence(first)) == [(0, 256, 0, 256, OLDER)]
    assert rows(ours.match_sub_sequence(second)) == []


def test_ids_are_used_up():
    limit = 1 << 20
    chunk_size, batch = 2, 1 << 14
    theirs, ours = reference(chunk_size), TokenRangeMatcher(chunk_size, capacity=limit)
    tokens = np.arange(2 * limit, dtype=np.uint32)
    for first in range(0, limit, batch):
        texts = tokens[2 * first : 2 * (first + batch)]
        hashes = [n.to_bytes(8, "little") for n in range(first, first + batch)]
        for matcher in (theirs, ours):
            assert matcher.on_new_token_hashes(texts, hashes) == batch
            matcher.remove_chunks(hashes)
    text = [7, 8]
    assert theirs.on_new_token_hashes(text, [NEWER]) == 0, "the reference holds nothing and takes nothing more"
    assert keys(theirs.match_sub_sequence(text)) == []
    assert ours.on_new_token_hashes(text, [NEWER]) == 1
    assert keys(ours.match_sub_sequence(text)) == [NEWER]


def test_full_table_takes_a_whole_call_or_nothing():
    chunk_size, limit = 2, 1 << 4
    theirs = reference(chunk_size, table_bits=4)
    ours = TokenRangeMatcher(chunk_size, capacity=limit, on_full="reject")
    tokens = list(range(2 * (limit + 4)))
    hashes = [n.to_bytes(8, "little") for n in range(limit + 4)]
    assert theirs.on_new_token_hashes(tokens, hashes) == 0
    assert ours.on_new_token_hashes(tokens, hashes) == limit


class Host(StoreMixin):
    """The part of LMCache's blend module that registers what was stored, with only the state that it needs."""

    def __init__(self, matcher):
        self._token_range_matcher = matcher
        self._fingerprint_queue = Queue()
        self._fingerprint_stop = threading.Event()
        self._pending_fp_hashes = set()
        self._pending_fp_lock = threading.Lock()

    def enqueue(self, tokens, hashes):
        with self._pending_fp_lock:
            self._pending_fp_hashes.update(hashes)
        self._fingerprint_queue.put((tokens, hashes, 0, 0, "request"))

    def _emit_fingerprints_registered(self, rid, num_chunks):
        # Called after each registration: one alone is let through.
        self._fingerprint_stop.set()


def test_in_flight_is_a_set():
    text = random_text(1)
    # Two stores of one prompt overlap, and the first of the two registrations is done.
    host = Host(reference())
    host.enqueue(text, [OLDER])
    host.enqueue(text, [OLDER])
    host._drain_fingerprint_queue()
    assert host._fingerprint_queue.qsize() == 1, "one is under way"
    assert host._pending_fp_hashes == set(), "and the reference takes none to be: lookups strike it"

    ours = Matcher()
    ours.begin([OLDER])
    ours.begin([OLDER])
    ours.register(text, [OLDER])
    ours.finish([OLDER])
    assert ours.strike([OLDER], threshold=1) == [], "one is under way"
    ours.finish([OLDER])
    assert ours.strike([OLDER], threshold=1) == [OLDER]


def test_tenants_see_each_other():
    text = random_text(1)
    theirs = reference()
    shared = Matcher()
    tenants = TokenRangeMatcher.over(shared, b"A"), TokenRangeMatcher.over(shared, b"B")
    theirs.on_new_token_hashes(text, [OLDER])
    tenants[0].on_new_token_hashes(text, [OLDER])
    # Tenant B asks: the reference has no way to say who does. Storage holds nothing for B under this key, so the blend
    # module counts a strike against it each time, and at two it removes A's chunk.
    assert keys(theirs.match_sub_sequence(text)) == [OLDER]
    theirs.remove_chunks([OLDER])
    assert keys(theirs.match_sub_sequence(text)) == [], "A's chunk is gone"

    assert keys(tenants[1].match_sub_sequence(text)) == []
    assert shared.strike([OLDER], threshold=1, scope=b"B") == []
    tenants[1].remove_chunks([OLDER])
    assert keys(tenants[0].match_sub_sequence(text)) == [OLDER]


class Stalled(list):
    """Chunk hashes that keep whoever reads them waiting."""

    def __init__(self, items):
        super().__init__(items)
        self.reached, self.go_on = threading.Event(), threading.Event()

    def _wait(self):
        self.reached.set()
        assert self.go_on.wait(60)

    def __getitem__(self, index):
        self._wait()
        return super().__getitem__(index)

    def __iter__(self):
        self._wait()
        return super().__iter__()


def matches_while_a_registration_stalls(matcher, seconds):
    """Whether a match ends while a registration stands still."""
    held, new = random_text(1), random_text(2)
    matcher.on_new_token_hashes(held, [OLDER])
    hashes = Stalled([NEWER])
    found = []
    registration = threading.Thread(target=matcher.on_new_token_hashes, args=(new, hashes))
    match = threading.Thread(target=lambda: found.extend(keys(matcher.match_sub_sequence(held))))
    registration.start()
    assert hashes.reached.wait(60)
    match.start()
    match.join(seconds)
    ended = not match.is_alive()
    assert found == ([OLDER] if ended else [])
    hashes.go_on.set()
    for thread in (registration, match):
        thread.join(60)
        assert not thread.is_alive()
    assert found == [OLDER]
    assert keys(matcher.match_sub_sequence(new)) == [NEWER]
    return ended


def test_lock_over_the_probe():
    assert not matches_while_a_registration_stalls(reference(), seconds=0.5), "the reference waits for the lock"
    assert matches_while_a_registration_stalls(TokenRangeMatcher(), seconds=60)
