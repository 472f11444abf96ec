"""`python -m kvsplice.lmcache server` on LMCache 0.5.2, and our matcher in that version's blend module."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from lmcache_server import free_ports
from test_engine_lmcache import blend_v3_process, scenarios, text_of

from engine_parts import CHUNK
from kvsplice import __version__
from kvsplice.hashing import chained_chunk_hashes

EARLIER = Path(sys.prefix) / "lmcache-0.5.2"
SERVER = [
    "--host", "127.0.0.1", "--http-host", "127.0.0.1", "--engine-type", "blend",
    "--l1-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", "16",
]  # fmt: skip


def launch(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(EARLIER), "LMCACHE_TRACK_USAGE": "false"}
    command = [sys.executable, "-m", "kvsplice.lmcache", "server", *arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def test_the_server_starts_with_our_matcher(tmp_path):
    port, http = map(str, free_ports(2))
    process = launch(tmp_path, "--kvsplice", '{"capacity": 5000}', "--port", port, "--http-port", http, *SERVER)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                status = httpx.get(f"http://127.0.0.1:{http}/status").raise_for_status().json()
                break
            except httpx.HTTPError:
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        assert status["is_healthy"]
        assert status["chunk_size"] == 16
        said = f"kvsplice {__version__}: the blend module of LMCache 0.5.2 matches with <TokenRangeMatcher"
        log = (tmp_path / "log").read_text()
        assert said in log
        assert "capacity=5000" in log
    finally:
        process.terminate()
        process.wait(30)


def test_lmcaches_own_arguments_are_its_own_to_refuse(tmp_path):
    process = launch(tmp_path, "--no-such-argument", *SERVER)
    assert process.wait(60) == 2
    assert "unrecognized arguments: --no-such-argument" in (tmp_path / "log").read_text()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The blend module with LMCache's matcher, and with ours."""
    with (
        blend_v3_process(tmp_path_factory.mktemp("theirs")) as theirs,
        blend_v3_process(tmp_path_factory.mktemp("ours"), "kvsplice") as ours,
    ):
        yield theirs, ours


def without_choices(scenario):
    """A retrieve asks for what the test says, here nothing: these are about lookups."""
    return scenario | {"ops": [op for op in scenario["ops"] if op["op"] != "retrieve"]}


@settings(deadline=None, max_examples=60)
@given(scenario=scenarios())
def test_the_blend_module_does_the_same_with_our_matcher(both, scenario):
    theirs, ours = (call(without_choices(scenario)) for call in both)
    assert theirs == ours


def test_a_scenario_by_hand_finds_something(both):
    document = [token for letter in range(6) for token in text_of(letter)]
    prompt = [900, *text_of(4), 901, *text_of(3)]
    lost = chained_chunk_hashes(document, CHUNK)[3].hex()
    ops = [{"op": "store", "id": "s", "tokens": document}]
    ops += [{"op": "lookup", "id": str(turn), "latency": 1, "tp_size": 1, "tokens": prompt} for turn in range(2)]
    ops.insert(2, {"op": "lose", "hash": lost, "rank": 0})
    for call in both:
        outcomes = call({"world_size": 1, "segmented": False, "ops": ops})["outcomes"]
        assert [[row[2] for row in outcomes[turn]["matches"][0]] for turn in (1, 3)] == [[1, 6], [1]]
