"""LMCache's blend matcher and ours, side by side in one process.

    python benches/compare_lmcache_matcher.py [--quick] [--only SECTION ...] [--chunks N] [--json FILE]

Needs ``lmcache``, and torch, which it imports: see tests/peers/requirements.txt. Ours runs behind
`kvsplice.lmcache.TokenRangeMatcher`: the same interface and the same result type, so that a difference is one of the
matchers.

How it measures: texts are uniform random tokens, chunks of 256. Repetitions of the two take turns. Each figure is a
median with the least and the greatest in brackets. Python's cyclic garbage collector is off while the clock runs.
LMCache's matcher gets one call before, in which numba compiles. It can hold 2**20 chunks in its life, hence no section
has more.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import threading
import time
import tracemalloc
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before LMCache is imported: it reports its use to a host outside otherwise, and logs each probe.
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "WARNING"

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lmcache.v1.multiprocess.modules.blend.matcher import BlendTokenRangeMatcher

import kvsplice
from kvsplice import _core
from kvsplice.lmcache import TokenRangeMatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHUNK = 256
VOCABULARY = 128_000
BATCH = 1000
"""Chunks per registration while a matcher is filled."""
QUERY = 32_768
WRITER_BATCH = QUERY // CHUNK
KEY_BYTES = 32
"""As LMCache's, which are BLAKE3 digests."""
REFERENCE_LIMIT = 1 << 20

OURS, THEIRS = "kvsplice", "lmcache"


@dataclass
class Row:
    """One line of the report. Figures by matcher: the value of each repetition, or one value."""

    section: str
    what: str
    unit: str
    values: dict[str, list[float]]
    better: str = "lower"
    bar: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Return the median of one matcher's values."""
        return float(np.median(self.values[name]))

    def ratio(self) -> float | None:
        """How many times better ours is."""
        if not {OURS, THEIRS} <= self.values.keys():
            return None
        ours, theirs = self.median(OURS), self.median(THEIRS)
        if not (ours > 0 and theirs > 0):
            return None
        return theirs / ours if self.better == "lower" else ours / theirs

    def cell(self, name: str) -> str:
        """Return one matcher's figure as text."""
        if name not in self.values:
            return "-"
        values = self.values[name]
        text = f"{np.median(values):.3g}" if np.median(values) < 1000 else f"{np.median(values):,.0f}"
        if len(values) > 1:
            text += f" [{min(values):.3g} to {max(values):.3g}]"
        return text + self.notes.get(name, "")

    def markdown(self) -> str:
        """Return the line of the table."""
        ratio = self.ratio()
        cells = [self.what, self.unit, self.cell(OURS), self.cell(THEIRS), f"{ratio:.3g}x" if ratio else "", self.bar]
        return f"| {' | '.join(cells)} |"


# --- texts ---


def batch_tokens(number: int, chunks: int = BATCH) -> np.ndarray:
    """Tokens of one batch of a stored text; made again from its number wherever they are needed."""
    return np.random.default_rng([1, number]).integers(0, VOCABULARY, chunks * CHUNK, dtype=np.uint32)


def key(number: int) -> bytes:
    """Return the chunk hash of a chunk."""
    return number.to_bytes(8, "little") * (KEY_BYTES // 8)


def fresh_tokens(seed: int, count: int) -> np.ndarray:
    """Tokens that are in no stored text."""
    return np.random.default_rng([2, seed]).integers(0, VOCABULARY, count, dtype=np.uint32)


@dataclass
class Query:
    """Tokens, and the chunks that stand in them."""

    tokens: np.ndarray
    keys: set[bytes]

    def as_list(self) -> list[int]:
        """Return the tokens as LMCache's server hands them over."""
        return self.tokens.tolist()


def half_reused(length: int, chunks: list[int], seed: int = 0) -> Query:
    """Make a query in which stored chunks take turns with fresh text.

    It begins with 37 fresh tokens, so nothing is aligned.
    """
    spaces = fresh_tokens(seed, length)
    tokens, keys, at = spaces.copy(), set(), 37
    for number in chunks:
        if at + CHUNK > length:
            break
        within = number % BATCH * CHUNK
        tokens[at : at + CHUNK] = batch_tokens(number // BATCH)[within : within + CHUNK]
        keys.add(key(number))
        at += 2 * CHUNK
    return Query(tokens, keys)


def oldest(held: int, length: int) -> list[int]:
    return list(range(min(held, length // (2 * CHUNK))))


def drawn(held: int, length: int, seed: int = 3) -> list[int]:
    count = min(held, length // (2 * CHUNK))
    return np.random.default_rng(seed).choice(held, count, replace=False).tolist()


# --- matchers ---


def make(name: str) -> Any:
    if name == OURS:
        return TokenRangeMatcher(CHUNK, capacity=REFERENCE_LIMIT)
    matcher = BlendTokenRangeMatcher(CHUNK)
    # Compile.
    warm = fresh_tokens(99, 2 * CHUNK)
    matcher.on_new_token_hashes(warm, [b"warm" * 8, b"warn" * 8])
    matcher.match_sub_sequence(warm)
    matcher.remove_chunks([b"warm" * 8, b"warn" * 8])
    return matcher


def fill(matcher: Any, chunks: int) -> None:
    for number in range(-(-chunks // BATCH)):
        count = min(BATCH, chunks - number * BATCH)
        keys = [key(number * BATCH + n) for n in range(count)]
        assert matcher.on_new_token_hashes(batch_tokens(number)[: count * CHUNK], keys) == count


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def growth(name: str, chunks: int) -> int:
    """By how much this process grows while a matcher is made and filled."""
    batch_tokens(0)
    make(name)
    gc.collect()
    before = resident_bytes()
    matcher = make(name)
    fill(matcher, chunks)
    gc.collect()
    return resident_bytes() - before


class Filled:
    """Both matchers with the same chunks, one size at a time in memory."""

    def __init__(self) -> None:
        self._chunks = -1
        self._matchers: dict[str, Any] = {}

    def __call__(self, chunks: int) -> dict[str, Any]:
        """Return both matchers by name, each with the first ``chunks`` chunks."""
        if chunks != self._chunks:
            self._matchers = {}
            gc.collect()
            self._chunks = chunks
            for name in (OURS, THEIRS):
                say(f"fill {name} with {chunks:,} chunks")
                self._matchers[name] = make(name)
                fill(self._matchers[name], chunks)
        return self._matchers


def say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


# --- measuring ---


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


TURN_SECONDS = 0.005
"""A call that takes less is repeated within its turn until the turn takes about this long."""


def taking_turns(calls: dict[str, Callable[[], object]], repetitions: int, warm: bool = True) -> dict[str, list[float]]:
    """Return the seconds of each call, the calls in turns and every other time in reverse order.

    If ``warm``, a turn begins with a call that is not timed, and gives the mean of several if they are short. If not, a
    turn is one call, and the caches are full of what the other matcher read, tens of megabytes for LMCache's.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    inner = {name: max(1, round(TURN_SECONDS / seconds(call))) if warm else 1 for name, call in calls.items()}
    gc.collect()
    gc.disable()
    try:
        for n in range(repetitions):
            for name in list(calls) if n % 2 else reversed(calls):
                call = calls[name]
                if warm:
                    call()
                start = time.perf_counter()
                for _ in range(inner[name]):
                    call()
                times[name].append((time.perf_counter() - start) / inner[name])
    finally:
        gc.enable()
    return times


def scaled(times: dict[str, list[float]], factor: float) -> dict[str, list[float]]:
    return {name: [value * factor for value in values] for name, values in times.items()}


def matches(matchers: dict[str, Any], tokens: Any) -> dict[str, Callable[[], object]]:
    return {name: (lambda matcher=matcher: matcher.match_sub_sequence(tokens)) for name, matcher in matchers.items()}


def recall(matcher: Any, queries: list[Query]) -> float:
    """Return the part of the chunks that stand in the queries which is found."""
    found = sum(len({result.hash for result in matcher.match_sub_sequence(q.tokens)} & q.keys) for q in queries)
    return found / sum(len(query.keys) for query in queries)


@dataclass
class Plan:
    """How much to do."""

    large: int
    full: int
    repetitions: int
    sizes: tuple[int, ...]
    samples: int
    recall_queries: int


# --- sections ---


def no_hits(plan: Plan, filled: Filled) -> Iterator[Row]:
    tokens = fresh_tokens(5, QUERY)
    calls = matches(filled(plan.full), tokens)
    what = f"match {QUERY // 1024}k tokens as uint32, {plan.full:,} chunks held, no hits"
    times = taking_turns(calls, plan.repetitions)
    yield Row("no-hits", what, "ns/token", scaled(times, 1e9 / QUERY), bar="≤ 3")
    times = taking_turns(calls, plan.repetitions, warm=False)
    yield Row("no-hits", f"{what}, after the other matcher used the caches", "ns/token", scaled(times, 1e9 / QUERY))


def half(plan: Plan, filled: Filled) -> Iterator[Row]:
    for held in (1000, 100_000, plan.large):
        matchers = filled(held)
        for which, chosen in (("oldest", oldest), ("drawn uniformly", drawn)):
            query = half_reused(QUERY, chosen(held, QUERY))
            more = [half_reused(QUERY, drawn(held, QUERY, 100 + n), n) for n in range(plan.recall_queries)]
            if chosen is oldest:
                count = min(held, plan.recall_queries * len(query.keys))
                steps = range(0, count, len(query.keys))
                more = [half_reused(QUERY, list(range(n, min(n + len(query.keys), count))), n) for n in steps]
            times = taking_turns(matches(matchers, query.as_list()), plan.repetitions)
            found = {name: recall(matcher, more) for name, matcher in matchers.items()}
            bar = {1000: "≥ 5x, all found", 800_000: "≥ 40x, all found"}.get(held, "")
            what = f"match {QUERY // 1024}k tokens as list[int], {held:,} chunks held, half reused, chunks {which}"
            notes = {name: f"; finds {part:.1%}" for name, part in found.items()}
            yield Row("half", what, "ns/token", scaled(times, 1e9 / QUERY), bar=bar, notes=notes)


def sizes(plan: Plan, filled: Filled) -> Iterator[Row]:
    for held in (100_000, plan.large):
        matchers = filled(held)
        for length in plan.sizes:
            query = half_reused(length, drawn(held, length))
            for form, tokens in (("list[int]", query.as_list()), ("uint32", query.tokens)):
                repetitions = max(plan.repetitions * QUERY // max(length, QUERY), 5)
                times = taking_turns(matches(matchers, tokens), repetitions)
                what = f"match {length // 1024}k tokens as {form}, {held:,} chunks held, half reused"
                yield Row("sizes", what, "ms", scaled(times, 1e3))


class Writer:
    """Registers fresh texts as fast as it can, in a thread of its own."""

    def __init__(self, matcher: Any, first: int) -> None:
        self._matcher, self._first = matcher, first
        self._tokens = fresh_tokens(7, QUERY)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.chunks = 0
        self.seconds = 0.0
        self.full = False

    def _run(self) -> None:
        start = time.perf_counter()
        while not self._stop.is_set():
            at = self._first + self.chunks
            if at + WRITER_BATCH > REFERENCE_LIMIT:
                # The reference would take nothing more, and a writer that does nothing is no writer.
                self.full = True
                break
            # Other tokens each time, without the time that drawing them takes.
            tokens = self._tokens + np.uint32(at)
            self._matcher.on_new_token_hashes(tokens, [key(10**9 + at + n) for n in range(WRITER_BATCH)])
            self.chunks += WRITER_BATCH
        self.seconds = time.perf_counter() - start

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def contended(plan: Plan, filled: Filled) -> Iterator[Row]:
    held = 100_000
    matchers = filled(held)
    query = half_reused(QUERY, drawn(held, QUERY)).tokens
    idle: dict[str, list[float]] = {OURS: [], THEIRS: []}
    busy: dict[str, list[float]] = {OURS: [], THEIRS: []}
    rates: dict[str, list[float]] = {OURS: [], THEIRS: []}
    written = {OURS: held, THEIRS: held}
    rounds = 5
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, matcher in matchers.items():
                call = matches({name: matcher}, query)[name]
                idle[name] += [seconds(call) for _ in range(plan.samples // rounds)]
                with Writer(matcher, written[name]) as writer:
                    for _ in range(plan.samples // rounds):
                        took = seconds(call)
                        if writer.full:
                            break
                        busy[name].append(took)
                written[name] += writer.chunks
                if writer.chunks:
                    rates[name].append(writer.chunks / writer.seconds)
    finally:
        gc.enable()
    filled._chunks = -1  # filled further than it says
    count = {name: f" (n = {len(values)})" for name, values in busy.items()}
    for percentile in (50, 99):
        for what, times in (("idle", idle), ("while another thread registers", busy)):
            values = {name: [float(np.percentile(samples, percentile)) * 1e3] for name, samples in times.items()}
            text = f"match {QUERY // 1024}k tokens as uint32, {held:,} chunks held, p{percentile} {what}"
            yield Row("contended", text, "ms", values, notes=count)
        ratio = {n: [float(np.percentile(busy[n], percentile) / np.percentile(idle[n], percentile))] for n in matchers}
        bar = "≤ 2" if percentile == 99 else ""
        yield Row("contended", f"p{percentile} busy over p{percentile} idle", "x", ratio, bar=bar)
    yield Row("contended", "registered meanwhile", "chunks/s", rates, better="higher")


def threads(plan: Plan, filled: Filled) -> Iterator[Row]:
    held = 100_000
    matchers = filled(held)
    for what, tokens in (
        ("half reused", half_reused(QUERY, drawn(held, QUERY)).tokens),
        ("no hits", fresh_tokens(5, QUERY)),
    ):

        def run(count: int, matcher: Any, tokens: np.ndarray = tokens, per_thread: int = 200) -> float:
            start = threading.Barrier(count + 1)

            def work() -> None:
                start.wait()
                for _ in range(per_thread):
                    matcher.match_sub_sequence(tokens)

            running = [threading.Thread(target=work) for _ in range(count)]
            for thread in running:
                thread.start()
            start.wait()
            return seconds(lambda: [thread.join() for thread in running])

        calls = {(name, count): (lambda n=name, c=count: run(c, matchers[n])) for name in matchers for count in (1, 2)}
        times = taking_turns(calls, max(plan.repetitions // 2, 5), warm=False)  # type: ignore[arg-type]
        gain = {
            name: [2 * one / two for one, two in zip(times[name, 1], times[name, 2], strict=True)] for name in matchers
        }
        text = f"two matching threads over one, {QUERY // 1024}k tokens as uint32, {held:,} chunks held, {what}"
        yield Row("threads", text, "x of one thread", gain, better="higher", bar="≥ 1.8")


def register(plan: Plan, filled: Filled) -> Iterator[Row]:
    held = 100_000
    matchers = filled(held)
    repetitions = 4 * plan.repetitions
    texts = [fresh_tokens(1000 + n, QUERY) for n in range(2 * (repetitions + 1))]
    counts = dict.fromkeys([(name, form) for name in matchers for form in ("list[int]", "uint32")], 0)
    prepared: dict[tuple[str, str], list[tuple[Any, list[bytes]]]] = {}
    for name, form in counts:
        mine = texts[::2] if form == "uint32" else texts[1::2]
        made = [tokens if form == "uint32" else tokens.tolist() for tokens in mine]
        first = 10**8 * (1 + list(counts).index((name, form)))
        keys = [[key(first + n * WRITER_BATCH + k) for k in range(WRITER_BATCH)] for n in range(len(made))]
        prepared[name, form] = list(zip(made, keys, strict=True))

    def call(which: tuple[str, str]) -> None:
        tokens, keys = prepared[which][counts[which]]
        counts[which] += 1
        assert matchers[which[0]].on_new_token_hashes(tokens, keys) == WRITER_BATCH

    # Not warmed, since a text can be registered only once.
    registrations = {which: (lambda w=which: call(w)) for which in counts}  # type: ignore[misc]
    times = taking_turns(registrations, repetitions, warm=False)  # type: ignore[arg-type]
    filled._chunks = -1  # filled further than it says
    as_list = texts[0].tolist()
    conversion = taking_turns(
        {
            THEIRS: lambda: np.array(as_list, dtype=np.uint64),
            # Reads the list and looks no further, since nothing was ever registered in that scope.
            OURS: lambda: matchers[OURS].matcher.match(as_list, scope=b"nobody's"),
        },
        repetitions,
    )
    factor = 1e6 / WRITER_BATCH
    for form, bar in (("uint32", "≤ 2"), ("list[int]", "")):
        values = scaled({name: times[name, form] for name in matchers}, factor)  # type: ignore[index]
        what = f"register {WRITER_BATCH} chunks at a time as {form}, {held:,} held"
        yield Row("register", what, "µs/chunk", values, bar=bar)
    yield Row("register", "of which reading the list", "µs/chunk", scaled(conversion, factor))


def memory(plan: Plan, filled: Filled) -> Iterator[Row]:
    matchers = filled(plan.large)
    stats = matchers[OURS].matcher.stats()
    traced = 100_000
    say(f"trace allocations of {THEIRS} for {traced:,} chunks")
    tracemalloc.start()
    matcher = BlendTokenRangeMatcher(CHUNK)
    fixed = tracemalloc.get_traced_memory()[0]
    fill(matcher, traced)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - fixed
    tracemalloc.stop()
    values = {OURS: [stats.overhead_bytes / stats.entries], THEIRS: [grown / traced]}
    notes = {OURS: " (stats)", THEIRS: f" (tracemalloc at {traced:,} chunks) + {fixed / 2**20:.0f} MiB fixed"}
    yield Row("memory", f"memory beyond tokens, {plan.large:,} chunks", "bytes/chunk", values, bar="≤ 160", notes=notes)
    tokens = [stats.token_bytes / stats.entries]
    yield Row(
        "memory", "memory for tokens", "bytes/chunk", {OURS: tokens}, notes={OURS: " (stats); LMCache keeps none"}
    )
    say("fill each in a process of its own")
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        values = {name: [fresh.submit(growth, name, plan.large).result() / plan.large] for name in matchers}
    yield Row("memory", f"growth of the process, {plan.large:,} chunks, all included", "bytes/chunk", values)


SECTIONS = {
    "no-hits": no_hits,
    "half": half,
    "sizes": sizes,
    "contended": contended,
    "threads": threads,
    "register": register,
    "memory": memory,
}


# --- report ---


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def environment() -> dict[str, str]:
    versions = {name: version(name) for name in ("lmcache", "numpy", "numba")}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", *sys.argv]),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "kvsplice": f"{kvsplice.__version__}, {_core.simd()}",
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer, to see that it runs: not for figures")
    sections = {"nargs": "+", "choices": SECTIONS, "default": list(SECTIONS), "metavar": "SECTION"}
    parser.add_argument("--only", help=f"some sections alone: {', '.join(SECTIONS)}", **sections)
    parser.add_argument("--chunks", type=int, help="chunks held in the large cases (default: 800,000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every repetition's value there")
    arguments = parser.parse_args()
    if arguments.chunks is not None and not 1 <= arguments.chunks <= 1_000_000:
        parser.error("--chunks must be 1 to 1,000,000: LMCache's matcher takes no more than 2**20 in its life")
    if arguments.quick:
        plan = Plan(20_000, 20_000, 5, (4096, QUERY), 50, 2)
    else:
        plan = Plan(800_000, 1_000_000, 21, (4096, QUERY, 131_072, 1_048_576), 1000, 32)
    if arguments.chunks is not None:
        plan.large = plan.full = arguments.chunks
    logging.getLogger(BlendTokenRangeMatcher.__module__).setLevel(logging.ERROR)

    facts = environment()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    print(f"\nmedian [least to greatest] of {plan.repetitions} repetitions in turns", end="; ")
    print(f"ratio: how many times better {OURS} is\n")
    print(f"| what | unit | {OURS} | {THEIRS} | ratio | bar |\n|---|---|---|---|---|---|", flush=True)
    filled = Filled()
    rows = []
    for section in arguments.only:
        for row in SECTIONS[section](plan, filled):
            print(row.markdown(), flush=True)
            rows.append(row)
    if arguments.json:
        lines = [asdict(row) | {"ratio": row.ratio()} for row in rows]
        report = {"environment": facts, "plan": asdict(plan), "rows": lines}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
