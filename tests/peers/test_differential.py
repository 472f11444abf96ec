"""The same random operations on LMCache's matcher and on ours.

Both must answer alike wherever the reference's design lets it be right. `Slots` says where it does not: where the slot
of a text leads to another chunk hash than the newest that holds the text, or to none. For those texts, and no others,
the reference must answer as `Slots` predicts. Ours must always answer as the plain model does.
"""

import itertools

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from lmcache_reference import DEFAULT_BITS, Slots, reference, rows, slot_of

from kvsplice.lmcache import TokenRangeMatcher
from model import ModelMatcher

CHUNK = 4
HASHES = [bytes([65 + n]) * 8 for n in range(10)]
SMALL_TABLE_BITS = 7
"""As many ids as the longest sequence of operations could use up."""


def texts_that_share_slots():
    """Texts two or three of which stand in one slot of the small table."""
    matcher = reference(CHUNK, table_bits=SMALL_TABLE_BITS)
    by_slot = {}
    for text in itertools.product(range(3), repeat=CHUNK):
        by_slot.setdefault(slot_of(matcher, text), []).append(text)
    return [text for texts in by_slot.values() if len(texts) > 1 for text in texts[:3]][:12]


# Few texts, so that they meet again under other chunk hashes and in other places.
TEXTS = list(itertools.product(range(2), repeat=CHUNK))[1:13]
SHARING_TEXTS = texts_that_share_slots()


@st.composite
def registrations(draw, texts):
    chunks = draw(st.lists(st.sampled_from(texts), max_size=5))
    tail = draw(st.lists(st.integers(0, 2), max_size=CHUNK - 1))
    # A chunk hash twice in one call makes the reference report the first text at the second position: left out, see
    # test_reference_failures.py.
    hashes = draw(st.permutations(HASHES))[: len(chunks) + draw(st.integers(0, 2))]
    tokens = [token for text in chunks for token in text] + tail
    return "register", tokens, hashes, draw(st.sampled_from([0, 0, 0, 1, 2, 9])), draw(st.integers(0, 1 << 20))


def removals():
    return st.tuples(st.just("remove"), st.lists(st.sampled_from(HASHES), min_size=1, max_size=4))


def queries(texts):
    # Whole texts, so that most queries hit something, and single tokens, so that they do so at any offset.
    parts = st.one_of(st.sampled_from(texts), st.integers(0, 2).map(lambda token: (token,)))
    joined = st.lists(parts, max_size=12).map(lambda parts: [token for part in parts for token in part])
    return st.tuples(st.just("match"), joined)


def chunks_of(tokens):
    return [tuple(tokens[at : at + CHUNK]) for at in range(0, len(tokens) - CHUNK + 1, CHUNK)]


def windows_of(tokens):
    return {tuple(tokens[at : at + CHUNK]) for at in range(len(tokens) - CHUNK + 1)}


def run(operations, *, table_bits, dedup_content):
    """Run the operations on both; return how many texts of queries the reference's design answers wrongly."""
    theirs = reference(CHUNK, dedup_content, table_bits=table_bits)
    ours = TokenRangeMatcher(CHUNK, dedup_content, seed=1)
    model = ModelMatcher(CHUNK, dedup_content=dedup_content)
    slots = Slots(theirs)
    text_of = {}
    wrong = 0
    for kind, *arguments in operations:
        if kind == "register":
            tokens, hashes, first, offset = arguments
            new = theirs.on_new_token_hashes(tokens, hashes, first, offset)
            assert type(new) is int
            assert ours.on_new_token_hashes(tokens, hashes, first, offset) == new
            before = {chunk_hash for chunk_hash in HASHES if model.contains(chunk_hash)}
            assert model.register(tokens, hashes, first, offset) == new
            for text, chunk_hash in zip(chunks_of(tokens), hashes, strict=False):
                if model.contains(chunk_hash) and chunk_hash not in before:
                    slots.registered(chunk_hash, text)
                    text_of[chunk_hash] = text
        elif kind == "remove":
            [hashes] = arguments
            assert theirs.remove_chunks(hashes) is None
            assert ours.remove_chunks(hashes) is None
            model.remove(hashes)
            for chunk_hash in hashes:
                slots.removed(chunk_hash)
                text_of.pop(chunk_hash, None)
        else:
            [query] = arguments
            got, expected = rows(ours.match_sub_sequence(query)), [tuple(match) for match in model.match(query)]
            assert got == expected
            newest = {tuple(query[row[2] : row[3]]): row[4] for row in expected}
            right = {text for text in windows_of(query) if slots.found(text) == newest.get(text)}
            # A slot that leads to another text is as good as an empty one: fingerprints of texts this short differ.
            right |= {
                text
                for text in windows_of(query) - set(newest)
                if slots.found(text) is not None and text_of[slots.found(text)] != text
            }
            wrong += len(windows_of(query) - right)

            def within(results, texts, query=query):
                return [row for row in results if tuple(query[row[2] : row[3]]) in texts]

            reported = rows(theirs.match_sub_sequence(query))
            assert within(reported, right) == within(got, right)
            for text in windows_of(query) - right:
                owner = slots.found(text)
                answered = {row[4] for row in within(reported, {text})}
                assert answered == ({owner} if owner is not None and text_of[owner] == text else set())
    assert ours.matcher._index.check() is None
    return wrong


def without_shared_slots(operations):
    """Narrow to sequences in which no two texts that are registered share a slot of the reference's real table."""
    matcher = reference(CHUNK)
    texts = {text for kind, *rest in operations if kind == "register" for text in chunks_of(rest[0])}
    assume(len({slot_of(matcher, text) for text in texts}) == len(texts))


def sequences(texts=TEXTS, remove=True):
    operations = [registrations(texts), queries(texts), *([removals()] if remove else [])]
    return st.lists(st.one_of(operations), min_size=6, max_size=20)


thorough = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(sequences(remove=False))
def test_without_removals_nothing_differs(operations):
    without_shared_slots(operations)
    assert run(operations, table_bits=DEFAULT_BITS, dedup_content=False) == 0


@thorough
@given(sequences())
def test_with_dedup_nothing_differs(operations):
    without_shared_slots(operations)
    assert run(operations, table_bits=DEFAULT_BITS, dedup_content=True) == 0


@thorough
@given(sequences())
def test_removal_of_one_of_several_holders_is_all_that_differs(operations):
    without_shared_slots(operations)
    wrong = run(operations, table_bits=DEFAULT_BITS, dedup_content=False)
    event("the reference errs" if wrong else "the same")


@thorough
@given(sequences(SHARING_TEXTS))
def test_shared_slots_are_all_that_differs_in_a_small_table(operations):
    wrong = run(operations, table_bits=SMALL_TABLE_BITS, dedup_content=False)
    event("the reference errs" if wrong else "the same")
