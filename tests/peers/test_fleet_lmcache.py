"""The fleet client against running coordinators of LMCache, one for each wire form."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from engine_parts import CHUNK, NOTHING_LEFT, Bench, ask, assert_spliced, retrieve, store
from kvsplice import events
from kvsplice.fleet import HttpFleetDirectory
from kvsplice.retrieve import Reason

A, B, C, D = (tuple(range(10 * n, 10 * n + CHUNK)) for n in range(1, 5))
EARLIER = Path(sys.prefix) / "lmcache-0.5.2"


class Coordinator:
    """LMCache's own, in a process of its own, on the loopback."""

    def __init__(self, wire, log, chunk=CHUNK):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.wire = wire
        self._chunk = chunk
        self._log = log
        self._process = None
        self.start()

    def start(self):
        settings = {"HOST": "127.0.0.1", "PORT": self.port, "CHUNK_SIZE": self._chunk}
        arguments, environment = [], os.environ | {"LMCACHE_TRACK_USAGE": "false"}
        if self.wire == "directory":
            arguments = [f"--{name.lower().replace('_', '-')}={value}" for name, value in settings.items()]
            arguments.append("--enable-blend-lookup")
        else:
            # That version's module takes no arguments.
            environment |= {f"LMCACHE_MP_COORDINATOR_{name}": str(value) for name, value in settings.items()}
            environment["PYTHONPATH"] = str(EARLIER)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.v1.mp_coordinator", *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._log.parent,
            )
        deadline = time.monotonic() + 60
        while not self._is_up():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.05)

    def _is_up(self):
        try:
            return httpx.get(f"{self.url}/healthz").is_success
        except httpx.TransportError:
            return False

    def stop(self):
        self._process.kill()
        self._process.wait()


@pytest.fixture(params=["directory", "blend"], scope="module")
def running(request, tmp_path_factory):
    coordinator = Coordinator(request.param, tmp_path_factory.mktemp(request.param) / "log")
    yield coordinator
    coordinator.stop()


class Fleet:
    """Servers on one storage that share what is in it, and ask the coordinator what that is."""

    def __init__(self, coordinator, **options):
        self._coordinator = coordinator
        self._options = {"budget_s": 10.0, **options}
        self._storage = {}
        self.servers = []

    def server(self, **options):
        directory = HttpFleetDirectory(self._coordinator.url, CHUNK, wire=self._coordinator.wire, **self._options)
        bench = Bench(fleet=directory, **options)
        bench.store.objects = self._storage
        self.servers.append(bench)
        return bench

    def store(self, bench, tokens, **rest):
        """Store, and wait until the coordinator has heard of it."""
        before = bench.fleet.stats().told
        store(bench, tokens, **rest)
        deadline = time.monotonic() + 30
        while bench.fleet.stats().told == before:
            assert bench.fleet.stats().lost == 0
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def look_up(self, bench, request):
        deadline = time.monotonic() + 30
        while (result := bench.engine.lookup(request)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return result


@pytest.fixture
def fleet(running):
    fleet = Fleet(running)
    yield fleet
    for bench in fleet.servers:
        assert bench.finish() == NOTHING_LEFT


def unique(*parts):
    """Tokens that no other test has told this coordinator, with the same structure each time."""
    unique.turn += 1000
    return [[token + unique.turn for token in part] for part in parts]


unique.turn = 0


def test_what_one_server_stored_another_splices(fleet):
    a, b, c, new = unique(A, B, C, (7, 8, 9))
    one, other = fleet.server(), fleet.server()
    fleet.store(one, [*a, *b, *c])
    request = ask(other, [*a, *new[:1], *c, *new[1:], *b])
    result = fleet.look_up(other, request)
    assert result.prefix_tokens == CHUNK
    assert [(match.old_start, match.cur_start) for match in result.matches] == [(8, 5), (4, 11)]
    outcome, blocks = retrieve(other, request, [*result.prefix, *result.matches])
    assert (outcome.reason, outcome.tokens) == (Reason.SPLICED, 12)
    assert_spliced(other, [*result.prefix, *result.matches], request, 0, blocks)
    [matched] = [fields for name, fields in other.sink.of("r") if name == events.FLEET_MATCH_END]
    # The prefix is the coordinator's answer too; the engine has it from the store.
    assert (matched["matches"] >= 2, matched["timed_out"]) == (True, False)
    assert other.fleet.stats()[:4] == (1, 0, 1, 0)


def test_the_asking_server_itself_finds_what_it_stored(fleet):
    a, b, new = unique(A, B, (7,))
    bench = fleet.server()
    fleet.store(bench, [*a, *b])
    result = fleet.look_up(bench, ask(bench, [*new, *b]))
    assert [(match.old_start, match.cur_start) for match in result.matches] == [(4, 1)]


def test_a_range_that_was_stored_from_its_middle_on_keeps_its_positions(fleet):
    a, b, c, new = unique(A, B, C, (7,))
    one, other = fleet.server(), fleet.server()
    one.transfer.refused = {1}
    store(one, [*a, *b, *c])
    deadline = time.monotonic() + 30
    while one.fleet.stats().told < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    result = fleet.look_up(other, ask(other, [*new, *b, *c]))
    assert [(match.old_start, match.cur_start) for match in result.matches] == [(8, 5)]


@pytest.mark.parametrize("salts", [("", "x"), ("x", ""), ("x", "y")])
def test_one_salt_does_not_see_anothers(fleet, salts):
    a, b, new = unique(A, B, (7,))
    one, other = fleet.server(), fleet.server()
    fleet.store(one, [*a, *b], salt=salts[0])
    assert fleet.look_up(other, ask(other, [*new, *b], salt=salts[1])).matches == ()
    assert len(fleet.look_up(other, ask(other, [*new, *b], "again", salts[0])).matches) == 1


def test_a_chunk_that_storage_lost_is_no_hit(fleet):
    a, b, c, new = unique(A, B, C, (7,))
    one, other = fleet.server(), fleet.server()
    fleet.store(one, [*a, *b, *c])
    [lost] = [key for key in one.store.objects if key.chunk_hash == one.sessions.open("s").hashes(0)[1]]
    one.store.evict(lost)
    result = fleet.look_up(other, ask(other, [*new, *b, *c]))
    assert [match.old_start for match in result.matches] == [8]


def test_a_prompt_of_real_length(fleet, running):
    """The coordinator reads the tokens as they were sent, above 16 bits too."""
    stored = np.random.default_rng(1).integers(0, 150_000, 8192).tolist()
    one, other = fleet.server(blocks=5000), fleet.server(blocks=5000)
    fleet.store(one, stored)
    result = fleet.look_up(other, ask(other, [7, *stored[400:4400], 8, *stored[4800:8000]]))
    assert {match.old_start - match.cur_start for match in result.matches} == {399, 798}
    # The earlier coordinator's table has few slots, and a chunk whose slot another one took is not found.
    least = 7200 if running.wire == "directory" else 5400
    assert least <= sum(match.cur_end - match.cur_start for match in result.matches) <= 7200


def test_a_coordinator_that_dies_and_comes_back(tmp_path, running):
    coordinator = Coordinator(running.wire, tmp_path / "log")
    try:
        fleet = Fleet(coordinator)
        bench = fleet.server()
        fleet.store(bench, [*A, *B, *C])
        coordinator.stop()
        result = fleet.look_up(bench, ask(bench, [*A, 7, *C]))
        assert (result.prefix_tokens, result.matches) == (CHUNK, ())
        assert bench.fleet.stats().failed == 1
        coordinator.start()
        # It has forgotten all; what is stored from now on is found again.
        fleet.store(bench, [*B, *C, *D], request_id="later")
        result = fleet.look_up(bench, ask(bench, [7, *D], "again"))
        assert [(match.old_start, match.cur_start) for match in result.matches] == [(8, 1)]
        assert bench.finish() == NOTHING_LEFT
    finally:
        coordinator.stop()
