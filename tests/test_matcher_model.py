"""The matcher against its plain model, over random interleavings of all operations, through Python."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsplice import Match, Matcher, Matches, coverage, non_overlapping_after_prefix
from model import ModelMatcher

# Few of each, so that texts repeat, chunks overlap and chunk hashes meet again.
tokens = st.lists(st.sampled_from([0, 1, 2**32 - 1]), max_size=20)
chunk_hash = st.integers(0, 20).map(lambda n: bytes([n]) * (1, 8, 16, 17, 32, 33, 64)[n % 7])
chunk_hashes = st.lists(chunk_hash, max_size=4)
scopes = st.sampled_from([b"", b"tenant", b"x" * 1000])


class AgainstTheModel(RuleBasedStateMachine):
    """Every answer of the matcher is the model's, and its structure stays sound."""

    @initialize(chunk_size=st.integers(1, 4), dedup_content=st.booleans(), seed=st.integers(0, 2**64 - 1))
    def make(self, chunk_size, dedup_content, seed):
        options = {"chunk_size": chunk_size, "dedup_content": dedup_content, "seed": seed}
        self.matcher = Matcher(**options)
        self.model = ModelMatcher(**options)

    def both(self, method, *args, **kwargs):
        answer = getattr(self.matcher, method)(*args, **kwargs)
        assert answer == getattr(self.model, method)(*args, **kwargs)

    @rule(
        tokens=tokens,
        hashes=st.lists(chunk_hash, min_size=20, max_size=20),
        start_chunk=st.integers(0, 3),
        position_offset=st.integers(0, 2**40),
        scope=scopes,
    )
    def register(self, tokens, hashes, start_chunk, position_offset, scope):
        self.both("register", tokens, hashes, start_chunk, position_offset, scope)

    @rule(tokens=tokens, scope=scopes, every_occurrence=st.booleans(), all_holders=st.booleans())
    def match(self, tokens, scope, every_occurrence, all_holders):
        self.both("match", np.array(tokens, dtype=np.uint32), scope, every_occurrence, all_holders)

    @rule(hashes=chunk_hashes, scope=scopes)
    def remove(self, hashes, scope):
        self.both("remove", hashes, scope)

    @rule(hashes=chunk_hashes, threshold=st.integers(1, 3), scope=scopes)
    def strike(self, hashes, threshold, scope):
        self.both("strike", hashes, threshold, scope)

    @rule(method=st.sampled_from(["confirm", "begin", "finish"]), hashes=chunk_hashes, scope=scopes)
    def note(self, method, hashes, scope):
        self.both(method, hashes, scope)

    @rule(chunk_hash=chunk_hash, scope=scopes)
    def contains(self, chunk_hash, scope):
        self.both("contains", chunk_hash, scope)

    @invariant()
    def sound(self):
        if hasattr(self, "matcher"):
            assert self.matcher._index.check() is None
            ours, model = self.matcher.stats(), self.model.stats()
            for name in ("entries", "contents", "scopes", "registered", "removed", "struck_out"):
                assert getattr(ours, name) == getattr(model, name), name
            assert ours.rejected_collisions == 0


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 12)), max_size=12).map(
    lambda rows: [Match(7, 7 + n, start, start + n, bytes([i])) for i, (start, n) in enumerate(rows)]
)


@given(spans)
def test_coverage_counts_each_token_once(matches):
    covered = {token for match in matches for token in range(match.cur_start, match.cur_end)}
    assert coverage(matches) == coverage(Matches.from_rows(matches)) == len(covered)


@given(spans, st.integers(0, 60))
def test_selection_filters_by_prefix_and_then_drops_overlaps(matches, prefix_tokens):
    kept = []
    free_from = 0
    for match in sorted((m for m in matches if m.cur_start >= prefix_tokens), key=lambda m: m.cur_start):
        if match.cur_start >= free_from:
            kept.append(match)
            free_from = match.cur_end
    assert list(non_overlapping_after_prefix(matches, prefix_tokens)) == kept


def test_a_match_that_straddles_the_prefix_hides_nothing():
    straddling = Match(0, 4, 2, 6, b"a")
    behind = Match(0, 4, 4, 8, b"b")
    assert list(non_overlapping_after_prefix([straddling, behind], 3)) == [behind]
