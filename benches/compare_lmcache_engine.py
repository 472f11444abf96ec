"""One lookup of kvsplice's engine and of LMCache's blend module, side by side in one process, over the same store.

    python benches/compare_lmcache_engine.py [--chunks N] [--rounds N] [--json FILE]

Needs ``lmcache``, and torch, which it imports: see tests/peers/requirements.txt. The store holds what was registered,
in memory, and answers at once; what it takes of the time is subtracted from both. What is left is hashing, matching,
keys, classification, locks and events: all that a lookup costs where nothing has to be loaded. Sessions, hasher,
registry and event bus are each side's own, with nobody listening.

How it measures: texts are uniform random tokens, chunks of 256; the prompt is a tuple of ints, as LMCache's servers
have it, a new one for each lookup. Lookups take turns in random order. Python's cyclic garbage collector is off while
the clock runs. Both have looked up twice before, so that numba has compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import warnings
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

# Before LMCache is imported: it reports its use to a host outside otherwise, and logs each probe.
os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.api import MemoryLayoutDesc, PrefetchResult
    from lmcache.v1.mp_observability.event_bus import EventBus as PeerEventBus
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
    from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry
    from lmcache.v1.multiprocess.modules.blend.module import BlendModule
    from lmcache.v1.multiprocess.session import SessionManager
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

import kvsplice
from kvsplice import BlendEngine, Matcher, Request
from kvsplice.embedded import EmbeddedContext, EmbeddedContexts, EmbeddedSessions, EventBus, Hasher, PagedCache
from kvsplice.hashing import chained_chunk_hashes
from kvsplice.ports import Fetched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHUNK, QUERY, VOCABULARY, BATCH = 256, 32_768, 128_000, 1000
MODEL = "m"
OURS, THEIRS, ARRAY = "kvsplice", "lmcache", "kvsplice, tokens as uint32"
COLUMNS = (OURS, THEIRS, ARRAY)


@dataclass
class Stopwatch:
    """Time spent in the store, in nanoseconds."""

    spent: int = 0
    began: int = field(default=0, repr=False)

    def __enter__(self) -> None:
        self.began = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.spent += time.perf_counter_ns() - self.began


class OurStore:
    """The port of kvsplice over a set of chunk hashes."""

    def __init__(self, held: set[bytes], clock: Stopwatch) -> None:
        self._held, self._clock = held, clock
        self.read_locks = 0

    def keys(self, request: Request, chunk_hashes: Sequence[bytes]) -> list[list[tuple[bytes, bytes]]]:
        return [[(request.scope, chunk_hash)] for chunk_hash in chunk_hashes]

    def submit(self, keys: Any, policy: Any, locks: int, request: Request) -> Any:
        with self._clock:
            present = np.fromiter((chunk_hash in self._held for _, chunk_hash in keys), bool, len(keys))
            loaded = present if policy.value == "sparse" else np.logical_and.accumulate(present)
            self.read_locks += int(loaded.sum()) * locks
            return SimpleNamespace(loading=0, answer=Fetched(loaded, present))

    def poll(self, ticket: Any) -> Fetched:
        return ticket.answer

    def read(self, keys: Any) -> None:
        raise NotImplementedError

    def release(self, keys: Any, locks: int) -> None:
        with self._clock:
            self.read_locks -= len(keys) * locks


class TheirStore:
    """The storage manager of LMCache over the same set."""

    def __init__(self, held: set[bytes], clock: Stopwatch) -> None:
        self._held, self._clock = held, clock
        self.read_locks = 0

    def submit_prefetch_task(self, spec: Any, external_request_id: str) -> Any:
        with self._clock:
            [row] = spec.key_groups
            present = [key.chunk_hash in self._held for key in row.keys]
            bits = Bitmap(len(present))
            if spec.fetching_policy == "prefix" and False in present:
                present = present[: present.index(False)]
            bits.batched_set([index for index, each in enumerate(present) if each])
            self.read_locks += sum(present) * spec.num_kv_readers
            return SimpleNamespace(total_requested_keys=0, bits=bits)

    def query_prefetch_status(self, handle: Any) -> PrefetchResult:
        with self._clock:
            return PrefetchResult([handle.bits], [handle.bits], [], found_cells=[handle.bits])

    def finish_read_prefetched(self, keys: Any, read_locks: int, l1_owners: Any = None) -> None:
        with self._clock:
            self.read_locks -= len(keys) * read_locks


class Ours:
    def __init__(self, held: set[bytes], chunks: int) -> None:
        self.clock = Stopwatch()
        self.store = OurStore(held, self.clock)
        self.sessions = EmbeddedSessions(Hasher(CHUNK), CHUNK)
        contexts = EmbeddedContexts()
        cache = PagedCache(1, 1, block_size=16, heads=1, head_size=8)
        contexts.register(0, EmbeddedContext([cache.layout], model_name=MODEL))
        self.matcher = Matcher(CHUNK, capacity=chunks + (1 << 12))
        self.engine = BlendEngine(
            matcher=self.matcher,
            store=self.store,
            transfer=None,
            contexts=contexts,
            sessions=self.sessions,
            sink=EventBus(),
        )
        self.scope = Request("", (), MODEL).scope

    def register(self, tokens: Any, hashes: list[bytes], position: int) -> None:
        self.matcher.register(tokens, hashes, position_offset=position, scope=self.scope)

    def look_up(self, request_id: str, tokens: Any) -> tuple[int, int, int]:
        """Prefix tokens, chunks elsewhere, nanoseconds outside the store."""
        self.clock.spent = 0
        begin = time.perf_counter_ns()
        result = self.engine.lookup(Request(request_id, tokens, MODEL))
        elapsed = time.perf_counter_ns() - begin - self.clock.spent
        assert result is not None
        self.sessions.end(request_id)
        assert self.store.read_locks == 0
        return result.prefix_tokens, len(result.matches), elapsed

    def close(self) -> None:
        self.engine.close()


class Theirs:
    def __init__(self, held: set[bytes], chunks: int) -> None:
        self.clock = Stopwatch()
        self.store = TheirStore(held, self.clock)
        hasher = TokenHasher(CHUNK)
        self.sessions = SessionManager(hasher, cleanup_interval=None)
        registry = LayoutDescRegistry()
        registry.register(MODEL, 1, MemoryLayoutDesc([torch.Size([2, 1, CHUNK, 8])], [torch.float32]))
        context = SimpleNamespace(
            chunk_size=CHUNK,
            event_bus=PeerEventBus(),
            session_manager=self.sessions,
            token_hasher=hasher,
            layout_desc_registry=registry,
            storage_manager=self.store,
        )
        self.bus = context.event_bus
        self.module = BlendModule(context, SimpleNamespace(register_host_func=lambda *_: None))

    def register(self, tokens: Any, hashes: list[bytes], position: int) -> None:
        self.module._token_range_matcher.on_new_token_hashes(tokens.tolist(), hashes, 0, position)

    def look_up(self, request_id: str, tokens: tuple[int, ...]) -> tuple[int, int, int]:
        """Prefix tokens, chunks elsewhere, nanoseconds outside the store."""
        key = IPCCacheServerKey(MODEL, 1, None, tokens, 0, len(tokens), request_id, num_kv_readers=1)
        self.clock.spent = 0
        begin = time.perf_counter_ns()
        result = self.module.cb_unified_lookup(key, 1)
        elapsed = time.perf_counter_ns() - begin - self.clock.spent
        assert result is not None
        for listener in self.sessions.destroy_listeners:
            listener(self.sessions.remove(request_id))
        # The prefix's locks are released by another of its modules.
        self.store.read_locks -= result.prefix_coverage_tokens // CHUNK
        assert self.store.read_locks == 0
        self.bus._queue.clear()
        return result.prefix_coverage_tokens, len(result.non_prefix_segments), elapsed

    def close(self) -> None:
        self.module.close()


def fill(sides: dict[str, Any], held: set[bytes], chunks: int) -> np.ndarray:
    """Register so many random chunks with both; some of each batch are returned."""
    rng, kept = np.random.default_rng(1), []
    for batch in range(-(-chunks // BATCH)):
        count = min(BATCH, chunks - batch * BATCH)
        tokens = rng.integers(0, VOCABULARY, count * CHUNK, dtype=np.uint32)
        hashes = [(batch * BATCH + index).to_bytes(32, "little") for index in range(count)]
        for side in sides.values():
            side.register(tokens, hashes, 0)
        held.update(hashes)
        kept.append(tokens.reshape(-1, CHUNK)[:64])
        print(f"\r{batch * BATCH + count:,} chunks held", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return np.concatenate(kept)


def prompts(known: np.ndarray, held: set[bytes]) -> dict[str, Callable[[np.random.Generator], np.ndarray]]:
    """Kinds of prompts, by what of them is stored."""

    def unknown(rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, VOCABULARY, QUERY, dtype=np.uint32)

    def half(rng: np.random.Generator) -> np.ndarray:
        prompt = unknown(rng)
        texts = known[rng.choice(len(known), QUERY // CHUNK // 2, replace=False)]
        for place, text in enumerate(texts):
            start = 2 * CHUNK * place + 7
            prompt[start : start + CHUNK] = text
        return prompt

    prefix = np.random.default_rng(2).integers(0, VOCABULARY, QUERY, dtype=np.uint32)
    held.update(chained_chunk_hashes(prefix, CHUNK))

    def stored(rng: np.random.Generator) -> np.ndarray:
        return prefix

    return {"nothing is stored": unknown, "half of it is stored, elsewhere": half, "all of it is stored": stored}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()

    held: set[bytes] = set()
    sides = {OURS: Ours(held, arguments.chunks), THEIRS: Theirs(held, arguments.chunks)}
    known = fill(sides, held, arguments.chunks)
    rows = []
    for what, make in prompts(known, held).items():
        rng = np.random.default_rng(3)
        times: dict[str, list[float]] = {name: [] for name in COLUMNS}
        found: dict[str, list[int]] = {name: [] for name in COLUMNS}
        for turn in range(arguments.rounds + 2):
            # In any order, and each with a prompt of its own: what always ran second would find warm caches.
            for name in rng.permutation(COLUMNS).tolist():
                prompt = make(rng)
                tokens = prompt.copy() if name == ARRAY else tuple(prompt.tolist())
                side = sides[THEIRS if name == THEIRS else OURS]
                gc.collect(0)
                gc.disable()
                prefix, matches, elapsed = side.look_up(f"{name} {what} {turn}", tokens)
                gc.enable()
                if turn >= 2:
                    times[name].append(elapsed / 1e6)
                    found[name].append(prefix + matches * CHUNK)
        rows.append({"prompt": what, "milliseconds": times, "tokens_found": found})
    for side in sides.values():
        side.close()
    result = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "kvsplice": kvsplice.__version__,
        "lmcache": version("lmcache"),
        "command": " ".join(["python benches/compare_lmcache_engine.py", *sys.argv[1:]]),
        "chunks_held": arguments.chunks,
        "rows": rows,
    }
    print(render(result))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1), encoding="utf-8")


def render(result: dict[str, Any]) -> str:
    lines = [
        f"{result['date']}, {result['machine']}, Python {result['python']}; kvsplice {result['kvsplice']}, "
        f"lmcache {result['lmcache']}; `{result['command']}`",
        "",
        f"One lookup of {QUERY:,} tokens, {result['chunks_held']:,} chunks held: milliseconds outside the store, "
        "median (p99); tokens found, median.",
        "",
        f"| prompt | {' | '.join(COLUMNS)} | {OURS} finds | {THEIRS} finds |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["prompt"]]
        for name in COLUMNS:
            median, p99 = np.percentile(row["milliseconds"][name], [50, 99])
            cells.append(f"{median:.2f} ({p99:.2f})")
        cells += [f"{np.median(row['tokens_found'][name]):,.0f}" for name in (OURS, THEIRS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
