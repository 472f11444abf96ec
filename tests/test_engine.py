"""The engine, scenario by scenario: ranks, faults, strikes, expiry, bad input."""

import random
import threading
import time

import numpy as np
import pytest

from engine_parts import (
    BLOCK,
    CHUNK,
    NOTHING_LEFT,
    SIZE,
    Bench,
    Planted,
    ScriptedFleet,
    ask,
    assert_spliced,
    look_up,
    retrieve,
    rope_table,
    store,
)
from kvsplice import BlendEngine, EngineOptions, Request, events
from kvsplice.embedded import ObjectKey, PagedCache
from kvsplice.hashing import chained_chunk_hashes
from kvsplice.lookup import LookupResult
from kvsplice.matcher import Match
from kvsplice.retrieve import Reason

A, B, C, D = (tuple(range(10 * n, 10 * n + CHUNK)) for n in range(1, 5))


def snapshot(bench):
    return [[array.copy() for array in cache.arrays] for cache in bench.caches]


def assert_untouched(bench, before):
    for cache, arrays in zip(bench.caches, before, strict=True):
        assert all(np.array_equal(*pair) for pair in zip(cache.arrays, arrays, strict=True))


# -- what is found ----------------------------------------------------------------------------------------------------


def test_prefix_shifted_and_computed_parts_of_one_prompt():
    bench = Bench()
    store(bench, [*A, *B, *C])
    request = ask(bench, [*A, 7, *C, 8, *B, 9])
    result = look_up(bench, request)
    hashes = chained_chunk_hashes([*A, *B, *C], CHUNK)
    assert result == LookupResult(
        4, (Match(8, 12, 5, 9, hashes[2]), Match(4, 8, 10, 14, hashes[1])), (), (Match(0, 4, 0, 4, hashes[0]),)
    )
    assert result.reused_tokens == 12
    outcome, blocks = retrieve(bench, request, [*result.prefix, *result.matches])
    assert (outcome.ran, outcome.reason, outcome.tokens) == (True, Reason.SPLICED, 12)
    assert_spliced(bench, [*result.prefix, *result.matches], request, 0, blocks)
    assert bench.finish() == NOTHING_LEFT


def test_what_a_segmented_prefix_kept_is_not_found_elsewhere_too():
    """The same text behind other text, stored later: its KV would go where the prompt's own is."""
    bench = Bench(segmented=True)
    store(bench, [*A, *B, *C])
    other = tuple(range(90, 90 + CHUNK))
    store(bench, [*D, 7, 8, 9, 10, *B, *C, *other], seed=1, request_id="later")
    request = ask(bench, [*A, *B, *C, 11, *other])
    bench.store.evict(ObjectKey(request.scope, chained_chunk_hashes(A, CHUNK)[0], 0))
    result = look_up(bench, request)
    assert [match.cur_start for match in result.retained] == [4, 8]
    assert [match.cur_start for match in result.matches] == [13]
    assert result.reused_tokens == 12
    found = [*result.retained, *result.matches]
    outcome, blocks = retrieve(bench, request, found)
    assert outcome.reason is Reason.SPLICED
    assert_spliced(bench, found, request, 0, blocks)
    assert bench.finish() == NOTHING_LEFT


def test_a_prompts_first_chunk_is_found_as_a_prefix_only():
    bench = Bench()
    store(bench, [*A, *B])
    assert look_up(bench, ask(bench, [7, *A])).matches == ()
    assert len(look_up(bench, ask(bench, [7, *B])).matches) == 1
    assert bench.finish() == NOTHING_LEFT


def test_only_what_was_stored_is_indexed():
    bench = Bench()
    bench.transfer.refused = {1}
    store(bench, [*A, *B, *C])
    result = look_up(bench, ask(bench, [7, *B, *C]))
    assert [match.old_start for match in result.matches] == [8]
    assert bench.finish() == NOTHING_LEFT


def test_only_the_first_rank_indexes():
    bench = Bench(world_size=2)
    store(bench, [*A, *B], ranks=[1])
    assert look_up(bench, ask(bench, [7, *B])).matches == ()
    store(bench, [*A, *B], ranks=[0])
    assert len(look_up(bench, ask(bench, [7, *B], "again")).matches) == 1
    assert bench.finish() == NOTHING_LEFT


def test_one_scope_does_not_see_anothers():
    bench = Bench()
    store(bench, [*A, *B])
    for salt, world in (("x", 1), ("", 2)):
        assert look_up(bench, ask(bench, [*A, 7, *B], salt=salt, world_size=world)).reused_tokens == 0
    assert bench.finish() == NOTHING_LEFT


def test_what_one_scope_looked_up_never_serves_another_under_the_same_id():
    bench = Bench()
    store(bench, [*A, *B], salt="", seed=1)
    store(bench, [*A, *B], salt="x", seed=2, request_id="s2")
    mine, other = ask(bench, [7, *B], salt="x"), ask(bench, [7, *B], salt="")
    matches = look_up(bench, mine).matches
    look_up(bench, other)
    outcome, blocks = retrieve(bench, mine, matches)
    assert outcome.ran
    assert_spliced(bench, matches, mine, 0, blocks)
    assert bench.finish() == NOTHING_LEFT


def test_segmented_prefix_keeps_what_lies_behind_a_gap():
    bench = Bench(segmented=True)
    store(bench, [*A, *B, *C])
    request = ask(bench, [*A, *B, *C, *D])
    hashes = chained_chunk_hashes(request.tokens, CHUNK)
    bench.store.evict(ObjectKey(request.scope, hashes[1], 0))
    result = look_up(bench, request)
    assert result.prefix_tokens == 4
    assert result.matches == ()
    assert result.retained == (Match(8, 12, 8, 12, hashes[2]),)
    outcome, blocks = retrieve(bench, request, result.retained)
    assert outcome.ran
    assert_spliced(bench, result.retained, request, 0, blocks)
    assert bench.finish() == NOTHING_LEFT


def test_a_lookup_does_not_strike_what_is_still_being_stored():
    bench = Bench(options={"strike_threshold": 1})
    context = bench.contexts.get(0)
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    [match] = look_up(bench, request).matches
    bench.sessions.end("r")
    # Stored again, on a stream that has not come to it yet, while the object is away.
    context.deferred = True
    store(bench, [*A, *B], request_id="s2")
    bench.store.evict(ObjectKey(request.scope, match.chunk_hash, 0))
    assert look_up(bench, request).matches == ()
    context.run()
    context.deferred = False
    store(bench, [*A, *B], request_id="s3")
    assert look_up(bench, ask(bench, [7, *B], "later")).matches == (match,)
    assert bench.finish() == NOTHING_LEFT


def test_a_chunk_that_storage_lost_is_struck_out_after_as_many_lookups():
    bench = Bench(options={"strike_threshold": 2})
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    [match] = look_up(bench, request).matches
    bench.sessions.end("r")
    bench.store.evict(ObjectKey(request.scope, match.chunk_hash, 0))
    evicted = []
    for n in range(3):
        assert look_up(bench, ask(bench, [7, *B], f"q{n}")).matches == ()
        evicted += [f["num_chunks"] for name, f in bench.sink.of(f"q{n}") if name == events.CHUNKS_EVICTED]
    assert evicted == [0, 1]
    assert bench.finish() == NOTHING_LEFT


def test_what_is_not_loaded_for_want_of_memory_is_not_struck():
    bench = Bench(options={"strike_threshold": 1})
    store(bench, [*A, *B])
    bench.store.hidden = set(bench.store.objects)
    assert look_up(bench, ask(bench, [7, *B])).matches == ()
    bench.store.hidden = set()
    assert len(look_up(bench, ask(bench, [7, *B], "later")).matches) == 1
    assert bench.finish() == NOTHING_LEFT


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ranks_retrieve_in_any_order(world_size):
    bench = Bench(world_size=world_size, blocks=64)
    store(bench, [*A, *B, *C])
    request = ask(bench, [*A, 7, *C, *B])
    result = look_up(bench, request)
    matches = [*result.prefix, *result.matches]
    assert bench.store.total_locks() == 3 * world_size
    ranks = random.Random(world_size).sample(range(world_size), world_size)
    for done, rank in enumerate(ranks):
        assert bench.store.total_locks() == 3 * (world_size - done)
        assert (events.REQUEST_END in bench.sink.names("r")) is False
        mine = ask(bench, request.tokens, worker_id=rank)
        outcome, blocks = retrieve(bench, mine, matches, rank)
        assert outcome.ran
        assert_spliced(bench, matches, request, rank, blocks, rank)
    assert bench.store.total_locks() == 0
    assert bench.sink.names("r").count(events.REQUEST_END) == 1
    assert bench.finish() == NOTHING_LEFT


def test_a_chunk_that_one_rank_lost_is_no_match():
    bench = Bench(world_size=2)
    store(bench, [*A, *B, *C])
    request = ask(bench, [7, *C, *B])
    hashes = chained_chunk_hashes([*A, *B, *C], CHUNK)
    bench.store.evict(ObjectKey(request.scope, hashes[1], 1))
    assert [match.chunk_hash for match in look_up(bench, request).matches] == [hashes[2]]
    assert bench.store.total_locks() == 2
    assert bench.finish() == NOTHING_LEFT


def test_ranks_that_share_each_object_lock_it_once_each():
    bench = Bench(instances=4)
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    result = look_up(bench, request, tp_size=4)
    assert bench.store.total_locks() == 4
    for instance in (2, 0, 3, 1):
        mine = ask(bench, request.tokens, worker_id=instance)
        outcome, blocks = retrieve(bench, mine, result.matches, instance)
        assert outcome.ran
        assert_spliced(bench, result.matches, request, instance, blocks)
    assert bench.store.total_locks() == 0
    assert bench.finish() == NOTHING_LEFT


# -- block tables that grow -------------------------------------------------------------------------------------------


def test_a_block_table_that_grows():
    bench = Bench()
    store(bench, [*A, *B, *C])
    request = ask(bench, [7, *B, 8, 8, 8, *C, 9])
    matches = look_up(bench, request).matches
    blocks = bench.caches[0].allocator.allocate(7)
    before = snapshot(bench)
    assert retrieve(bench, request, matches, blocks=blocks[:1])[0].reason is Reason.DEFERRED
    assert bench.store.total_locks() == 2
    assert_untouched(bench, before)
    assert retrieve(bench, request, matches, blocks=blocks)[0].reason is Reason.SPLICED
    assert retrieve(bench, request, matches, blocks=blocks)[0].reason is Reason.APPLIED
    assert_spliced(bench, matches, request, 0, blocks)
    # Moved to other blocks, it is written again.
    moved = bench.caches[0].allocator.allocate(7)
    assert retrieve(bench, request, matches, blocks=moved)[0].reason is Reason.SPLICED
    assert_spliced(bench, matches, request, 0, moved)
    assert bench.finish() == NOTHING_LEFT


def test_a_block_table_that_reaches_some_matches_only_writes_none():
    bench = Bench()
    store(bench, [*A, *B, *C])
    request = ask(bench, [7, *B, 8, 8, 8, *C, 9])
    matches = look_up(bench, request).matches
    blocks = bench.caches[0].allocator.allocate(7)
    before = snapshot(bench)
    outcome, _ = retrieve(bench, request, matches, blocks=blocks[:4])
    assert (outcome.ran, outcome.reason) == (False, Reason.PARTIAL)
    assert_untouched(bench, before)
    assert bench.store.total_locks() == 0
    assert bench.finish() == NOTHING_LEFT


# -- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["submit", "poll"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_store_that_raises_in_a_lookup_is_a_miss(what, times):
    bench = Bench()
    store(bench, [*A, *B])
    bench.store.raises[what] = times
    result = look_up(bench, ask(bench, [*A, 7, *B]))
    assert result.reused_tokens == (4 if times == 1 else 0)
    assert bench.finish() == NOTHING_LEFT


def test_a_store_that_raises_on_read_writes_nothing():
    bench = Bench()
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    matches = look_up(bench, request).matches
    before = snapshot(bench)
    bench.store.raises["read"] = 1
    outcome, blocks = retrieve(bench, request, matches)
    assert (outcome.ran, outcome.reason) == (False, Reason.FAILED)
    assert_untouched(bench, before)
    # The caller may try again: what is still in memory is locked anew.
    assert retrieve(bench, request, matches, blocks=blocks)[0].ran
    assert bench.finish() == NOTHING_LEFT


def test_a_store_that_raises_on_release_does_not_fail_the_retrieve():
    bench = Bench()
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    matches = look_up(bench, request).matches
    bench.store.raises["release"] = 1
    assert retrieve(bench, request, matches)[0].ran
    # Whether it took effect cannot be known; it is not done twice.
    assert bench.finish() == NOTHING_LEFT | {"locks": 1}


def test_an_object_that_went_between_lookup_and_retrieve():
    bench = Bench()
    store(bench, [*A, *B, *C])
    request = ask(bench, [7, *B, *C])
    matches = look_up(bench, request).matches
    before = snapshot(bench)
    # Against its locks, as a store may that a worker's death has cleaned up.
    del bench.store.objects[ObjectKey(request.scope, matches[0].chunk_hash, 0)]
    outcome, _ = retrieve(bench, request, matches)
    assert (outcome.ran, outcome.reason) == (False, Reason.GONE)
    assert_untouched(bench, before)
    assert bench.finish() == NOTHING_LEFT


def test_a_splicer_that_raises_midway_reports_nothing_as_written(monkeypatch):
    bench = Bench()
    store(bench, [*A, *B, *C])
    request = ask(bench, [7, *B, *C])
    matches = look_up(bench, request).matches
    splicer = bench.engine._targets[0].splicer
    real = splicer.splice

    def half(chunks, tables, stream=None):
        real(chunks[:1], tables, stream=stream)
        raise Planted("midway")

    monkeypatch.setattr(splicer, "splice", half)
    outcome, blocks = retrieve(bench, request, matches)
    assert (outcome.ran, outcome.reason) == (False, Reason.FAILED)
    assert [f["success"] for name, f in bench.sink.of("r") if name == events.SCATTER_END] == [False]
    monkeypatch.undo()
    # Not even the half that was written counts.
    outcome, _ = retrieve(bench, request, matches, blocks=blocks)
    assert (outcome.reason, outcome.tokens) == (Reason.SPLICED, 8)
    assert_spliced(bench, matches, request, 0, blocks)
    assert bench.finish() == NOTHING_LEFT


def test_a_stored_object_of_another_shape_is_refused_and_writes_nothing():
    bench = Bench()
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    matches = look_up(bench, request).matches
    key = ObjectKey(request.scope, matches[0].chunk_hash, 0)
    bench.store.objects[key] = (np.zeros((2, 3, CHUNK, SIZE), np.float32),)
    before = snapshot(bench)
    assert retrieve(bench, request, matches)[0].reason is Reason.FAILED
    assert_untouched(bench, before)
    assert bench.finish() == NOTHING_LEFT


def test_indexing_that_fails_does_not_fail_the_store(monkeypatch):
    bench = Bench()
    monkeypatch.setattr(type(bench.matcher), "register", lambda *_, **__: 1 / 0)
    store(bench, [*A, *B])
    assert look_up(bench, ask(bench, [*A, 7, *B])).prefix_tokens == 4
    assert bench.finish() == NOTHING_LEFT


def test_a_transfer_that_raises_reaches_the_caller_and_indexes_nothing(monkeypatch):
    bench = Bench()

    def broken(*_):
        raise Planted("store")

    monkeypatch.setattr(bench.transfer, "store", broken)
    with pytest.raises(Planted):
        bench.engine.store(ask(bench, [*A, *B], worker_id=0, end=8), 0, [[0, 1, 2, 3]])
    assert look_up(bench, ask(bench, [7, *B])).matches == ()
    assert bench.finish() == NOTHING_LEFT


# -- fleet ------------------------------------------------------------------------------------------------------------


def fleet_bench():
    bench = Bench(fleet=ScriptedFleet())
    store(bench, [*A, *B])
    return bench, chained_chunk_hashes([*A, *B], CHUNK)


def test_the_fleet_is_told_and_asked_instead_of_the_matcher():
    bench, hashes = fleet_bench()
    assert [(tokens, told, start) for _, tokens, told, start in bench.fleet.published] == [([*A, *B], hashes, 0)]
    request = ask(bench, [7, *B])
    assert bench.engine.lookup(request) is None
    bench.fleet.answer_all((hashes[1], 4, 1))
    assert look_up(bench, request).matches == (Match(4, 8, 1, 5, hashes[1]),)
    assert events.FINGERPRINT_MATCH_START not in bench.sink.names("r")
    assert bench.finish() == NOTHING_LEFT


def test_a_fleet_that_never_answers_costs_its_budget_and_the_matches():
    bench, hashes = fleet_bench()
    request = ask(bench, [*A, 7, *B])
    assert bench.engine.lookup(request) is None
    bench.clock.now += bench.fleet.budget_s / 2
    assert bench.engine.lookup(request) is None
    bench.clock.now += bench.fleet.budget_s
    result = bench.engine.lookup(request)
    assert (result.prefix_tokens, result.matches) == (4, ())
    assert len(bench.fleet.forgotten) == 1
    assert [f for name, f in bench.sink.of("r") if name == events.FLEET_MATCH_END] == [
        {"matches": 0, "timed_out": True}
    ]
    # Too late is never.
    bench.fleet.answer_all((hashes[1], 4, 5))
    assert bench.finish() == NOTHING_LEFT


@pytest.mark.parametrize(
    "hit",
    [(b"\0" * 32, 4, 1), (b"", 4, 1), (b"known", 4, 2), (b"known", 4, -1), (b"known", -4, 1), (b"known", 2**70, 1)],
)
def test_what_the_fleet_claims_and_storage_does_not_hold_or_the_prompt_does_not_fit_is_dropped(hit):
    bench, hashes = fleet_bench()
    request = ask(bench, [7, *B])
    bench.engine.lookup(request)
    bench.fleet.answer_all((hashes[1] if hit[0] == b"known" else hit[0], *hit[1:]))
    assert look_up(bench, request).matches == ()
    assert bench.finish() == NOTHING_LEFT


# -- jobs that nobody ends --------------------------------------------------------------------------------------------


def test_an_abandoned_lookup_releases_what_is_still_being_loaded():
    bench = Bench()
    store(bench, [*A, *B])
    bench.store.latency = 2
    request = ask(bench, [*A, 7, *B])
    assert bench.engine.lookup(request) is None
    bench.sessions.end("r")
    assert bench.engine.report_status()["abandoned_prefetches"] == 1
    [fields] = [f for name, f in bench.sink.of("r") if name == events.LOOKUP_END]
    assert fields["abandoned"] is True
    for _ in range(2):
        bench.store.tick()
    assert bench.store.total_locks() == 1
    # The next lookup of anybody cleans up.
    bench.store.latency = 0
    look_up(bench, ask(bench, [99] * CHUNK, "other"))
    assert bench.store.total_locks() == 0
    assert bench.finish() == NOTHING_LEFT


def test_lookups_and_results_that_nobody_comes_back_for_expire():
    bench = Bench(options={"job_ttl_s": 60, "request_ttl_s": 600})
    store(bench, [*A, *B])
    look_up(bench, ask(bench, [7, *B], "done"))
    bench.store.latency = 100
    assert bench.engine.lookup(ask(bench, [7, *B], "running")) is None
    bench.clock.now = 59
    bench.engine._reap()
    assert list(bench.engine.report_status()["active_lookups"]) == ["running"]
    bench.clock.now = 61
    bench.engine._reap()
    assert bench.engine.report_status()["active_lookups"] == {}
    assert bench.engine.report_status()["read_locks"] == 1
    bench.clock.now = 601
    bench.engine._reap()
    assert bench.engine.report_status()["read_locks"] == 0
    for _ in range(100):
        bench.store.tick()
    assert bench.finish() == NOTHING_LEFT


def test_housekeeping_runs_by_itself():
    bench = Bench(options={"housekeeping_s": 0.01, "job_ttl_s": 1})
    store(bench, [*A, *B])
    bench.store.latency = 100
    assert bench.engine.lookup(ask(bench, [7, *B])) is None
    bench.clock.now = 2
    for _ in range(1000):
        if not bench.engine.report_status()["active_lookups"]:
            break
        time.sleep(0.01)
    assert bench.engine.report_status()["active_lookups"] == {}
    for _ in range(100):
        bench.store.tick()
    assert bench.finish() == NOTHING_LEFT


def test_another_prompt_under_the_same_id_replaces_the_first():
    bench = Bench()
    store(bench, [*A, *B, *C])
    bench.store.latency = 2
    assert bench.engine.lookup(ask(bench, [7, *B])) is None
    bench.store.latency = 0
    result = look_up(bench, ask(bench, [7, *C]))
    assert [match.old_start for match in result.matches] == [8]
    again = look_up(bench, ask(bench, [7, *B]))
    assert [match.old_start for match in again.matches] == [4]
    for _ in range(3):
        bench.store.tick()
    bench.engine._reap()
    assert bench.store.total_locks() == 1
    assert bench.finish() == NOTHING_LEFT


def test_two_callers_that_poll_one_request_get_one_result():
    bench = Bench()
    store(bench, [*A, *B])
    request, results = ask(bench, [7, *B]), []
    gate = threading.Barrier(4)

    def poll():
        gate.wait()
        for _ in range(50):
            results.append(bench.engine.lookup(request))

    threads = [threading.Thread(target=poll) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(result is not None and result.matches for result in results)
    assert bench.finish() == NOTHING_LEFT


def test_closing_releases_everything_and_ends_the_engine():
    bench = Bench()
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    result = look_up(bench, request)
    bench.store.latency = 5
    assert bench.engine.lookup(ask(bench, [7, *B], "running")) is None
    bench.engine.close()
    bench.engine.close()
    assert bench.store.total_locks() == 0
    assert bench.sink.open_spans() == {}
    calls = [
        lambda: bench.engine.lookup(request),
        lambda: bench.engine.store(request, 0, [[0]]),
        lambda: bench.engine.retrieve(request, result.matches, [[0]], 0),
        lambda: bench.engine.register_rope(0, [bench.table], SIZE),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"instance_id": 7}, "instance_id"),
        ({"cos_sin_caches": []}, "cos_sin_caches"),
        ({"group_to_cache": [1]}, "group_to_cache"),
        ({"head_size": 6}, "head_size"),
        ({"cos_sin_caches": [rope_table().astype(int)]}, "cos_sin_caches"),
    ],
)
def test_a_rope_that_does_not_fit_is_refused_and_the_earlier_one_stays(change, name):
    bench = Bench()
    store(bench, [*A, *B])
    arguments = {"instance_id": 0, "cos_sin_caches": [bench.table], "head_size": SIZE} | change
    with pytest.raises((ValueError, TypeError), match=name):
        bench.engine.register_rope(**arguments)
    request = ask(bench, [7, *B])
    matches = look_up(bench, request).matches
    outcome, blocks = retrieve(bench, request, matches)
    assert outcome.ran
    assert_spliced(bench, matches, request, 0, blocks)
    assert bench.finish() == NOTHING_LEFT


def test_a_retrieve_that_cannot_be_is_refused_and_keeps_its_locks():
    bench = Bench(world_size=2)
    store(bench, [*A, *B])
    request = ask(bench, [7, *B], worker_id=0)
    matches = look_up(bench, request).matches
    before = snapshot(bench)
    wrong = [
        ("instance_id", (request, matches, [[0, 1, 2]], 9)),
        ("block_ids", (request, matches, [], 0)),
        ("worker_id", (ask(bench, [7, *B]), matches, [[0, 1, 2]], 0)),
        ("worker_id", (ask(bench, [7, *B], worker_id=2), matches, [[0, 1, 2]], 0)),
    ]
    for name, arguments in wrong:
        with pytest.raises(ValueError, match=name):
            bench.engine.retrieve(*arguments)
    bench.engine.unregister_rope(1)
    with pytest.raises(ValueError, match="rope"):
        bench.engine.retrieve(ask(bench, [7, *B], worker_id=1), matches, [[0, 1, 2]], 1)
    assert_untouched(bench, before)
    assert bench.store.total_locks() == 2
    assert retrieve(bench, request, matches)[0].ran
    assert bench.finish() == NOTHING_LEFT


def test_a_request_without_a_full_chunk_is_an_empty_result():
    bench = Bench()
    store(bench, [*A, *B])
    for tokens in ([], [1], [1, 2, 3]):
        assert look_up(bench, ask(bench, tokens)) == LookupResult(0)
    assert bench.finish() == NOTHING_LEFT


def test_tokens_that_are_none_are_refused_and_leave_nothing():
    bench = Bench()
    for tokens in (["x"] * 8, [-1] * 8, [2**40] * 8):
        with pytest.raises((TypeError, ValueError, OverflowError), match="token"):
            bench.engine.lookup(Request("r", tokens, "m"))
    assert bench.finish() == NOTHING_LEFT


# -- assembled --------------------------------------------------------------------------------------------------------


def test_an_engine_in_three_lines_over_a_restart(tmp_path):
    tokens = [*A, *B, *C]
    kept = {}
    for run in range(2):
        cache = PagedCache(2, 32, block_size=BLOCK, heads=1, head_size=SIZE)
        engine = BlendEngine.embedded(
            cache.layout, [rope_table()], SIZE, chunk_size=CHUNK, disk=tmp_path, model_name="m",
            options=EngineOptions(housekeeping_s=0.01),
        )  # fmt: skip
        blocks = cache.allocator.allocate(6)
        if run == 0:
            for array in cache.arrays:
                array[blocks] = np.random.default_rng(3).normal(size=array[blocks].shape)
            kept = [array[blocks].copy() for array in cache.arrays]
            assert engine.store(Request("s", tokens, "m", worker_id=0), 0, [blocks]) is True
        else:
            # The index does not outlive the process; the stored prefix does.
            request = Request("r", [*tokens, 5], "m", worker_id=0)
            while (result := engine.lookup(request)) is None:
                pass
            assert result.prefix_tokens == 12
            blocks += cache.allocator.allocate(1)
            assert engine.retrieve(request, result.prefix, [blocks], 0).ran
            assert all(np.array_equal(a[blocks[:6]], b) for a, b in zip(cache.arrays, kept, strict=True))
        assert engine.memory.read_locks == 0
        engine.close()


def test_an_unknown_option_is_named():
    cache = PagedCache(2, 32, block_size=BLOCK, heads=1, head_size=SIZE)
    with pytest.raises(TypeError, match="chunksize"):
        BlendEngine.embedded(cache.layout, [rope_table()], SIZE, chunksize=4)
