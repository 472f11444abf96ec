"""The documented contract of `kvsplice.Matcher`, point by point. test_matcher_model.py has the random sequences."""

import array
import copy
import enum
import logging
import pickle
from collections.abc import Sequence

import numpy as np
import pytest

import kvsplice
from kvsplice import Match, Matcher, Matches, coverage, non_overlapping_after_prefix

CHUNK = 4
A, B, C, D = ([10 * n + k for k in range(CHUNK)] for n in range(1, 5))
KEYS = [bytes([97 + n]) * 8 for n in range(8)]


@pytest.fixture
def matcher():
    return Matcher(CHUNK, seed=1)


def rows(matches):
    return [tuple(match) for match in matches]


def keys(matches):
    return matches.chunk_hashes


# --- arguments ---

REGISTER = {"tokens": A + B, "chunk_hashes": KEYS[:2]}


class Token(enum.IntEnum):
    TEN = 10


class Trap:
    """An item that is found out late."""

    def __index__(self):
        raise RuntimeError("trap")


BAD_TOKENS = [
    ([*A, 20, -21, 22, -23], ValueError, r"tokens\[5\] is negative: -21"),
    ((10, 11, 12, 13, 20, -21, 22, 23), ValueError, r"tokens\[5\] is negative: -21"),
    ([*A, 20, 2**32, -1, 23], ValueError, r"tokens\[5\] does not fit 32 bits: 4294967296"),
    ([*A, 20, 10**30, 22, 23], ValueError, r"tokens\[5\] does not fit 32 bits"),
    ([*A, 20, -(10**30), 22, 23], ValueError, r"tokens\[5\] is negative"),
    ([*A, 20, 21.0, 22, 23], TypeError, r"tokens\[5\] must be an int, not float"),
    ([*A, 20, "21", -1, 23], TypeError, r"tokens\[5\] must be an int, not str"),
    ([*A, 20, None, 22, 23], TypeError, r"tokens\[5\] must be an int, not NoneType"),
    ([*A, 20, True, 22, 23], TypeError, r"tokens\[5\] must be an int, not bool"),
    ([*A, 20, [21], 22, 23], TypeError, r"tokens\[5\] must be an int, not list"),
    ([*A, 20, np.float32(21), 22, 23], TypeError, r"tokens\[5\] must be an int"),
    ([*A, 20, np.int64(-21), 22, 23], ValueError, r"tokens\[5\] is negative: -21"),
    ([*A, 20, np.uint64(2**32), 22, 23], ValueError, r"tokens\[5\] does not fit 32 bits"),
    (np.array([*A, 20, -21, -22, 23], dtype=np.int8), ValueError, r"tokens\[5\] is negative: -21"),
    (np.array([*A, 20, -21, -22, 23], dtype=np.int32), ValueError, r"tokens\[5\] is negative: -21"),
    (np.array([*A, 20, -21, -22, 23], dtype=np.int64), ValueError, r"tokens\[5\] is negative: -21"),
    (np.array([*A, 20, 2**32, -1, 23], dtype=np.int64), ValueError, r"tokens\[5\] does not fit 32 bits: 4294967296"),
    (np.array([*A, 20, 2**64 - 1, 2**32, 23], dtype=np.uint64), ValueError, r"tokens\[5\] does not fit 32 bits"),
    (np.array([*A, 20, 2**32, -1, 23], dtype=">i8"), ValueError, r"tokens\[5\] does not fit 32 bits: 4294967296"),
    (array.array("q", [*A, 20, -21, 22, 23]), ValueError, r"tokens\[5\] is negative: -21"),
    (np.array(A + B, dtype=np.float64), TypeError, "tokens must hold integers, not float64"),
    (np.array(A + B, dtype=bool), TypeError, "tokens must hold integers, not bool"),
    (np.array(A + B, dtype=object), TypeError, "tokens must hold integers, not object"),
    (array.array("d", A + B), TypeError, "tokens must hold integers, not float64"),
    (np.array([A, B], dtype=np.uint32), ValueError, "tokens must be one-dimensional, not 2-dimensional"),
    (np.uint32(7), ValueError, "tokens must be one-dimensional, not 0-dimensional"),
    (7, ValueError, "tokens must be one-dimensional"),
    (None, ValueError, "tokens must be one-dimensional"),
    ("text", ValueError, "tokens must be one-dimensional"),
    (b"text", ValueError, "tokens must be one-dimensional"),
    (iter(A + B), ValueError, "tokens must be one-dimensional"),
]
BAD_KEYS = [
    ([KEYS[0], b""], ValueError, r"chunk_hashes\[1\] must have 1 to 64 bytes, not 0"),
    ([KEYS[0], b"x" * 65], ValueError, r"chunk_hashes\[1\] must have 1 to 64 bytes, not 65"),
    ([KEYS[0], "text", b""], TypeError, r"chunk_hashes\[1\] must be bytes, not str"),
    ([KEYS[0], 7], TypeError, r"chunk_hashes\[1\] must be bytes, not int"),
    ([KEYS[0], None], TypeError, r"chunk_hashes\[1\] must be bytes, not NoneType"),
    ([KEYS[0], bytearray(b"x")], TypeError, r"chunk_hashes\[1\] must be bytes, not bytearray"),
    (b"a single one", TypeError, "chunk_hashes must be a sequence of bytes, not bytes"),
    ("text", TypeError, "chunk_hashes must be a sequence of bytes, not str"),
    (None, TypeError, "chunk_hashes must be a sequence of bytes, not NoneType"),
    (7, TypeError, "chunk_hashes must be a sequence of bytes, not int"),
]
BAD_SCOPES = [("text", TypeError, "scope must be bytes, not str"), (None, TypeError, "scope must be bytes")]


def state(matcher):
    """All that a caller can see, memory apart: a refused call may have used some."""
    memory = {"token_bytes", "overhead_bytes", "table_rebuilds"}
    stats = {name: value for name, value in matcher.stats()._asdict().items() if name not in memory}
    found = rows(matcher.match(A + B + C + D, every_occurrence=True, all_holders=True))
    return stats, found, [matcher.contains(key) for key in KEYS], len(matcher)


def assert_refused(matcher, error, message, call, **arguments):
    # Something is held, struck and in flight, so that a change of any of it would show.
    matcher.register(C + D, KEYS[2:4])
    matcher.strike(KEYS[2:3])
    before = state(matcher)
    with pytest.raises(error, match=message):
        call(**arguments)
    assert state(matcher) == before
    assert matcher._index.check() is None
    assert matcher.strike(KEYS[2:4]) == KEYS[2:3], "no strike was given or taken away"


@pytest.mark.parametrize(("tokens", "error", "message"), BAD_TOKENS)
def test_bad_tokens(matcher, tokens, error, message):
    assert_refused(matcher, error, message, matcher.register, **REGISTER | {"tokens": tokens})
    if not isinstance(tokens, type(iter([]))):
        assert_refused(Matcher(CHUNK), error, message, matcher.match, tokens=tokens)


@pytest.mark.parametrize(("chunk_hashes", "error", "message"), BAD_KEYS)
def test_bad_chunk_hashes(matcher, chunk_hashes, error, message):
    for call in (matcher.remove, matcher.strike, matcher.confirm, matcher.begin, matcher.finish):
        assert_refused(matcher, error, message, call, chunk_hashes=chunk_hashes)
        matcher = Matcher(CHUNK, seed=1)
    assert_refused(matcher, error, message, matcher.register, **REGISTER | {"chunk_hashes": chunk_hashes})


@pytest.mark.parametrize(("scope", "error", "message"), BAD_SCOPES)
def test_bad_scope(scope, error, message):
    for name in ("remove", "strike", "confirm", "begin", "finish"):
        matcher = Matcher(CHUNK)
        assert_refused(matcher, error, message, getattr(matcher, name), chunk_hashes=KEYS[:2], scope=scope)
    matcher = Matcher(CHUNK)
    assert_refused(matcher, error, message, matcher.register, **REGISTER, scope=scope)
    assert_refused(Matcher(CHUNK), error, message, matcher.match, tokens=A, scope=scope)
    assert_refused(Matcher(CHUNK), error, message, matcher.contains, chunk_hash=KEYS[0], scope=scope)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chunk_hashes": KEYS[:1]}, ValueError, "chunk_hashes has 1 items for 2 full chunks"),
        ({"chunk_hashes": []}, ValueError, "chunk_hashes has 0 items for 2 full chunks"),
        # The check does not depend on what is asked to be indexed.
        ({"chunk_hashes": KEYS[:1], "start_chunk": 1}, ValueError, "chunk_hashes has 1 items for 2 full chunks"),
        ({"start_chunk": -1}, ValueError, "start_chunk must be 0 to"),
        ({"start_chunk": 2**64}, ValueError, "start_chunk must be 0 to"),
        ({"start_chunk": 1.0}, TypeError, "start_chunk must be an int, not float"),
        ({"start_chunk": True}, TypeError, "start_chunk must be an int, not bool"),
        ({"start_chunk": None}, TypeError, "start_chunk must be an int, not NoneType"),
        ({"position_offset": -1}, ValueError, "position_offset must be 0 to"),
        ({"position_offset": 2**63}, ValueError, "position_offset must be 0 to"),
        ({"position_offset": 2**63 - 8}, ValueError, "position_offset must leave positions below"),
        ({"position_offset": "0"}, TypeError, "position_offset must be an int, not str"),
    ],
)
def test_bad_registration(matcher, arguments, error, message):
    assert_refused(matcher, error, message, matcher.register, **REGISTER | arguments)


@pytest.mark.parametrize(
    ("threshold", "error"), [(0, ValueError), (-1, ValueError), (256, ValueError), (1.0, TypeError), (None, TypeError)]
)
def test_bad_threshold(matcher, threshold, error):
    assert_refused(matcher, error, "threshold must be", matcher.strike, chunk_hashes=KEYS[2:4], threshold=threshold)


@pytest.mark.parametrize("option", ["every_occurrence", "all_holders"])
def test_bad_option(matcher, option):
    assert_refused(matcher, TypeError, option, matcher.match, tokens=A, **{option: "yes"})


@pytest.mark.parametrize(
    ("chunk_hash", "error"), [(b"", ValueError), (b"x" * 65, ValueError), ("text", TypeError), (None, TypeError)]
)
def test_bad_chunk_hash(matcher, chunk_hash, error):
    assert_refused(matcher, error, "chunk_hash must", matcher.contains, chunk_hash=chunk_hash)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size must be 1 to 65536, not 0"),
        ({"chunk_size": 65_537}, ValueError, "chunk_size must be 1 to 65536, not 65537"),
        ({"chunk_size": -256}, ValueError, "chunk_size must be 1 to 65536, not -256"),
        ({"chunk_size": 256.0}, TypeError, "chunk_size must be an int, not float"),
        ({"chunk_size": "256"}, TypeError, "chunk_size must be an int, not str"),
        ({"capacity": 0}, ValueError, "capacity must be 1 to"),
        ({"capacity": 1 << 31}, ValueError, "capacity must be 1 to"),
        ({"capacity": None}, TypeError, "capacity must be an int, not NoneType"),
        ({"on_full": "drop"}, ValueError, 'on_full must be "evict" or "reject"'),
        ({"on_full": None}, ValueError, 'on_full must be "evict" or "reject"'),
        ({"dedup_content": "no"}, TypeError, "dedup_content"),
        ({"seed": -1}, ValueError, "seed must be 0 to 18446744073709551615, not -1"),
        ({"seed": 2**64}, ValueError, "seed must be 0 to"),
        ({"seed": "1"}, TypeError, "seed must be an int, not str"),
    ],
)
def test_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        Matcher(**arguments)


def test_limits_are_allowed():
    Matcher(1, 1, seed=0)
    Matcher(65_536, 1 << 30, seed=2**64 - 1)
    matcher = Matcher(CHUNK)
    assert matcher.register([2**32 - 1, 0, 2**31, 1], [b"x" * 64], position_offset=2**63 - 1 - CHUNK) == 1
    assert rows(matcher.match([2**32 - 1, 0, 2**31, 1])) == [(2**63 - 1 - CHUNK, 2**63 - 1, 0, 4, b"x" * 64)]
    assert matcher.register(A, [b"x"], start_chunk=2**64 - 1) == 0


def test_error_of_an_item_does_not_hide(matcher):
    with pytest.raises((RuntimeError, TypeError), match=r"trap|tokens\[1\]"):
        matcher.match([10, Trap(), 12, 13])


# --- forms of tokens ---


def strided(tokens):
    wide = np.zeros(2 * len(tokens), dtype=np.uint32)
    wide[::2] = tokens
    return wide[::2]


def read_only(tokens):
    made = np.array(tokens, dtype=np.uint32)
    made.flags.writeable = False
    return made


KINDS = (*"bBhHiIlLqQ", ">u4", ">i4", ">i8", ">u2")
FORMS = {
    "list": list,
    "tuple": tuple,
    "numpy scalars": lambda tokens: [np.int64(token) for token in tokens],
    "mixed": lambda tokens: [np.uint8(tokens[0]), *tokens[1:]],
    "enum": lambda tokens: [Token.TEN, *tokens[1:]],
    **{f"numpy {kind}": lambda tokens, kind=kind: np.array(tokens, dtype=kind) for kind in KINDS},
    "every second": strided,
    "reversed": lambda tokens: np.array(tokens[::-1], dtype=np.uint32)[::-1],
    "reversed signed": lambda tokens: np.array(tokens[::-1], dtype=np.int32)[::-1],
    "column": lambda tokens: np.array([tokens, tokens], dtype=np.uint32).T[:, 0],
    "read only": read_only,
    "unaligned": lambda tokens: np.frombuffer(b"x" + np.array(tokens, dtype="<u4").tobytes(), "<u4", offset=1),
    **{f"array {kind}": lambda tokens, kind=kind: array.array(kind, tokens) for kind in "bBhHiIlLqQ"},
    "memoryview": lambda tokens: memoryview(array.array("i", tokens)),
    "memoryview of bytes": lambda tokens: memoryview(bytes(tokens)),
    "bytearray": bytearray,
    "range": lambda tokens: range(tokens[0], tokens[0] + len(tokens)),
}


@pytest.mark.parametrize("form", FORMS)
def test_form_of_tokens(matcher, form):
    tokens = FORMS[form](A)
    assert matcher.register(tokens, KEYS) == 1
    assert rows(matcher.match(A)) == [(0, 4, 0, 4, KEYS[0])]
    assert rows(matcher.match(tokens)) == [(0, 4, 0, 4, KEYS[0])]
    assert list(tokens) == A, "the caller's tokens are as they were"


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda tokens: np.array(tokens, dtype=np.uint32)])
def test_no_tokens(matcher, form):
    assert matcher.register(form([]), []) == 0
    assert len(matcher.match(form([]))) == 0


def test_tokens_are_copied(matcher):
    tokens = np.array(A, dtype=np.uint32)
    matcher.register(tokens, KEYS)
    tokens[:] = 0
    assert keys(matcher.match(A)) == KEYS[:1]
    assert keys(matcher.match(tokens)) == []


@pytest.mark.parametrize("form", [tuple, list, iter])
def test_form_of_chunk_hashes(matcher, form):
    assert matcher.register(A + B, form(KEYS[:2])) == 2
    assert matcher.remove(form(KEYS[:1])) == 1


# --- registering and matching ---


def test_positions(matcher):
    assert matcher.register(A + B + C + [1, 2, 3], KEYS, start_chunk=1, position_offset=1000) == 2
    assert rows(matcher.match([0, *C, 0, 0, *B, *A])) == [
        (1008, 1012, 1, 5, KEYS[2]),
        (1004, 1008, 7, 11, KEYS[1]),
    ]


def test_chunk_hash_is_registered_once(matcher):
    assert matcher.register(A + B, KEYS) == 2
    assert matcher.register(C + B + D, KEYS, position_offset=100) == 1
    assert keys(matcher.match(A + B + C + D)) == [KEYS[0], KEYS[1], KEYS[2]]
    assert rows(matcher.match(B)) == [(4, 8, 0, 4, KEYS[1])]
    assert matcher.register(A + B, [b"same", b"same"]) == 1
    assert rows(matcher.match(A)) == [(0, 4, 0, 4, b"same")]


def test_query_shorter_than_a_chunk(matcher):
    matcher.register(A, KEYS)
    assert keys(matcher.match(A[:3])) == []


def test_only_whole_equal_windows_match(matcher):
    matcher.register(A, KEYS)
    for at in range(CHUNK):
        changed = list(A)
        changed[at] ^= 1
        assert keys(matcher.match(changed)) == []
    assert keys(matcher.match(A[1:] + A[:1])) == []


def test_overlapping_matches(matcher):
    matcher.register([1, 1, 1, 1, 1, 1, 1, 2], KEYS)
    assert rows(matcher.match([1, 1, 1, 1, 1, 2])) == [(0, 4, 0, 4, KEYS[0]), (4, 8, 2, 6, KEYS[1])]
    every = matcher.match([1] * 6, every_occurrence=True)
    assert every.cur_start.tolist() == [0, 1, 2]


def test_holders(matcher):
    for n, key in enumerate(KEYS[:3]):
        matcher.register(A, [key], position_offset=100 * n)
    query = A + A
    assert rows(matcher.match(query)) == [(200, 204, 0, 4, KEYS[2])]
    assert rows(matcher.match(query, every_occurrence=True)) == [(200, 204, 0, 4, KEYS[2]), (200, 204, 4, 8, KEYS[2])]
    both = matcher.match(query, every_occurrence=True, all_holders=True)
    assert keys(both) == [KEYS[2], KEYS[1], KEYS[0]] * 2
    assert both.old_start.tolist() == [200, 100, 0] * 2
    assert keys(matcher.match(query, all_holders=True)) == [KEYS[2], KEYS[1], KEYS[0]]


def test_next_holder_takes_over(matcher):
    for key in KEYS[:3]:
        matcher.register(A, [key])
    for newest in (2, 1, 0):
        assert keys(matcher.match(A)) == [KEYS[newest]]
        assert matcher.remove([KEYS[newest]]) == 1
    assert keys(matcher.match(A)) == []
    assert matcher.stats().contents == 0


def test_confirmed_holder_comes_first(matcher):
    for key in KEYS[:3]:
        matcher.register(A, [key])
    matcher.confirm([KEYS[0], b"unknown"])
    assert keys(matcher.match(A, all_holders=True)) == [KEYS[0], KEYS[2], KEYS[1]]
    matcher.confirm([KEYS[1], KEYS[2]])
    assert keys(matcher.match(A, all_holders=True)) == [KEYS[2], KEYS[1], KEYS[0]]
    matcher.remove([KEYS[2]])
    assert keys(matcher.match(A)) == [KEYS[1]]


def test_texts_are_held_once(matcher):
    for n in range(200):
        matcher.register(A, [b"%08d" % n])
    stats = matcher.stats()
    assert (stats.entries, stats.contents) == (200, 1)


def test_dedup_content():
    matcher = Matcher(CHUNK, dedup_content=True)
    assert matcher.register(A + A + B, KEYS) == 2
    assert matcher.register(B + C, KEYS[3:]) == 1
    assert keys(matcher.match(A + B + C)) == [KEYS[0], KEYS[2], KEYS[4]]
    assert matcher.register(A, KEYS, scope=b"other") == 1
    matcher.remove(KEYS[:1])
    assert matcher.register(A, [KEYS[7]]) == 1
    assert keys(matcher.match(A)) == [KEYS[7]]


def test_remove(matcher):
    matcher.register(A + B, KEYS)
    assert matcher.remove([KEYS[0], b"unknown", KEYS[0]]) == 1
    assert matcher.remove([KEYS[0]]) == 0
    assert not matcher.contains(KEYS[0])
    assert matcher.contains(KEYS[1])
    assert keys(matcher.match(A + B)) == [KEYS[1]]
    assert len(matcher) == 1
    assert matcher.register(C, KEYS, position_offset=8) == 1
    assert rows(matcher.match(A + C)) == [(8, 12, 4, 8, KEYS[0])]
    assert matcher.remove([]) == 0


def test_keys_of_every_length(matcher):
    hashes = [bytes([n]) * n for n in range(1, 65)]
    tokens = list(range(64 * CHUNK))
    assert matcher.register(tokens, hashes) == 64
    assert keys(matcher.match(tokens)) == hashes


def test_keys_that_differ_in_length_or_one_bit(matcher):
    hashes = [b"\0", b"\0\0", b"\0" * 32, b"\0" * 31 + b"\1", b"\0" * 33]
    tokens = list(range(5 * CHUNK))
    assert matcher.register(tokens, hashes) == 5
    assert keys(matcher.match(tokens)) == hashes


# --- scopes ---


def test_scopes_do_not_see_each_other(matcher):
    one, other = b"model/tenant 1", b"model/tenant 2"
    assert matcher.register(A, KEYS, position_offset=0, scope=one) == 1
    assert matcher.register(A, KEYS, position_offset=8, scope=other) == 1
    for scope, start in ((one, 0), (other, 8)):
        assert rows(matcher.match(A, scope=scope, every_occurrence=True, all_holders=True)) == [
            (start, start + 4, 0, 4, KEYS[0])
        ]
    assert keys(matcher.match(A)) == []
    assert keys(matcher.match(A, scope=b"model/tenant 3")) == []
    # Nor touch each other.
    assert matcher.strike(KEYS[:1], threshold=1, scope=b"model/tenant 3") == []
    assert matcher.strike(KEYS[:1], threshold=1) == []
    assert matcher.remove(KEYS[:1]) == 0
    assert matcher.strike(KEYS[:1], scope=one) == []
    assert matcher.strike(KEYS[:1], scope=other) == []
    assert matcher.strike(KEYS[:1], scope=one) == KEYS[:1]
    assert matcher.contains(KEYS[0], scope=other)
    assert not matcher.contains(KEYS[0], scope=one)
    matcher.begin(KEYS[:1], scope=one)
    assert matcher.strike(KEYS[:1], scope=other) == KEYS[:1]


def test_scopes_of_any_length(matcher):
    scopes = [b"", b"\0", b"\0\0", b"x" * 100_000, b"x" * 99_999]
    for n, scope in enumerate(scopes):
        matcher.register(A, KEYS, position_offset=n, scope=scope)
    assert [matcher.match(A, scope=scope)[0].old_start for scope in scopes] == [0, 1, 2, 3, 4]
    assert matcher.stats().scopes == 5
    for scope in scopes:
        matcher.remove(KEYS[:1], scope=scope)
    assert matcher.stats().scopes == 0


# --- strikes and registrations in flight ---


def test_strikes_evict_at_the_threshold(matcher):
    matcher.register(A + B, KEYS)
    assert matcher.strike([KEYS[0], b"unknown"]) == []
    assert keys(matcher.match(A)) == KEYS[:1]
    assert matcher.strike([KEYS[0], KEYS[1]]) == [KEYS[0]]
    assert matcher.strike([KEYS[0]]) == []
    assert keys(matcher.match(A + B)) == [KEYS[1]]
    assert matcher.strike([KEYS[1]], threshold=3) == []
    assert matcher.strike([KEYS[1]], threshold=3) == [KEYS[1]]
    assert matcher.stats().struck_out == 2


def test_strikes_count_each_time_in_one_call(matcher):
    matcher.register(A, KEYS)
    assert matcher.strike([KEYS[0], KEYS[0]]) == [KEYS[0]]


def test_highest_threshold(matcher):
    matcher.register(A, KEYS)
    assert matcher.strike(KEYS[:1] * 254, threshold=255) == []
    assert matcher.strike(KEYS[:1], threshold=255) == KEYS[:1]


def test_confirm_takes_strikes_away(matcher):
    matcher.register(A, KEYS)
    for _ in range(5):
        assert matcher.strike(KEYS[:1]) == []
        matcher.confirm(KEYS[:1])
    assert matcher.strike(KEYS[:1]) == []
    assert matcher.strike(KEYS[:1]) == KEYS[:1]


def test_strikes_do_not_outlive_the_registration(matcher):
    matcher.register(A, KEYS)
    matcher.strike(KEYS[:1])
    matcher.remove(KEYS[:1])
    matcher.register(A, KEYS)
    assert matcher.strike(KEYS[:1]) == []


def test_in_flight_is_counted(matcher):
    matcher.begin(KEYS[:1])  # not registered yet
    matcher.begin(KEYS[:1])
    matcher.register(A, KEYS)
    assert matcher.strike(KEYS[:1], threshold=1) == []
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == []
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == KEYS[:1]


def test_what_is_in_flight_takes_no_strike(matcher):
    matcher.register(A, KEYS)
    matcher.begin(KEYS[:1])
    for _ in range(5):
        matcher.strike(KEYS[:1])
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1]) == []


def test_finish_without_begin_is_ignored(matcher):
    matcher.register(A, KEYS)
    matcher.finish([KEYS[0], b"unknown"])
    matcher.begin(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == []
    matcher.finish(KEYS[:1])
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == KEYS[:1]


def test_in_flight_counts_each_time_in_one_call(matcher):
    matcher.begin([KEYS[0], KEYS[0]])
    matcher.register(A, KEYS)
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == []


def test_in_flight_outlives_removal(matcher):
    matcher.begin(KEYS[:1])
    matcher.register(A, KEYS)
    assert matcher.remove(KEYS[:1]) == 1
    assert keys(matcher.match(A)) == []
    matcher.register(B, KEYS)
    assert matcher.strike(KEYS[:1], threshold=1) == []
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == KEYS[:1]


def test_in_flight_alone_is_no_entry(matcher):
    matcher.begin(KEYS)
    assert len(matcher) == 0
    assert not matcher.contains(KEYS[0])
    matcher.finish(KEYS)
    assert matcher.stats().scopes == 0
    assert matcher._index.check() is None


def test_too_many_in_flight(matcher):
    limit = 16_383
    matcher.begin(KEYS[:1] * limit)
    with pytest.raises(ValueError, match=rf"chunk_hashes\[2\] has {limit} registrations in flight"):
        matcher.begin([KEYS[1], KEYS[1], KEYS[0], KEYS[1]])
    matcher.register(A + B, KEYS)
    assert matcher.strike([KEYS[1]], threshold=1) == [KEYS[1]], "none of the refused call was counted"
    matcher.finish(KEYS[:1] * (limit - 1))
    assert matcher.strike(KEYS[:1], threshold=1) == []
    matcher.finish(KEYS[:1])
    assert matcher.strike(KEYS[:1], threshold=1) == KEYS[:1]


# --- capacity ---


def numbered(first, count):
    """Tokens of chunks that all differ, and their keys."""
    return list(range(CHUNK * first, CHUNK * (first + count))), [b"%08d" % n for n in range(first, first + count)]


def fill(matcher, first, count):
    tokens, hashes = numbered(first, count)
    return matcher.register(tokens, hashes)


def held(matcher, first, count):
    """Which of these are registered, asked in a way that does not mark them as used."""
    return [n for n in range(first, first + count) if matcher.contains(b"%08d" % n)]


def test_evicts_what_was_never_used_first_in_first_out():
    matcher = Matcher(CHUNK, capacity=8)
    assert fill(matcher, 0, 8) == 8
    assert fill(matcher, 8, 3) == 3
    assert held(matcher, 0, 11) == list(range(3, 11))
    assert len(matcher) == 8
    assert matcher.stats().evicted == 3
    tokens, hashes = numbered(0, 11)
    assert keys(matcher.match(tokens)) == hashes[3:]


@pytest.mark.parametrize("use", ["match", "confirm"])
def test_what_was_used_outlives_what_was_not(use):
    matcher = Matcher(CHUNK, capacity=8)
    fill(matcher, 0, 8)
    tokens, hashes = numbered(0, 4)
    used = {"match": lambda: matcher.match(tokens), "confirm": lambda: matcher.confirm(hashes)}
    used[use]()
    assert fill(matcher, 8, 4) == 4
    assert held(matcher, 0, 12) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_what_is_used_again_and_again_stays():
    matcher = Matcher(CHUNK, capacity=16)
    fill(matcher, 0, 4)
    tokens, hashes = numbered(0, 4)
    for first in range(100, 1100, 4):
        fill(matcher, first, 4)
        assert keys(matcher.match(tokens)) == hashes
    assert len(matcher) == 16


def test_what_was_used_long_ago_goes():
    matcher = Matcher(CHUNK, capacity=16)
    fill(matcher, 0, 4)
    matcher.match(numbered(0, 4)[0])
    # Far more than the capacity: the order is approximate as long as records of evicted keys wait to be used again.
    fill(matcher, 100, 2000)
    assert held(matcher, 0, 4) == []


def test_in_flight_is_not_evicted():
    matcher = Matcher(CHUNK, capacity=4)
    fill(matcher, 0, 4)
    hashes = numbered(0, 2)[1]
    matcher.begin(hashes)
    fill(matcher, 4, 20)
    assert held(matcher, 0, 4) == [0, 1]
    matcher.finish(hashes)
    fill(matcher, 24, 2000)
    assert held(matcher, 0, 4) == []


def test_all_in_flight_leaves_no_room():
    matcher = Matcher(CHUNK, capacity=4)
    fill(matcher, 0, 4)
    matcher.begin(numbered(0, 4)[1])
    assert fill(matcher, 4, 2) == 0
    assert held(matcher, 0, 6) == [0, 1, 2, 3]
    assert matcher.stats().rejected_full == 2


def test_reject():
    matcher = Matcher(CHUNK, capacity=3, on_full="reject")
    assert fill(matcher, 0, 5) == 3
    assert fill(matcher, 5, 1) == 0
    assert held(matcher, 0, 6) == [0, 1, 2]
    stats = matcher.stats()
    assert (stats.entries, stats.rejected_full, stats.evicted) == (3, 3, 0)
    matcher.remove([b"%08d" % 1])
    assert fill(matcher, 5, 2) == 1
    assert held(matcher, 0, 7) == [0, 2, 5]


def test_a_text_goes_with_its_last_holder():
    matcher = Matcher(CHUNK, capacity=2)
    for n in range(10):
        matcher.register(A, [b"%08d" % n])
    assert keys(matcher.match(A, all_holders=True)) == [b"%08d" % 9, b"%08d" % 8]
    fill(matcher, 100, 2)
    assert keys(matcher.match(A)) == []
    assert matcher.stats().contents == 2


@pytest.mark.parametrize(("on_full", "words"), [("evict", "evicting"), ("reject", "no more")])
def test_says_once_that_it_is_full(caplog, on_full, words):
    matcher = Matcher(CHUNK, capacity=2, on_full=on_full)
    with caplog.at_level(logging.DEBUG):
        fill(matcher, 0, 2)
        assert caplog.records == []
        for first in (2, 4, 6):
            fill(matcher, first, 2)
        matcher.remove([b"%08d" % n for n in range(8)])
        fill(matcher, 8, 4)
    [record] = caplog.records
    assert (record.name, record.levelno) == ("kvsplice.matcher", logging.WARNING)
    assert words in record.message
    assert "2 chunk hashes" in record.message


# --- the rest ---


def test_stats():
    matcher = Matcher(CHUNK, capacity=4, seed=1)
    empty = matcher.stats()
    assert empty == (0,) * 3 + (4, 0, empty.overhead_bytes) + (0,) * 7
    matcher.register(A + B + B, KEYS)
    matcher.register(A, KEYS[:1], scope=b"other")
    matcher.register(C + D, KEYS[4:])
    matcher.remove([KEYS[4]])
    matcher.strike([KEYS[5]], threshold=1)
    stats = matcher.stats()
    assert stats.capacity == 4
    assert stats.registered == 6
    assert stats.evicted == 2
    assert stats.removed == 1
    assert stats.struck_out == 1
    assert stats.entries == len(matcher) == stats.registered - stats.evicted - stats.removed - stats.struck_out
    assert stats.rejected_full == stats.rejected_collisions == 0
    assert stats.token_bytes >= stats.contents * 4 * CHUNK
    assert stats.overhead_bytes > 0


def test_memory_is_flat_under_churn():
    matcher = Matcher(16, capacity=1000, seed=1)
    sizes = []
    for turn in range(120):
        tokens = np.arange(turn * 16_000, (turn + 1) * 16_000, dtype=np.uint32)
        matcher.register(tokens, [b"%04d%08d" % (turn, n) for n in range(1000)])
        stats = matcher.stats()
        assert stats.entries == stats.contents == 1000
        sizes.append(stats.token_bytes + stats.overhead_bytes)
    # A rebuild holds an old and a new table for a while, so the figure goes up and down by a fifth.
    assert max(sizes[20:]) <= 1.25 * max(sizes[:20])
    assert matcher._index.check() is None


def test_memory_for_all_but_tokens():
    matcher = Matcher(1, capacity=1 << 16, seed=1)
    count = 1 << 16
    matcher.register(np.arange(count, dtype=np.uint32), [n.to_bytes(32, "little") for n in range(count)])
    assert matcher.stats().overhead_bytes <= 176 * count


def test_capacity_is_a_bound_not_an_allocation():
    small, large = Matcher(capacity=64), Matcher(capacity=1 << 30)
    assert large.stats().overhead_bytes == small.stats().overhead_bytes < 1 << 20


def test_seed_reproduces_a_run():
    runs = []
    for _ in range(2):
        matcher = Matcher(CHUNK, capacity=50, seed=9)
        tokens = np.random.default_rng(1).integers(0, 4, 2000, dtype=np.uint32)
        found = []
        for first in range(0, 2000, 100):
            part = tokens[first : first + 100]
            matcher.register(part, [b"%08d" % (first + n) for n in range(25)])
            found.append(rows(matcher.match(tokens, all_holders=True)))
        runs.append((found, matcher.stats()))
    assert runs[0] == runs[1]
    assert any(runs[0][0])


def test_seed_does_not_change_the_answers():
    answers = set()
    for seed in (None, 0, 1, 2**64 - 1):
        matcher = Matcher(CHUNK, seed=seed)
        tokens = np.random.default_rng(1).integers(0, 3, 400, dtype=np.uint32)
        matcher.register(tokens, [b"%08d" % n for n in range(100)])
        answers.add(tuple(rows(matcher.match(tokens, every_occurrence=True, all_holders=True))))
    assert len(answers) == 1


def test_matcher_is_not_pickled(matcher):
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(matcher)


def test_repr(matcher):
    matcher.register(A, KEYS)
    assert repr(matcher) == "<Matcher chunk_size=4 entries=1 capacity=1048576>"


def test_settings_can_be_read():
    matcher = Matcher(16, 100, "reject", True, 1)
    assert (matcher.chunk_size, matcher.capacity, matcher.on_full, matcher.dedup_content) == (16, 100, "reject", True)


# --- Matches ---

ROWS = [Match(4, 8, 0, 4, b"a"), Match(0, 4, 2, 6, b"b"), Match(8, 12, 6, 10, b"c")]


@pytest.fixture
def matches():
    return Matches.from_rows(ROWS)


def test_matches_is_a_sequence(matches):
    assert isinstance(matches, Sequence)
    assert len(matches) == 3
    assert list(matches) == ROWS
    assert list(reversed(matches)) == ROWS[::-1]
    assert [matches[n] for n in (0, 1, 2, -1, -3)] == [ROWS[n] for n in (0, 1, 2, -1, -3)]
    assert ROWS[1] in matches
    assert Match(0, 4, 2, 6, b"x") not in matches
    assert matches.index(ROWS[2]) == 2
    assert matches.count(ROWS[0]) == 1
    assert bool(matches)
    assert not Matches.from_rows([])


@pytest.mark.parametrize("index", [3, -4])
def test_matches_index_out_of_range(matches, index):
    with pytest.raises(IndexError):
        matches[index]


@pytest.mark.parametrize("cut", [slice(None), slice(1, None), slice(None, None, -1), slice(5, 9), slice(-1, None)])
def test_matches_slice(matches, cut):
    part = matches[cut]
    assert type(part) is Matches
    assert list(part) == ROWS[cut]


def test_matches_columns(matches):
    assert matches.old_start.tolist() == [4, 0, 8]
    assert matches.old_end.tolist() == [8, 4, 12]
    assert matches.cur_start.tolist() == [0, 2, 6]
    assert matches.cur_end.tolist() == [4, 6, 10]
    assert matches.chunk_hashes == [b"a", b"b", b"c"]
    for column in (matches.old_start, matches.old_end, matches.cur_start, matches.cur_end):
        assert (column.dtype, column.shape) == (np.int64, (3,))


def test_columns_of_a_match(matcher):
    for query in (A, []):
        matcher.register(A, KEYS)
        found = matcher.match(query)
        for column in (found.old_start, found.old_end, found.cur_start, found.cur_end):
            assert (column.dtype, column.ndim) == (np.int64, 1)
        assert type(found.chunk_hashes) is list


def test_match_has_plain_values(matcher):
    matcher.register(A, KEYS)
    found = matcher.match(A)
    for match in (found[0], next(iter(found))):
        assert type(match) is Match
        assert [type(value) for value in match] == [int, int, int, int, bytes]
        assert match.cur_end - match.cur_start == CHUNK


def test_matches_equality(matches):
    assert matches == Matches.from_rows(tuple(row) for row in ROWS)
    assert matches != matches[:2]
    assert matches != Matches.from_rows([*ROWS[:2], ROWS[2]._replace(chunk_hash=b"x")])
    assert matches != ROWS
    assert Matches.from_rows([]) == Matches.from_rows([])
    with pytest.raises(TypeError, match="unhashable"):
        hash(matches)


def test_matches_take(matches):
    assert list(matches.take([2, 0])) == [ROWS[2], ROWS[0]]
    assert list(matches.take(np.array([], dtype=np.intp))) == []


def test_matches_is_copied_and_pickled(matches):
    assert pickle.loads(pickle.dumps(matches)) == matches
    assert copy.deepcopy(matches) == matches


def test_matches_of_uneven_columns(matches):
    with pytest.raises(ValueError, match="different lengths"):
        Matches(matches.old_start, matches.old_end, matches.cur_start, matches.cur_end, [b"a"])


def test_matches_repr(matches):
    assert repr(matches[:1]) == ("Matches([Match(old_start=4, old_end=8, cur_start=0, cur_end=4, chunk_hash=b'a')])")


# --- coverage and selection ---


def spans(*pairs):
    return Matches.from_rows(Match(0, end - start, start, end, b"%d" % n) for n, (start, end) in enumerate(pairs))


@pytest.mark.parametrize(
    ("pairs", "covered"),
    [
        ([], 0),
        ([(0, 4)], 4),
        ([(0, 4), (4, 8)], 8),
        ([(0, 4), (2, 6)], 6),
        ([(0, 4), (0, 4)], 4),
        ([(0, 10), (2, 3), (9, 12)], 12),
        ([(20, 24), (0, 4)], 8),
    ],
)
def test_coverage(pairs, covered):
    assert coverage(spans(*pairs)) == covered
    assert coverage(list(spans(*pairs))) == covered, "plain rows will do"


@pytest.mark.parametrize(
    ("pairs", "prefix", "kept"),
    [
        ([], 0, []),
        ([(0, 4), (4, 8)], 0, [0, 1]),
        ([(0, 4), (2, 6), (4, 8)], 0, [0, 2]),
        # Filter first: what overlaps the prefix must not shadow what does not.
        ([(0, 4), (2, 6), (4, 8)], 1, [1]),
        ([(2, 6), (3, 7)], 3, [1]),
        ([(0, 4), (4, 8)], 4, [1]),
        ([(0, 4), (4, 8)], 100, []),
        ([(8, 12), (0, 4), (2, 6)], 0, [1, 0]),
        ([(0, 8), (0, 4), (4, 8)], 0, [0]),
        ([(0, 4), (0, 8), (4, 8)], 0, [0, 2]),
    ],
)
def test_non_overlapping_after_prefix(pairs, prefix, kept):
    matches = spans(*pairs)
    selected = non_overlapping_after_prefix(matches, prefix)
    assert type(selected) is Matches
    assert list(selected) == [matches[n] for n in kept]
    assert non_overlapping_after_prefix(list(matches), prefix) == selected


@pytest.mark.parametrize(
    ("prefix", "error"), [(-1, ValueError), (2**63, ValueError), (1.5, TypeError), (None, TypeError)]
)
def test_bad_prefix(prefix, error):
    with pytest.raises(error, match="prefix_tokens"):
        non_overlapping_after_prefix(spans((0, 4)), prefix)


def test_public_names():
    assert set(kvsplice.__all__) >= {
        "Match",
        "Matcher",
        "MatcherStats",
        "Matches",
        "coverage",
        "hashing",
        "non_overlapping_after_prefix",
    }
    assert all(hasattr(kvsplice, name) for name in kvsplice.__all__)
