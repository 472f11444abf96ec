"""Two servers with us in them, on one storage and one coordinator of LMCache: what one stores the other finds."""

import json
import random
import time

import pytest
from lmcache_server import CHUNK, Server
from test_fleet_lmcache import Coordinator


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    running = Coordinator("directory", tmp_path_factory.mktemp("coordinator") / "log", chunk=CHUNK)
    yield running
    running.stop()


@pytest.mark.parametrize("mode", ["matcher", "module"])
def test_one_stores_and_the_other_finds(mode, coordinator, tmp_path):
    storage = json.dumps({"type": "fs_native", "base_path": str(tmp_path / "storage")})
    flags = [
        "--l2-adapter", storage, "--coordinator-url", coordinator.url, "--coordinator-event-reporting",
        "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-event-flush-interval", "0.1",
    ]  # fmt: skip
    servers = []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            servers.append(Server(tmp_path / name, {"mode": mode}, *flags, "--instance-id", f"{mode}-{name}"))
        first, second = (server.wait_until_up().worker(model=mode) for server in servers)
        document = random.Random(mode).choices(range(150_000), k=4 * CHUNK)
        assert first.store(document, "s")
        prompt = [5, 6, 7, *document[CHUNK:]]
        deadline = time.monotonic() + 30
        while len(found := second.look_up(prompt, "r").non_prefix_segments) != 3:
            second.end("r")
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        # Nothing crosses from one tenant to another.
        assert second.look_up(prompt, "salted", salt="other").non_prefix_segments == []
        if mode == "module":
            assert servers[1].status()["kvsplice"]["fleet"]["answered"] > 0
            before = second.contents()
            assert second.retrieve(prompt, "r", found, range(60, 80))
            # What was stored is the first server's.
            kept = [layer.clone() for layer in before]
            for mine, theirs in zip(kept, first.contents(), strict=True):
                mine[:, : len(document)] = theirs[:, : len(document)]
            after = second.contents()
            for mine, layer in zip(kept, after, strict=True):
                layer[:, : len(document)] = mine[:, : len(document)]
            second.assert_spliced(kept, found, range(60, 80), now=after)
        second.end("r")
    finally:
        for server in servers:
            server.stop()
    for server in servers:
        assert "Traceback" not in server.log.read_text()
