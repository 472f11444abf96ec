"""The fleet directory's client against a server that a test scripts."""

import base64
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from engine_parts import CHUNK, NOTHING_LEFT, Bench
from kvsplice import Request
from kvsplice.fleet import HttpFleetDirectory
from kvsplice.hashing import chained_chunk_hashes
from kvsplice.ports import FleetMatch

HASH = bytes(range(32))
REQUEST = Request("r", list(range(20)), "m", 2, "salt")


class Script:
    """Answers every POST with ``reply(path, body) -> (status, bytes)``, and keeps what was asked."""

    def __init__(self):
        self.asked = []
        self.reply = lambda path, body: (200, b'{"matches": []}')
        self.mutex = threading.Lock()

    def bodies(self, path):
        with self.mutex:
            return [body for asked, body in self.asked if asked == path]


@contextmanager
def server():
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with script.mutex:
                script.asked.append((self.path, body))
            status, content = script.reply(self.path, body)
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # It did not wait.

        def log_message(self, *_):
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_port}", script
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


def wait_for(condition, what):
    deadline = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.002)
    return found


def answer(directory, request=REQUEST):
    ticket = directory.submit(request)
    wait_for(lambda: directory.poll(ticket) is not None, "no answer")
    return directory.poll(ticket)


@pytest.fixture(params=["directory", "blend"])
def wire(request):
    return request.param


PATHS = {"directory": ("/directory/blend-lookup", "/events"), "blend": ("/blend/match", "/blend/fingerprints")}
NAMES = {"directory": "chunk_hash", "blend": "object_key"}


def found(wire, *hits):
    matches = [{NAMES[wire]: h.hex(), "old_st": old, "cur_st": cur} for h, old, cur in hits]
    return json.dumps({"matches": matches}).encode()


def test_a_question_carries_the_prompt_and_its_scope(wire):
    with server() as (url, script):
        script.reply = lambda path, body: (200, found(wire, (HASH, 8, 3)))
        directory = HttpFleetDirectory(url, 4, wire=wire)
        assert answer(directory) == [FleetMatch(HASH, 8, 3)]
        [body] = script.bodies(PATHS[wire][0])
        assert np.frombuffer(base64.b64decode(body["tokens_b64"]), "<u4").tolist() == REQUEST.tokens
        if wire == "directory":
            assert (body["model_name"], body["world_size"], body["cache_salt"]) == ("m", 2, "salt")
        else:
            answer(directory, Request("q", [1] * 4, "m"))
            answer(directory, Request("q", [1] * 4, "m", cache_salt="other"))
            scopes = [body["model_scope"] for body in script.bodies("/blend/match")]
            assert scopes[1] == "m"
            assert len(set(scopes)) == 3
        directory.close()


def test_what_was_stored_is_told_in_order(wire):
    with server() as (url, script):
        directory = HttpFleetDirectory(url, 4, wire=wire, instance_id="me")
        for n in range(3):
            directory.publish(REQUEST, np.arange(8, dtype=np.uint32) + n, [HASH, HASH[::-1]], 4 * n)
        directory.close()
        bodies = script.bodies(PATHS[wire][1])
        assert len(bodies) == 3
        assert directory.stats().told == 3
        if wire == "directory":
            batches = [batch for body in bodies for batch in body["batches"]]
            assert [batch["seq"] for batch in batches] == [1, 2, 3]
            assert {batch["instance_id"] for batch in batches} == {"me"}
            first, second = batches[2]["entries"]
            assert first["token_ids"] == [2, 3, 4, 5]
            assert (second["token_offset"], second["key"]["chunk_hash_hex"]) == (12, HASH[::-1].hex())
            assert second["key"]["kv_rank"] >> 24 == 2
            assert second["key"]["cache_salt"] == "salt"
        else:
            [stored] = bodies[1]["ranges"]
            assert stored["tokens"] == list(range(1, 9))
            assert stored["object_keys"] == [HASH.hex(), HASH[::-1].hex()]
            assert stored["old_st_base"] == 4


GARBAGE = [
    (500, b"{}"),
    (422, b"{}"),
    (200, b""),
    (200, b"<html>"),
    (200, b"[]"),
    (200, b"{}"),
    (200, b'{"matches": 3}'),
    (200, b'{"matches": [3]}'),
    (200, b'{"matches": [{"chunk_hash": "zz", "object_key": "zz", "old_st": 0, "cur_st": 0}]}'),
    (200, b'{"matches": [{"chunk_hash": "00", "object_key": "00", "old_st": "0", "cur_st": 0}]}'),
    (200, b'{"matches": [{"chunk_hash": "00", "object_key": "00", "old_st": 1.5, "cur_st": 0}]}'),
    (200, b'{"matches": [{"chunk_hash": "00", "object_key": "00", "old_st": 0}]}'),
]


@pytest.mark.parametrize("reply", GARBAGE, ids=lambda reply: f"{reply[0]} {reply[1][:40].decode()}")
def test_garbage_is_an_empty_answer(wire, reply):
    with server() as (url, script):
        script.reply = lambda path, body: reply
        directory = HttpFleetDirectory(url, 4, wire=wire)
        assert answer(directory) == []
        assert directory.stats().failed == 1
        # The next one is asked all the same.
        script.reply = lambda path, body: (200, found(wire, (HASH, 8, 3)))
        assert len(answer(directory)) == 1
        directory.close()


def test_nobody_there_is_an_empty_answer_and_a_lost_range():
    directory = HttpFleetDirectory("http://127.0.0.1:9", 4)
    assert answer(directory) == []
    directory.publish(REQUEST, [0] * 4, [HASH], 0)
    wait_for(lambda: directory.stats().lost == 1, "the range was not given up")
    directory.close()


def test_a_server_that_does_not_answer_costs_the_budget_only():
    with server() as (url, script):
        gate = threading.Event()
        script.reply = lambda path, body: (gate.wait(20), (200, b'{"matches": []}'))[1]
        directory = HttpFleetDirectory(url, 4, budget_s=0.1)
        begun = time.monotonic()
        assert answer(directory) == []
        assert time.monotonic() - begun < 10
        directory.publish(REQUEST, [0] * 4, [HASH], 0)
        directory.close()
        directory.close()
        assert time.monotonic() - begun < 10
        gate.set()


def test_questions_beyond_the_bounds_are_refused_at_once():
    with server() as (url, script):
        gate = threading.Event()
        script.reply = lambda path, body: (gate.wait(20), (200, b'{"matches": []}'))[1]
        directory = HttpFleetDirectory(url, 4, concurrency=2, queue=3, budget_s=20)
        tickets = [directory.submit(REQUEST) for _ in range(7)]
        assert [ticket is None for ticket in tickets] == [False] * 5 + [True] * 2
        # Forgetting one that has not gone out makes room.
        directory.forget(tickets[4])
        assert directory.poll(tickets[4]) == []
        assert directory.submit(REQUEST) is not None
        wait_for(lambda: len(script.bodies("/directory/blend-lookup")) == 2, "two go out at once")
        gate.set()
        wait_for(lambda: directory.poll(tickets[3]) is not None, "the rest follows")
        directory.close()
        assert directory.submit(REQUEST) is None
        assert len(script.bodies("/directory/blend-lookup")) == 5


def test_ranges_beyond_the_bounds_push_out_the_oldest():
    with server() as (url, script):
        gate = threading.Event()
        script.reply = lambda path, body: (gate.wait(20), (200, b"{}"))[1]
        directory = HttpFleetDirectory(url, 4, wire="blend", queue=2, budget_s=20)
        directory.publish(REQUEST, [0] * 4, [HASH], 0)
        wait_for(lambda: script.bodies("/blend/fingerprints"), "the first goes out")
        for start in (4, 8, 12):
            directory.publish(REQUEST, [0] * 4, [HASH], start)
        gate.set()
        directory.close()
        starts = [body["ranges"][0]["old_st_base"] for body in script.bodies("/blend/fingerprints")]
        assert starts == [0, 8, 12]
        assert (directory.stats().told, directory.stats().lost) == (3, 1)
        directory.publish(REQUEST, [0] * 4, [HASH], 0)
        assert directory.stats().lost == 2


def test_each_range_is_told_or_counted_as_lost_whenever_it_is_closed():
    with server() as (url, _):
        for n in range(40):
            directory = HttpFleetDirectory(url, 4, wire="blend")
            if n % 2:
                directory.publish(REQUEST, [0] * 4, [HASH], 0)
            directory.publish(REQUEST, [0] * 4, [HASH], 4)
            directory.close()
            assert directory.stats().told + directory.stats().lost == 1 + n % 2


def test_what_another_reports_is_not_told():
    with server() as (url, script):
        directory = HttpFleetDirectory(url, 4, report=False)
        directory.publish(REQUEST, [0] * 4, [HASH], 0)
        directory.close()
        assert script.asked == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"wire": "carrier pigeon"}, "wire"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"concurrency": 0}, "concurrency"),
        ({"queue": 0}, "queue"),
        ({"budget_s": 0}, "budget_s"),
        ({"budget_s": float("nan")}, "budget_s"),
        ({"url": "coordinator:9300"}, "url"),
    ],
)
def test_bad_arguments_are_named(change, name):
    with pytest.raises(ValueError, match=name):
        HttpFleetDirectory(**{"url": "http://127.0.0.1:9", "chunk_size": 4} | change)


@pytest.mark.parametrize("trouble", [None, "late", "garbage", "gone"])
def test_an_engine_that_asks_it(wire, trouble):
    """Whatever the directory does, the lookup ends, and nothing wrong is in its result."""
    tokens = list(range(2 * CHUNK))
    hashes = chained_chunk_hashes(tokens, CHUNK)
    with server() as (url, script):
        gate = threading.Event()

        def reply(path, body):
            if path == PATHS[wire][1] or trouble is None:
                return 200, found(wire, (hashes[1], CHUNK, 1))
            if trouble == "late":
                gate.wait(20)
            return (200, found(wire, (hashes[1], CHUNK, 1), (HASH, 0, 2))) if trouble == "gone" else (200, b"?")

        script.reply = reply
        directory = HttpFleetDirectory(url, CHUNK, wire=wire, budget_s=20)
        bench = Bench(fleet=directory)
        blocks = bench.caches[0].allocator.allocate(4)
        bench.engine.store(Request("s", tokens, "m", end=2 * CHUNK, worker_id=0), 0, [blocks])
        request = Request("r", [99, *tokens[CHUNK:], 98], "m")
        bench.engine.lookup(request)
        if trouble == "late":
            assert bench.engine.lookup(request) is None
            bench.clock.now += 30
        result = wait_for(lambda: bench.engine.lookup(request), "the lookup did not end")
        expected = [(hashes[1], 1)] if trouble in {None, "gone"} else []
        assert [(match.chunk_hash, match.cur_start) for match in result.matches] == expected
        gate.set()
        assert bench.finish() == NOTHING_LEFT
        assert directory.stats().told == 1
