"""The metrics against what was done, read as a scrape reads them."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine_parts import CHUNK, SIZE, Bench, ScriptedFleet, ask, look_up, retrieve, rope_table, store
from kvsplice import BlendEngine, Request, events
from kvsplice.embedded import EventBus, PagedCache
from kvsplice.metrics import EngineMetrics

A, B, C = (tuple(range(10 * n, 10 * n + CHUNK)) for n in range(1, 4))


def scrape(registry):
    """Samples by name and labels, as ``name{label=value}``."""
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


@pytest.fixture
def registry():
    return CollectorRegistry()


def watched(registry, **options):
    """An engine on scripted parts whose events go to a bus too."""
    bench, bus = Bench(**options), EventBus()
    record = bench.sink.publish

    def publish(name, request_id, fields):
        record(name, request_id, fields)
        bus.publish(name, request_id, fields)

    bench.sink.publish = publish
    return bench, EngineMetrics(bench.engine, bus, registry)


def test_lookups_and_retrieves_are_counted_by_tokens(registry):
    bench, _ = watched(registry)
    store(bench, [*A, *B, *C])
    request = ask(bench, [*A, 7, *C, 8, 9, 10, 11, 12])
    result = look_up(bench, request)
    retrieve(bench, request, [*result.prefix, *result.matches])
    retrieve(bench, request, [])
    samples = scrape(registry)
    expected = {
        "kvsplice_registered_chunks_total": 2,
        "kvsplice_lookups_total{outcome=done}": 1,
        "kvsplice_lookups_total{outcome=abandoned}": 0,
        "kvsplice_requested_tokens_total": 12,
        "kvsplice_hit_tokens_total{kind=prefix}": 4,
        "kvsplice_hit_tokens_total{kind=non_prefix}": 4,
        "kvsplice_hit_tokens_total{kind=segmented_prefix}": 0,
        "kvsplice_retrieves_total{outcome=spliced}": 1,
        "kvsplice_retrieves_total{outcome=failed}": 0,
        "kvsplice_retrieves_total{outcome=empty}": 1,
        "kvsplice_scattered_tokens_total": 8,
        "kvsplice_scattered_chunks_total{kind=prefix}": 1,
        "kvsplice_scattered_chunks_total{kind=shifted}": 1,
        "kvsplice_matcher_entries": 2,
        "kvsplice_active_lookups": 0,
        "kvsplice_read_locks": 0,
    }
    assert {name: samples[name] for name in expected} == expected
    for phase in ("lookup", "prefix_lookup", "fingerprint_match", "retrieve", "scatter"):
        assert samples[f"kvsplice_phase_seconds_count{{phase={phase}}}"] == 1
        assert 0 < samples[f"kvsplice_phase_seconds_sum{{phase={phase}}}"] < 10


def test_a_lookup_under_way_shows_and_an_abandoned_one_counts(registry):
    bench, _ = watched(registry)
    store(bench, [*A, *B])
    bench.store.latency = 2
    request = ask(bench, [*A, *B])
    assert bench.engine.lookup(request) is None
    assert scrape(registry)["kvsplice_active_lookups"] == 1
    bench.engine.end("r")
    samples = scrape(registry)
    assert samples["kvsplice_active_lookups"] == 0
    assert samples["kvsplice_abandoned_prefetches"] == 1
    assert samples["kvsplice_lookups_total{outcome=abandoned}"] == 1


def test_what_storage_lost(registry):
    bench, _ = watched(registry)
    store(bench, [*A, *B])
    bench.store.objects.clear()
    for turn in range(2):
        look_up(bench, ask(bench, [7, *B], str(turn)))
    samples = scrape(registry)
    assert samples["kvsplice_stale_chunks_total"] == 2
    assert samples["kvsplice_struck_out_chunks_total"] == 1
    assert samples["kvsplice_matcher_entries"] == 0


def test_a_failed_retrieve(registry):
    bench, _ = watched(registry)
    store(bench, [*A, *B])
    request = ask(bench, [7, *B, 8, 9, 10])
    result = look_up(bench, request)
    bench.store.raises["read"] = 1
    retrieve(bench, request, result.matches)
    assert scrape(registry)["kvsplice_retrieves_total{outcome=failed}"] == 1


def test_ranks_under_one_request_id_are_timed_apart(registry):
    bench, _ = watched(registry, world_size=2)
    store(bench, [*A, *B])
    request = ask(bench, [7, *B, 8, 9, 10])
    result = look_up(bench, request)
    for rank in (0, 1):
        context = bench.contexts.get(rank)
        context.deferred = True
        retrieve(bench, ask(bench, request.tokens, worker_id=rank), result.matches, instance=rank)
    for rank in (0, 1):
        bench.contexts.get(rank).run()
    assert scrape(registry)["kvsplice_phase_seconds_count{phase=retrieve}"] == 2


def test_the_fleet(registry):
    fleet = ScriptedFleet()
    bench, _ = watched(registry, fleet=fleet)
    store(bench, [*A, *B])
    request = ask(bench, [7, *B])
    assert bench.engine.lookup(request) is None
    bench.clock.now += 2
    look_up(bench, request)
    samples = scrape(registry)
    assert samples["kvsplice_fleet_timeouts_total"] == 1
    assert samples["kvsplice_fleet_asked_total"] == 1
    assert samples["kvsplice_fleet_told_total"] == 1
    assert samples["kvsplice_phase_seconds_count{phase=fleet_match}"] == 1


def test_an_embedded_engine_shows_its_memory_too(registry, tmp_path):
    cache = PagedCache(1, 16, block_size=2, heads=1, head_size=SIZE)
    with_disk = {"chunk_size": CHUNK, "disk": tmp_path, "memory_bytes": 1 << 20}
    engine = BlendEngine.embedded(cache.layout, [rope_table()], SIZE, **with_disk)
    try:
        metrics = EngineMetrics(engine, engine.bus, registry)
        assert not engine.bus.wants(events.LOOKUP_HASHES), "a record that nobody reads would be built"
        engine.store(Request("s", np.arange(8)), 0, [[0, 1, 2, 3]])
        engine.memory.flush()
        samples = scrape(registry)
        nbytes = 2 * CHUNK * 2 * SIZE * 4
        assert (samples["kvsplice_memory_objects"], samples["kvsplice_memory_bytes"]) == (2, nbytes)
        assert samples["kvsplice_memory_capacity"] == 1 << 20
        assert samples["kvsplice_memory_disk_objects"] == 2
        assert samples["kvsplice_memory_disk_failed_writes_total"] == 0
        metrics.close()
        assert scrape(registry) == {}
    finally:
        engine.close()


def test_without_a_bus_only_the_status_is_exported(registry):
    bench = Bench()
    EngineMetrics(bench.engine, registry=registry)
    store(bench, [*A, *B])
    bench.settle()
    samples = scrape(registry)
    assert samples["kvsplice_matcher_entries"] == 1
    assert not [name for name in samples if "phase" in name or "tokens_total" in name]


def test_a_second_engine_in_one_registry_is_refused_and_hears_nothing(registry):
    bench, _ = watched(registry)
    bus = EventBus()
    with pytest.raises(ValueError, match="Duplicated"):
        EngineMetrics(bench.engine, bus, registry)
    assert not bus.wants(events.LOOKUP_END)
    assert scrape(registry)["kvsplice_open_requests"] == 0
