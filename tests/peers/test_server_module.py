"""Our engine as a module of LMCache's own server: stores, lookups and retrieves of a worker made of its classes."""

import random
import time

import pytest
from lmcache_server import CHUNK, Geometry, Server

from kvsplice import __version__

BLOCK = 4


@pytest.fixture(scope="module", params=["blend-zmq", "blend-grpc", "default-zmq", "default-grpc"])
def server(request, tmp_path_factory):
    engine_type, transport = request.param.split("-")
    folder = tmp_path_factory.mktemp("server")
    started = Server(folder, {"mode": "module"}, engine_type=engine_type, transport=transport)
    try:
        yield started.wait_until_up()
    finally:
        started.stop()
    # Nothing failed where no test looks: in the server's threads, or when it stopped.
    assert "Traceback" not in started.log.read_text()


@pytest.fixture(scope="module")
def worker(server):
    return server.worker()


@pytest.fixture
def started(tmp_path):
    """Servers of one test's own."""
    servers = []

    def start(config, *arguments, **options):
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(Server(folder, config, *arguments, **options))
        return servers[-1]

    yield start
    for each in servers:
        each.stop()


def text(seed, chunks):
    return random.Random(seed).choices(range(150_000), k=chunks * CHUNK)


def store(server, worker, tokens, request_id, salt=""):
    """Store a text from the first blocks, and wait until it is indexed."""
    before = server.status()["kvsplice"]["matcher"]["registered"]
    assert worker.store(tokens, request_id, salt)
    deadline = time.monotonic() + 20
    while server.status()["kvsplice"]["matcher"]["registered"] < before + len(tokens) // CHUNK - 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_server_says_who_answers(server, worker):
    status = server.status()
    assert (status["kvsplice"]["version"], status["kvsplice"]["mode"]) == (__version__, "module")
    assert status["registered_cb_rope_instances"] == [worker.instance_id]
    assert worker.calls.cb_protocol_handshake(1).result(30) == (1, True)


def test_shifted_text_is_found_and_written(server, worker):
    document = text("shifted", 6)
    store(server, worker, document, "store")
    prompt = [7] * 5 + document[CHUNK : 5 * CHUNK] + [8] * 20
    found = worker.look_up(prompt, "shifted")
    assert found.prefix_coverage_tokens == 0
    assert [(m.old_st, m.cur_st) for m in found.non_prefix_segments] == [
        (chunk * CHUNK, 5 + (chunk - 1) * CHUNK) for chunk in range(1, 5)
    ]
    before = worker.contents()
    blocks = list(range(60, 60 + -(-len(prompt) // BLOCK)))
    assert worker.retrieve(prompt, "shifted", found.non_prefix_segments, blocks)
    worker.assert_spliced(before, found.non_prefix_segments, blocks)
    worker.end("shifted")
    assert server.read_locks() == 0


def test_the_same_prompt_is_a_prefix(server, worker):
    document = text("prefix", 4)
    store(server, worker, document, "store-prefix")
    found = worker.look_up([*document, 1, 2, 3], "prefix")
    assert (found.prefix_coverage_tokens, found.non_prefix_segments) == (4 * CHUNK, [])
    # LMCache's own retrieve reads it, or the worker gives it back.
    assert server.read_locks() == 4
    worker.free_prefix(document, "prefix")
    assert server.read_locks() == 0
    worker.end("prefix")


def test_a_prefix_and_more_behind_it(server, worker):
    first, second = text("one", 3), text("two", 4)
    store(server, worker, first, "store-one")
    store(server, worker, second, "store-two")
    prompt = [*first[: 2 * CHUNK], 5, 5, 5, *second[CHUNK:]]
    found = worker.look_up(prompt, "both")
    assert found.prefix_coverage_tokens == 2 * CHUNK
    assert [m.old_st for m in found.non_prefix_segments] == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    before = worker.contents()
    blocks = list(range(90, 90 + -(-len(prompt) // BLOCK)))
    # A block table that ends before the first match is no loss; one that ends between matches is.
    assert worker.retrieve(prompt, "both", found.non_prefix_segments, blocks[:8])
    worker.assert_spliced(before, [], blocks)
    assert worker.retrieve(prompt, "both", found.non_prefix_segments, blocks)
    worker.assert_spliced(before, found.non_prefix_segments, blocks)
    # Again, and nothing more happens.
    assert worker.retrieve(prompt, "both", found.non_prefix_segments, blocks)
    worker.free_prefix(prompt, "both")
    assert server.read_locks() == 0
    worker.end("both")


def test_a_block_table_that_ends_between_matches(server, worker):
    document = text("between", 4)
    store(server, worker, document, "store-between")
    prompt = [3, *document[CHUNK:]]
    found = worker.look_up(prompt, "between")
    before = worker.contents()
    assert not worker.retrieve(prompt, "between", found.non_prefix_segments, list(range(60, 60 + 6)))
    worker.assert_spliced(before, [], [])
    worker.end("between")
    assert server.read_locks() == 0


def test_salts_and_models_see_their_own_only(server, worker):
    document = text("salts", 3)
    store(server, worker, document, "store-salt", salt="a")
    prompt = [9, *document[CHUNK:]]
    other = server.worker(instance_id=2000, model="other")
    for number in range(3):
        assert other.look_up(prompt, f"other-{number}").non_prefix_segments == []
        for salt, count in (("", 0), ("b", 0), ("a", 2)):
            found = worker.look_up(prompt, f"salt-{salt}-{number}", salt)
            assert len(found.non_prefix_segments) == count
            worker.end(f"salt-{salt}-{number}")


def test_what_storage_lost_is_struck_out(server, worker):
    document = text("lost", 3)
    store(server, worker, document, "store-lost")
    entries = server.status()["kvsplice"]["matcher"]["entries"]
    worker.forget_everything()
    for turn in range(2):
        assert worker.look_up([2, *document[CHUNK:]], f"lost-{turn}").non_prefix_segments == []
        worker.end(f"lost-{turn}")
    assert server.status()["kvsplice"]["matcher"]["entries"] == entries - 2


def test_a_lookup_that_nobody_retrieves_is_released(server, worker):
    document = text("abandoned", 3)
    store(server, worker, document, "store-abandoned")
    for _ in range(2):
        assert len(worker.look_up([4, *document[CHUNK:]], "abandoned").non_prefix_segments) == 2
        assert server.read_locks() == 2
    worker.end("abandoned")
    assert server.read_locks() == 0


def test_a_worker_that_unregisters_is_forgotten(server):
    worker = server.worker(instance_id=3000, model="gone")
    assert 3000 in server.status()["registered_cb_rope_instances"]
    worker.calls.unregister_kv_cache(3000).result(30)
    assert 3000 not in server.status()["registered_cb_rope_instances"]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_lmcaches_metrics_go_on(server, worker):
    worker.look_up(text("metrics", 1), "metrics")
    wait_for(lambda: "lmcache_blend_lookup_requests_total" in server.metrics())


def test_without_us_nothing_is_written(started):
    """The built-in retrieve needs operations that this machine does not have."""
    server = started(None).wait_until_up()
    worker = server.worker()
    document = text("stock", 4)
    assert worker.store(document)
    prompt = [7, *document[CHUNK:]]
    wait_for(lambda: len(worker.look_up(prompt, "stock").non_prefix_segments) == 3)
    before = worker.contents()
    matches = worker.look_up(prompt, "stock").non_prefix_segments
    assert not worker.retrieve(prompt, "stock", matches, list(range(40, 60)))
    worker.assert_spliced(before, [], [])


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(form="HND"),
        Geometry(form="blocks first"),
        Geometry(form="fused"),
        Geometry(form="MLA"),
        Geometry(layers=4, tables=2),
        Geometry(form="HND", layers=4, tables=2, fp8=True),
    ],
    ids=lambda g: f"{g.form}-{g.tables}{'-fp8' * g.fp8}",
)
def test_layouts(started, geometry):
    server = started({"mode": "module"}, geometry=geometry).wait_until_up()
    worker = server.worker()
    document = text("layout", 5)
    store(server, worker, document, "s")
    prompt = [7] * 3 + document[CHUNK:]
    found = worker.look_up(prompt, "r").non_prefix_segments
    assert len(found) == 4
    before = worker.contents()
    blocks = random.Random(2).sample(range(40, 120), -(-len(prompt) // geometry.block))
    assert worker.retrieve(prompt, "r", found, blocks)
    worker.assert_spliced(before, found, blocks)
    worker.end("r")
    assert server.read_locks() == 0


def test_what_was_evicted_is_computed_again(started):
    # A chunk is 32 MiB, so that the server's least memory is full after 32.
    geometry = Geometry(chunk=256, block=16, layers=8, heads=8, size=256, blocks=128, positions=4096)
    server = started({"mode": "module"}, geometry=geometry).wait_until_up()
    worker = server.worker()
    documents = [random.Random(n).choices(range(150_000), k=4 * 256) for n in range(12)]
    for number, document in enumerate(documents):
        worker.store(document, f"s{number}")
        time.sleep(0.3)
    found = []
    for number, document in enumerate(documents):
        prompt = [1, 2, 3, *document[256:]]
        matches = worker.look_up(prompt, f"r{number}").non_prefix_segments
        found.append(len(matches))
        before = worker.contents()
        assert worker.retrieve(prompt, f"r{number}", matches, range(64, 128))
        worker.assert_spliced(before, matches, range(64, 128))
        worker.end(f"r{number}")
    assert found[0] == 0
    assert found[-1] == 3
    assert server.read_locks() == 0


def test_a_silent_worker_is_reaped(started):
    # The least that LMCache takes.
    flags = ["--worker-reap-timeout-seconds", "30", "--worker-registration-grace-seconds", "30"]
    server = started({"mode": "module"}, *flags).wait_until_up()
    worker = server.worker()
    document = text("reaped", 3)
    store(server, worker, document, "s")
    wait_for(lambda: server.status()["registered_gpu_ids"] == [])
    wait_for(lambda: server.status()["registered_cb_rope_instances"] == [])
    # There is no paged cache of this model any more.
    assert worker.look_up([1, *document[CHUNK:]], "r").non_prefix_segments == []


def test_dedup_and_reorder(started):
    flags = ["--enable-dedup-content", "--enable-blend-reorder"]
    server = started({"mode": "module"}, *flags).wait_until_up()
    worker = server.worker()
    first, second = text("a", 4), text("b", 1)
    store(server, worker, first, "s1")
    # The same text behind another beginning is not indexed again.
    worker.store(second + first[CHUNK:], "s2")
    time.sleep(0.5)
    assert server.status()["kvsplice"]["matcher"]["entries"] == 3
    prompt = text("question", 1) + first[CHUNK : 2 * CHUNK] + first[:CHUNK] + first[2 * CHUNK :]
    plan = worker.calls.cb_reorder_plan(worker.key(prompt, "plan"), 0, 2000).result(30)
    assert sorted(plan) == sorted(prompt)
    assert plan[: 3 * CHUNK] == first[: 3 * CHUNK] != prompt[: 3 * CHUNK]


def test_reorder_is_declined_without_its_flag(server, worker):
    assert worker.calls.cb_reorder_plan(worker.key(text("plan", 2), "plan"), 0, 2000).result(30) == []


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([], {"config": {"mode": "modul"}}, "config: mode is 'modul'; it has to be 'matcher' or 'module'"),
        (["--supported-transfer-mode", "engine_driven"], {"engine_type": "default"}, "lmcache_driven or auto"),
    ],
)
def test_a_wrong_start_stops(started, arguments, options, message):
    server = started(options.pop("config", {"mode": "module"}), *arguments, **options)
    assert server.process.wait(60) != 0
    assert message in server.log.read_text()
