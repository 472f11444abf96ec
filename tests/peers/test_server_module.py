"""Our engine as a module of LMCache's own server: stores, lookups and retrieves of a worker made of its classes."""

import random
import time

import pytest
import torch
from lmcache_server import CHUNK, Server

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


def rotated(keys, table, positions):
    """Keys ``[tokens, heads, size]`` turned by NeoX's rope of so many positions."""
    half = table.shape[1] // 2
    angle = torch.atan2(table[1, half:].double(), table[1, :half].double()) * positions.double()[:, None]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = keys.double()[..., :half], keys.double()[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def check(worker, before, matches, blocks):
    """Blocks hold the matches, moved, and nothing else has changed."""
    after = worker.tokens_in(range(worker.blocks))
    target = [block * BLOCK + offset for block in blocks for offset in range(BLOCK)]
    for layer, (was, now) in enumerate(zip(before, after, strict=True)):
        expected = was.double()
        for match in matches:
            # Stored from the first blocks, in their order.
            source = was[:, match.old_st : match.old_ed]
            slots = target[match.cur_st : match.cur_ed]
            shift = torch.full((CHUNK,), match.cur_st - match.old_st)
            expected[0, slots] = rotated(source[0], worker.rope, shift)
            expected[1, slots] = source[1].double()
        torch.testing.assert_close(now[0].double(), expected[0], rtol=0, atol=2e-5, msg=f"K of layer {layer}")
        assert torch.equal(now[1].double(), expected[1]), f"V of layer {layer}"


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
    before = worker.tokens_in(range(worker.blocks))
    blocks = list(range(60, 60 + -(-len(prompt) // BLOCK)))
    assert worker.retrieve(prompt, "shifted", found.non_prefix_segments, blocks)
    check(worker, before, found.non_prefix_segments, blocks)
    worker.end("shifted")
    assert server.status()["kvsplice"]["read_locks"] == 0


def test_the_same_prompt_is_a_prefix(server, worker):
    document = text("prefix", 4)
    store(server, worker, document, "store-prefix")
    found = worker.look_up([*document, 1, 2, 3], "prefix")
    assert (found.prefix_coverage_tokens, found.non_prefix_segments) == (4 * CHUNK, [])
    worker.end("prefix")


def test_a_prefix_and_more_behind_it(server, worker):
    first, second = text("one", 3), text("two", 4)
    store(server, worker, first, "store-one")
    store(server, worker, second, "store-two")
    prompt = [*first[: 2 * CHUNK], 5, 5, 5, *second[CHUNK:]]
    found = worker.look_up(prompt, "both")
    assert found.prefix_coverage_tokens == 2 * CHUNK
    assert [m.old_st for m in found.non_prefix_segments] == [CHUNK, 2 * CHUNK, 3 * CHUNK]
    before = worker.tokens_in(range(worker.blocks))
    blocks = list(range(90, 90 + -(-len(prompt) // BLOCK)))
    # A block table that ends before the first match is no loss; one that ends between matches is.
    assert worker.retrieve(prompt, "both", found.non_prefix_segments, blocks[:8])
    check(worker, before, [], blocks)
    assert worker.retrieve(prompt, "both", found.non_prefix_segments, blocks)
    check(worker, before, found.non_prefix_segments, blocks)
    # Again, and nothing more happens.
    assert worker.retrieve(prompt, "both", found.non_prefix_segments, blocks)
    worker.end("both")


def test_a_block_table_that_ends_between_matches(server, worker):
    document = text("between", 4)
    store(server, worker, document, "store-between")
    prompt = [3, *document[CHUNK:]]
    found = worker.look_up(prompt, "between")
    before = worker.tokens_in(range(worker.blocks))
    assert not worker.retrieve(prompt, "between", found.non_prefix_segments, list(range(60, 60 + 6)))
    check(worker, before, [], [])
    worker.end("between")
    assert server.status()["kvsplice"]["read_locks"] == 0


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
        assert server.status()["kvsplice"]["read_locks"] == 2
    worker.end("abandoned")
    assert server.status()["kvsplice"]["read_locks"] == 0


def test_a_worker_that_unregisters_is_forgotten(server):
    worker = server.worker(instance_id=3000, model="gone")
    assert 3000 in server.status()["registered_cb_rope_instances"]
    worker.calls.unregister_kv_cache(3000).result(30)
    assert 3000 not in server.status()["registered_cb_rope_instances"]
