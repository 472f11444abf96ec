"""The embedded engine for minutes on end, under eviction pressure: memory, threads, and whether all KV is right.

    python benches/soak_engine.py TRACE [--seconds N] [--memory-bytes N] [--disk] [--json FILE]

Replays the trace over and over through the pipeline of ``kvsplice replay --engine --shift``: store, lookup by polling,
retrieve, comparison of every byte. The store's memory is small, so that most of what is stored has to go; with
``--disk`` it goes to a folder of four times that size. Once a second resident memory and threads are read. The first
half of the time is for caches to fill; after that memory must stay within 3 % and 24 MB, and there may be no
more threads than before.

Exits with 1 if something was not flat or not right.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import kvsplice
from kvsplice.cli.engine_replay import EngineReplay, EngineSettings
from kvsplice.cli.replay import Settings
from kvsplice.cli.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

SLACK_BYTES, SLACK_SHARE = 24 << 20, 0.03
CHUNK = 256


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Samples:
    """Seconds, resident bytes and threads, once a second."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int]] = []
        self._begin = time.monotonic()

    def take(self) -> None:
        elapsed = time.monotonic() - self._begin
        if len(self.rows) <= elapsed:
            gc.collect()
            self.rows.append((elapsed, resident_bytes(), threading.active_count()))

    def peaks(self) -> tuple[int, int]:
        """The most resident bytes in the third quarter of the time, and in the last."""
        half = self.rows[len(self.rows) // 2 :]
        middle = len(half) // 2
        return max(row[1] for row in half[:middle]), max(row[1] for row in half[middle:])

    @property
    def memory_is_flat(self) -> bool:
        """Whether the last quarter needed no more than the one before."""
        before, after = self.peaks()
        return after <= before * (1 + SLACK_SHARE) + SLACK_BYTES

    @property
    def threads_are_flat(self) -> bool:
        """Whether there were no more threads in the last half than before."""
        half = len(self.rows) // 2
        return max(row[2] for row in self.rows[half:]) <= max(row[2] for row in self.rows[:half])


def endless(path: str, seconds: float, samples: Samples) -> Iterator[Any]:
    """The trace's requests again and again, until the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        for request in Workload([path]):
            if time.monotonic() > deadline:
                return
            samples.take()
            yield request


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="any file that kvsplice replay takes and that needs no tokenizer")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--memory-bytes", type=int, default=256 << 20)
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()

    samples = Samples()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if arguments.disk else None
        # An index of about what storage holds in the end: it has to evict as well.
        per_chunk = CHUNK * 2 * 16 * 4
        capacity = max(1024, arguments.memory_bytes * (4 if folder else 1) // per_chunk)
        disk_bytes = 4 * arguments.memory_bytes
        engine = EngineSettings(layers=1, memory_bytes=arguments.memory_bytes, disk=folder, disk_bytes=disk_bytes)
        replay = EngineReplay(Settings(chunk_size=CHUNK, capacity=capacity, shift=True), engine)
        stack.callback(replay.close)
        replay.run(endless(arguments.trace, arguments.seconds, samples))
        status = replay.engine.report_status()
    lookups = np.asarray(replay.nanoseconds["lookup"]) / 1e6
    before, after = samples.peaks()
    result = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "kvsplice": kvsplice.__version__,
        "command": " ".join(["python benches/soak_engine.py", *sys.argv[1:]]),
        "seconds": replay.elapsed,
        "requests": replay.requests,
        "tokens": sum(replay.tokens),
        "hit_tokens": sum(replay.prefix) + sum(replay.other),
        "lookup_ms": dict(zip(("p50", "p99", "max"), np.percentile(lookups, [50, 99, 100]).tolist(), strict=True)),
        "evictions": status["memory"]["evictions"],
        "struck_out": status["matcher"]["struck_out"],
        "index_evictions": status["matcher"]["evicted"],
        "read_locks": status["memory"]["read_locks"],
        "resident_bytes": {"third_quarter": before, "last_quarter": after},
        "threads": samples.rows[-1][2],
        "memory_is_flat": samples.memory_is_flat,
        "threads_are_flat": samples.threads_are_flat,
        "correct": replay.correct,
    }
    for name, value in result.items():
        print(f"{name:<18} {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    good = samples.memory_is_flat and samples.threads_are_flat and replay.correct and not result["read_locks"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
