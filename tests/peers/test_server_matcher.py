"""Our matcher in LMCache's own server: what it finds, beside a server as it comes, and how a wrong start ends."""

import random
import time

import pytest
from lmcache_server import CHUNK, Server

from kvsplice import __version__


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Two servers: as it comes, and with our matcher."""
    servers = [Server(tmp_path_factory.mktemp("server"), config) for config in (None, {"mode": "matcher"})]
    try:
        yield [server.wait_until_up() for server in servers]
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def workers(running):
    return [server.worker() for server in running]


@pytest.fixture
def started(tmp_path):
    """Servers of one test's own."""
    servers = []

    def start(config, *arguments, **options):
        servers.append(Server(tmp_path, config, *arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def text(seed, chunks):
    return random.Random(seed).choices(range(150_000), k=chunks * CHUNK)


def wait_for_entries(server, count):
    """Registration is asynchronous: the number of chunks in the index, once it is that many."""
    deadline = time.monotonic() + 20
    while (entries := server.status()["kvsplice"]["matcher"]["entries"]) != count:
        assert time.monotonic() < deadline, f"{entries} chunks are indexed"
        time.sleep(0.02)


def found(result):
    segments = result.non_prefix_segments
    return result.prefix_coverage_tokens, [(m.old_st, m.old_ed, m.cur_st, m.cur_ed, m.hash) for m in segments]


def test_the_server_says_who_matches(running):
    stock, ours = running
    assert "kvsplice" not in stock.status()
    status = ours.status()["kvsplice"]
    assert (status["version"], status["mode"]) == (__version__, "matcher")
    assert status["matcher"]["capacity"] == 1 << 20
    assert f"kvsplice {__version__}: the blend module matches with" in ours.log.read_text()


def test_both_find_the_same_parts_of_prompts(workers):
    documents = [text(seed, 6) for seed in range(4)]
    chance = random.Random(9)
    for number, document in enumerate(documents):
        assert [worker.store(document, f"store-{number}") for worker in workers] == [True, True]
    time.sleep(0.5)
    elsewhere = 0
    for number in range(20):
        first = chance.choice(documents)
        prompt = first[: chance.randrange(0, len(first), 5)] if number % 2 else []
        for document in chance.sample(documents, 3):
            start = chance.randrange(0, 4) * CHUNK + chance.randrange(0, CHUNK)
            prompt = prompt + text(f"fresh {number}", 1)[: chance.randrange(0, 9)] + document[start:]
        results = [found(worker.look_up(prompt, f"both-{number}")) for worker in workers]
        assert results[0] == results[1]
        elsewhere += len(results[1][1])
        for worker in workers:
            worker.end(f"both-{number}")
    assert elsewhere > 50


def test_what_storage_lost_leaves_the_index(running, workers):
    server, worker = running[1], workers[1]
    before = server.status()["kvsplice"]["matcher"]["entries"]
    document = text("lost", 3)
    worker.store(document, "lost")
    wait_for_entries(server, before + 2)
    shifted = [1, 2, 3, *document[CHUNK:]]
    assert len(found(worker.look_up(shifted, "lost-0"))[1]) == 2
    worker.end("lost-0")
    worker.forget_everything()
    for turn in (1, 2):
        assert found(worker.look_up(shifted, f"lost-{turn}")) == (0, [])
        worker.end(f"lost-{turn}")
    wait_for_entries(server, before)


def test_a_full_index_goes_on(started):
    server = started({"mode": "matcher", "capacity": 4}).wait_until_up()
    worker = server.worker()
    for number in range(3):
        worker.store(text(number, 3), f"s{number}")
        # Each of the documents registers two: a prompt's first chunk is the prefix leg's.
        wait_for_entries(server, min(2 * (number + 1), 4))
    shifted = [7, *text(2, 3)[CHUNK:]]
    deadline = time.monotonic() + 20
    while len(found(worker.look_up(shifted, "r"))[1]) != 2:
        worker.end("r")
        assert time.monotonic() < deadline
    status = server.status()["kvsplice"]["matcher"]
    assert (status["entries"], status["evicted"], status["registered"]) == (4, 2, 6)


def test_with_dedup_and_reorder(started):
    flags = ["--enable-dedup-content", "--enable-blend-reorder"]
    server = started({"mode": "matcher"}, *flags).wait_until_up()
    worker = server.worker()
    first, second = text("a", 4), text("b", 1)
    worker.store(first, "s1")
    wait_for_entries(server, 3)
    # The same text behind another beginning is not indexed again.
    worker.store(second + first[CHUNK:], "s2")
    time.sleep(0.5)
    wait_for_entries(server, 3)
    prompt = text("question", 1) + first[CHUNK : 2 * CHUNK] + first[:CHUNK] + first[2 * CHUNK :]
    plan = worker.calls.cb_reorder_plan(worker.key(prompt, "plan"), 0, 2000).result(30)
    assert sorted(plan) == sorted(prompt)
    copied = 3 * CHUNK
    assert plan[:copied] == first[:copied] != prompt[:copied]


def test_a_wrong_configuration_stops_the_start(started):
    server = started({"mode": "matcher", "capacty": 5})
    assert server.process.wait(60) != 0
    assert "config: unknown key 'capacty'; there are mode, capacity, on_full, seed" in server.log.read_text()


def test_a_server_without_a_blend_module_does_not_start(started):
    server = started({"mode": "matcher"}, engine_type="default")
    assert server.process.wait(60) != 0
    assert "start it with --engine-type blend" in server.log.read_text()
