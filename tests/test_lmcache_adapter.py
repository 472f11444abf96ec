"""`kvsplice.lmcache.TokenRangeMatcher`, without LMCache. tests/peers compares it with LMCache's own."""

import dataclasses
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from kvsplice import Matcher
from kvsplice.lmcache import TokenRangeMatcher
from kvsplice.lmcache import matcher as adapter_module
from kvsplice.lmcache.matcher import CBMatchResult

CHUNK = 4
A, B, C = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
HASHES = [b"aaaaaaaa", b"bbbbbbbb", b"cccccccc"]


@pytest.fixture(autouse=True)
def without_lmcache(monkeypatch):
    """Hide LMCache, installed or not, and forget what was resolved before."""
    monkeypatch.setattr(adapter_module, "_result_type", None)
    for name in ("lmcache", "lmcache.v1.multiprocess.custom_types"):
        monkeypatch.setitem(sys.modules, name, None)


def rows(results):
    return [dataclasses.astuple(result) for result in results]


def test_import_is_cheap():
    program = (
        "import sys; sys.modules['lmcache'] = None; import kvsplice.lmcache; "
        "heavy = {'torch', 'numba', 'msgspec'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_defaults_are_those_of_lmcache():
    matcher = TokenRangeMatcher()
    assert (matcher.chunk_size, matcher.dedup_content, matcher.scope) == (256, False, b"")
    assert TokenRangeMatcher(16, True).dedup_content is True
    assert TokenRangeMatcher(16, True).chunk_size == 16


def test_register_and_match():
    matcher = TokenRangeMatcher(CHUNK)
    assert matcher.on_new_token_hashes(A + B + C + [1], HASHES, 1, position_offset=100) == 2
    results = matcher.match_sub_sequence([0, *B, 0, 0, *C, *A])
    assert results == [
        CBMatchResult(old_st=104, old_ed=108, cur_st=1, cur_ed=5, hash=HASHES[1]),
        CBMatchResult(old_st=108, old_ed=112, cur_st=7, cur_ed=11, hash=HASHES[2]),
    ]
    assert type(results) is list
    assert {type(value) for result in results for value in dataclasses.astuple(result)} == {int, bytes}


def test_result_is_like_the_one_of_lmcache():
    names = [field.name for field in dataclasses.fields(CBMatchResult)]
    assert names == ["old_st", "old_ed", "cur_st", "cur_ed", "hash"]
    result = CBMatchResult(0, 4, 1, 5, b"k")
    assert repr(result) == "CBMatchResult(old_st=0, old_ed=4, cur_st=1, cur_ed=5, hash=b'k')"
    assert result != CBMatchResult(0, 4, 2, 5, b"k")
    result.cur_st = 2
    assert result == CBMatchResult(0, 4, 2, 5, b"k")
    with pytest.raises(TypeError, match="unhashable"):
        hash(result)


def install(monkeypatch, custom_types):
    for name in ("lmcache", "lmcache.v1", "lmcache.v1.multiprocess"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "lmcache.v1.multiprocess.custom_types", custom_types)


def test_result_type_is_that_of_an_installed_lmcache(monkeypatch):
    @dataclasses.dataclass
    class TheirResult(CBMatchResult):
        pass

    custom_types = types.ModuleType("custom_types")
    custom_types.CBMatchResult = TheirResult
    install(monkeypatch, custom_types)
    matcher = TokenRangeMatcher(CHUNK)
    matcher.on_new_token_hashes(A, HASHES)
    assert [type(result) for result in matcher.match_sub_sequence(A)] == [TheirResult]


def test_lmcache_without_torch_counts_as_absent(monkeypatch):
    install(monkeypatch, None)
    matcher = TokenRangeMatcher(CHUNK)
    matcher.on_new_token_hashes(A, HASHES)
    assert [type(result) for result in matcher.match_sub_sequence(A)] == [CBMatchResult]


def test_an_lmcache_that_changed_is_an_error(monkeypatch):
    install(monkeypatch, types.ModuleType("custom_types"))
    with pytest.raises(ImportError, match="CBMatchResult"):
        TokenRangeMatcher(CHUNK)


def test_remove():
    matcher = TokenRangeMatcher(CHUNK)
    matcher.on_new_token_hashes(A + B, HASHES)
    assert matcher.remove_chunks([HASHES[0], b"unknown"]) is None
    assert rows(matcher.match_sub_sequence(A + B)) == [(4, 8, 4, 8, HASHES[1])]
    assert matcher.remove_chunks([HASHES[0]]) is None
    assert matcher.on_new_token_hashes(A, HASHES, position_offset=40) == 1
    assert rows(matcher.match_sub_sequence(A)) == [(40, 44, 0, 4, HASHES[0])]


def test_known_hash_is_skipped():
    matcher = TokenRangeMatcher(CHUNK)
    assert matcher.on_new_token_hashes(A + B, HASHES) == 2
    assert matcher.on_new_token_hashes(A + B + C, HASHES, position_offset=100) == 1
    assert rows(matcher.match_sub_sequence(A)) == [(0, 4, 0, 4, HASHES[0])]
    assert rows(matcher.match_sub_sequence(C)) == [(108, 112, 0, 4, HASHES[2])]


def test_a_text_is_reported_once_under_the_newest_hash():
    matcher = TokenRangeMatcher(CHUNK)
    assert matcher.on_new_token_hashes(A + A, HASHES) == 2
    assert rows(matcher.match_sub_sequence([0, *A, *A])) == [(4, 8, 1, 5, HASHES[1])]


def test_dedup_content():
    matcher = TokenRangeMatcher(CHUNK, dedup_content=True)
    assert matcher.on_new_token_hashes(A + A + B, HASHES) == 2
    assert matcher.on_new_token_hashes(A, [b"dddddddd"]) == 0
    assert rows(matcher.match_sub_sequence(A)) == [(0, 4, 0, 4, HASHES[0])]
    matcher.remove_chunks([HASHES[0]])
    assert matcher.on_new_token_hashes(A, [b"dddddddd"]) == 1


@pytest.mark.parametrize("tokens", [[], A[:3], A, A + B[:3]])
@pytest.mark.parametrize("first", [2, 5])
def test_start_beyond_the_last_chunk_indexes_nothing(tokens, first):
    # Whatever the chunk hashes, as LMCache's.
    matcher = TokenRangeMatcher(CHUNK)
    assert matcher.on_new_token_hashes(tokens, [], start_chunk_idx=first) == 0
    assert len(matcher.matcher) == 0


@pytest.mark.parametrize("query", [[], A[:3]])
def test_query_shorter_than_a_chunk(query):
    matcher = TokenRangeMatcher(CHUNK)
    matcher.on_new_token_hashes(A, HASHES)
    assert matcher.match_sub_sequence(query) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((A + B, HASHES[:1]), ValueError, "chunk_hashes has 1 items for 2"),
        ((A + B, HASHES, -1), ValueError, "start_chunk"),
        ((A + B, HASHES, 0, -4), ValueError, "position_offset"),
        (([*A, 5, -6, 7, 8], HASHES), ValueError, r"tokens\[5\]"),
        (([*A, 5, 6, 7, 2**32], HASHES), ValueError, r"tokens\[7\]"),
        (([*A, 5, 6, 7.0, 8], HASHES), TypeError, r"tokens\[6\]"),
        ((A + B, [HASHES[0], "b"]), TypeError, r"chunk_hashes\[1\]"),
        ((A + B, [HASHES[0], b""]), ValueError, r"chunk_hashes\[1\]"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments, error, message):
    matcher = TokenRangeMatcher(CHUNK)
    with pytest.raises(error, match=message):
        matcher.on_new_token_hashes(*arguments)
    assert len(matcher.matcher) == 0
    assert matcher.match_sub_sequence(A + B) == []


def test_options_reach_the_matcher():
    matcher = TokenRangeMatcher(CHUNK, capacity=1, on_full="reject", seed=3)
    assert matcher.on_new_token_hashes(A + B, HASHES) == 1
    assert matcher.matcher.stats().rejected_full == 1
    with pytest.raises(TypeError, match="positional"):
        TokenRangeMatcher(CHUNK, False, 1)


def test_adapters_over_one_matcher_see_their_scope_only():
    shared = Matcher(CHUNK)
    one, other = TokenRangeMatcher.over(shared, b"one"), TokenRangeMatcher.over(shared, b"other")
    assert one.on_new_token_hashes(A, HASHES) == 1
    assert other.match_sub_sequence(A) == []
    other.remove_chunks(HASHES)
    assert rows(one.match_sub_sequence(A)) == [(0, 4, 0, 4, HASHES[0])]
    assert other.on_new_token_hashes(A, HASHES, position_offset=4) == 1
    assert rows(other.match_sub_sequence(A)) == [(4, 8, 0, 4, HASHES[0])]
    assert shared.contains(HASHES[0], scope=b"one")
    assert "scope=b'one'" in repr(one)


def test_array_input():
    matcher = TokenRangeMatcher(CHUNK)
    assert matcher.on_new_token_hashes(np.array(A + B, dtype=np.uint32), HASHES) == 2
    assert rows(matcher.match_sub_sequence(np.array(B, dtype=np.int64))) == [(4, 8, 0, 4, HASHES[1])]


def test_threads():
    matcher = TokenRangeMatcher(CHUNK)
    held = list(range(1000, 1000 + 40 * CHUNK))
    matcher.on_new_token_hashes(held, [b"held%04d" % n for n in range(40)])
    stop = threading.Event()
    failures = []

    def write(number):
        tokens = list(range(10_000 * number, 10_000 * number + 40 * CHUNK))
        hashes = [b"%04d%04d" % (number, n) for n in range(40)]
        while not stop.is_set():
            if matcher.on_new_token_hashes(tokens, hashes) != 40:
                failures.append("a registration missed chunks")
            matcher.remove_chunks(hashes)

    def read():
        for _ in range(200):
            found = matcher.match_sub_sequence(held)
            if [result.cur_st for result in found] != list(range(0, 40 * CHUNK, CHUNK)):
                failures.append(f"a match found {len(found)}")

    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert failures == []
    assert len(matcher.matcher) == 40
