"""Lookups in LMCache's own server, as it comes and with our matcher, over its own transport.

    python benches/compare_lmcache_server.py [--chunks N] [--lookups N] [--clients N] [--json FILE]

Needs what tests/peers/requirements.txt lists. Two servers run side by side, one with ``--server-module`` and kvsplice's
mode ``matcher``. A worker stores prompts of 32,768 random tokens (128 chunks, KV of one layer with one head of two
elements) until so many chunks are held. Then clients, each a process of its own, look up prompts of 32,768 tokens of
which half is stored text at another place: first one client, then all at once. A latency is that of one lookup as the
client sees it: from the first call to the answer, polls included. Servers take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from datetime import datetime, timezone
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import numpy as np

# The tests have a server and a worker already.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "peers"))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache_server import Geometry, Server, lookup_key, request_client

import kvsplice

CHUNK, PROMPT, VOCABULARY = 256, 32_768, 128_000
PER_PROMPT = PROMPT // CHUNK
GEOMETRY = Geometry(chunk=CHUNK, block=16, layers=1, blocks=PROMPT // 16, heads=1, size=2, positions=PROMPT)
NAMES = {"lmcache": None, "kvsplice": {"mode": "matcher"}}


def stored_prompt(number: int) -> np.ndarray:
    return np.random.default_rng([1, number]).integers(0, VOCABULARY, PROMPT)


def question(seed: int, prompts: int) -> list[int]:
    """Half of it chunks of stored prompts, 7 tokens off the grid, the rest new."""
    rng = np.random.default_rng([2, seed])
    tokens = rng.integers(0, VOCABULARY, PROMPT)
    source = stored_prompt(int(rng.integers(0, prompts))).reshape(-1, CHUNK)
    for place, chunk in enumerate(rng.choice(np.arange(1, PER_PROMPT), PER_PROMPT // 2, replace=False).tolist()):
        start = 2 * CHUNK * place + 7
        tokens[start : start + CHUNK] = source[chunk]
    return tokens.tolist()


def client(url: str, seed: int, lookups: int, prompts: int) -> tuple[list[float], int]:
    """Milliseconds of each lookup, and the tokens that all of them found."""
    calls, close = request_client(url)
    times, found = [], 0
    for number in range(lookups):
        request_id = f"{seed}-{number}-{os.getpid()}"
        key = lookup_key(question(1000 * seed + number, prompts), request_id, CHUNK)
        begin = time.perf_counter()
        while (result := calls.cb_unified_lookup(key, 1).result(120)) is None:
            time.sleep(0.001)
        times.append(1e3 * (time.perf_counter() - begin))
        found += sum(match.cur_ed - match.cur_st for match in result.non_prefix_segments)
        calls.end_session(request_id).result(60)
    close()
    return times, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=500_000)
    parser.add_argument("--lookups", type=int, default=50, help="of each client")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    prompts = -(-arguments.chunks // PER_PROMPT)
    rows = []
    with ExitStack() as stack:
        servers = {}
        for name, config in NAMES.items():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            gigabytes = str(2 + prompts * PER_PROMPT * CHUNK * 16 // (1 << 30))
            servers[name] = Server(folder, config, geometry=GEOMETRY, gigabytes=gigabytes)
            stack.callback(servers[name].stop)
        workers = {name: server.wait_until_up().worker() for name, server in servers.items()}
        for number in range(prompts):
            tokens = stored_prompt(number).tolist()
            for name, worker in workers.items():
                if not worker.store(tokens, f"store-{number}"):
                    raise RuntimeError(f"{name}: a store failed")
                worker.end(f"store-{number}")
            print(f"\r{(number + 1) * PER_PROMPT:,} chunks stored", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        time.sleep(2)
        pool = stack.enter_context(get_context("spawn").Pool(arguments.clients))
        seed = 0
        for clients in (1, arguments.clients):
            row: dict[str, Any] = {"clients": clients, "milliseconds": {}, "tokens_found": {}}
            for warm in (True, False):
                for name, server in servers.items():
                    jobs = [(server.url, seed + n, 3 if warm else arguments.lookups, prompts) for n in range(clients)]
                    results = pool.starmap(client, jobs, chunksize=1)
                    if not warm:
                        row["milliseconds"][name] = [each for times, _ in results for each in times]
                        row["tokens_found"][name] = sum(n for _, n in results) / (clients * arguments.lookups)
                seed += clients
            rows.append(row)
        status = servers["kvsplice"].status()["kvsplice"]["matcher"]
    result = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "kvsplice": kvsplice.__version__,
        "lmcache": version("lmcache"),
        "command": " ".join(["python benches/compare_lmcache_server.py", *sys.argv[1:]]),
        "chunks_stored": prompts * PER_PROMPT,
        "our_entries": status["entries"],
        "rows": rows,
    }
    print(render(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1), encoding="utf-8")


def render(result: dict[str, Any]) -> str:
    lines = [
        f"{result['date']}, {result['machine']}; kvsplice {result['kvsplice']}, lmcache {result['lmcache']}; "
        f"`{result['command']}`",
        "",
        f"Lookups of {PROMPT:,} tokens, half of them stored elsewhere, {result['chunks_stored']:,} chunks stored: "
        "milliseconds as a client sees them, median (p99); tokens found, mean.",
        "",
        "| clients at once | kvsplice | lmcache | kvsplice finds | lmcache finds |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [str(row["clients"])]
        for name in ("kvsplice", "lmcache"):
            median, p99 = np.percentile(row["milliseconds"][name], [50, 99])
            cells.append(f"{median:.1f} ({p99:.1f})")
        cells += [f"{row['tokens_found'][name]:,.0f}" for name in ("kvsplice", "lmcache")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
