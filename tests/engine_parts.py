"""Ports under a test's control: what is late, what is lost, what raises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from kvsplice.embedded import EmbeddedContext, EmbeddedContexts, EmbeddedSessions, Hasher, ObjectKey, PagedCache
from kvsplice.engine import BlendEngine, EngineOptions
from kvsplice.fleet import FleetStats
from kvsplice.matcher import Matcher
from kvsplice.ports import Fetched, FleetMatch, Policy, Request, Stored
from kvsplice.splicer.gather import gather


class Planted(Exception):
    """An error that a test asked for."""


@dataclass(eq=False)
class ScriptedTicket:
    keys: list
    policy: Policy
    locks: int
    wait: int
    loading: int = 0
    answer: Fetched | None = None


class ScriptedStore:
    """Objects in a dict. A ticket answers after as many ticks as `latency` said when it was submitted.

    Its locks are taken when it is loaded, whether somebody polls it then or not.
    """

    def __init__(self):
        self.objects = {}
        self.locks = Counter()
        self.hidden = set()
        self.latency = 0
        self.tickets = []
        self.raises = Counter()
        self.wrong = []
        self.submitted = []

    def _maybe_raise(self, what):
        if self.raises[what] > 0:
            self.raises[what] -= 1
            raise Planted(what)

    def keys(self, request, chunk_hashes):
        return [[ObjectKey(request.scope, h, rank) for rank in range(request.world_size)] for h in chunk_hashes]

    def submit(self, keys, policy, locks, request):
        self._maybe_raise("submit")
        if len(set(keys)) != len(keys):
            self.wrong.append("a key was submitted twice")
        ticket = ScriptedTicket(list(keys), policy, locks, self.latency)
        ticket.loading = self.latency and len(keys)
        self.tickets.append(ticket)
        self.submitted.append((policy, list(keys), locks))
        if ticket.wait <= 0:
            self._load(ticket)
        return ticket

    def poll(self, ticket):
        self._maybe_raise("poll")
        if ticket not in self.tickets:
            self.wrong.append("a ticket was polled after its answer")
        if ticket.answer is not None:
            self.tickets.remove(ticket)
        return ticket.answer

    def _load(self, ticket):
        present = np.array([key in self.objects for key in ticket.keys], bool)
        loaded = present & np.array([key not in self.hidden for key in ticket.keys], bool)
        if ticket.policy is Policy.PREFIX and not loaded.all():
            loaded[int(np.argmin(loaded)) :] = False
        for key, each in zip(ticket.keys, loaded.tolist(), strict=True):
            if each:
                self.locks[key] += ticket.locks
        ticket.answer = Fetched(loaded, present)

    def read(self, keys):
        self._maybe_raise("read")
        for key in keys:
            if self.locks[key] < 1:
                self.wrong.append(f"read without a lock: {key}")
        if any(key not in self.objects for key in keys):
            return None
        return [self.objects[key] for key in keys]

    def release(self, keys, locks):
        self._maybe_raise("release")
        for key in keys:
            if self.locks[key] < locks:
                self.wrong.append(f"released too often: {key}")
            self.locks[key] -= locks

    # -- for the test

    def tick(self):
        for ticket in self.tickets:
            ticket.wait -= 1
            if ticket.wait <= 0 and ticket.answer is None:
                self._load(ticket)

    def evict(self, key):
        """As a store does it: not while somebody reads."""
        if self.locks[key] == 0:
            self.objects.pop(key, None)

    def total_locks(self):
        return self.locks.total()


class ScriptedContext(EmbeddedContext):
    """Host memory with a stream: what is to happen after it waits until the test runs it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pending = []
        self.deferred = False

    def after(self, action):
        if self.deferred:
            self.pending.append(action)
        else:
            action()

    def run(self):
        pending, self.pending = self.pending, []
        for action in pending:
            action()


class ScriptedTransfer:
    """Copies out of paged caches, except for chunks that the test says fail."""

    def __init__(self, chunk_size, store, contexts, sessions):
        self.chunk_size, self.store_port, self.contexts, self.sessions = chunk_size, store, contexts, sessions
        self.refused = set()

    def store(self, request, instance_id, block_ids, event):
        context = self.contexts.get(instance_id)
        session = self.sessions.open(request.request_id)
        session.set_tokens(request.tokens)
        kept = []
        for index, chunk_hash in enumerate(session.hashes(request.start, request.end)):
            kept.append(index not in self.refused)
            if kept[-1]:
                key = ObjectKey(request.scope, chunk_hash, request.worker_id or 0)
                self.store_port.objects[key] = tuple(
                    gather(layout, block_ids[table], request.start + index * self.chunk_size, self.chunk_size)
                    for layout, table in zip(context.layouts, context.block_table_of, strict=True)
                )
        return Stored(("stored", request.request_id), kept)


class ScriptedFleet:
    """Answers when the test says so."""

    budget_s = 1.0

    def __init__(self):
        self.asked = {}
        self.answers = {}
        self.published = []
        self.forgotten = []
        self.closed = 0

    def submit(self, request):
        ticket = object()
        self.asked[ticket] = request
        return ticket

    def poll(self, ticket):
        assert ticket in self.asked
        return self.answers.get(ticket)

    def forget(self, ticket):
        self.forgotten.append(ticket)

    def publish(self, request, tokens, chunk_hashes, start):
        self.published.append((request, list(tokens), list(chunk_hashes), start))

    def stats(self):
        return FleetStats(len(self.asked), 0, len(self.answers), 0, len(self.published), 0, 0)

    def close(self):
        self.closed += 1

    def answer_all(self, *hits):
        for ticket in self.asked:
            self.answers.setdefault(ticket, [FleetMatch(*hit) for hit in hits])


class Recorder:
    def __init__(self):
        self.events = []

    def publish(self, name, request_id, fields):
        self.events.append((name, request_id, dict(fields)))

    def wants(self, name):
        return False

    def of(self, request_id):
        return [(name, fields) for name, rid, fields in self.events if rid == request_id]

    def names(self, request_id=None):
        return [name for name, rid, _ in self.events if request_id in {None, rid}]

    def open_spans(self):
        """Spans that started and did not end, by request and name."""
        spans = Counter()
        for name, request_id, _ in self.events:
            stem, _, edge = name.rpartition(".")
            if edge == "start":
                spans[request_id, stem] += 1
            elif edge == "end":
                spans[request_id, stem] -= 1
        return {key: count for key, count in spans.items() if count}


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self):
        return self.now


CHUNK, BLOCK, HEADS, SIZE, POSITIONS = 4, 2, 1, 4, 512


def rope_table(positions=POSITIONS, size=SIZE):
    angles = np.arange(positions)[:, None] * 100.0 ** -(np.arange(size // 2) / (size // 2))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotated(keys, old, new, table):
    """K ``[tokens, heads, size]`` moved from position ``old`` to ``new``, in float64."""
    half = table.shape[1] // 2
    rows = table.astype(np.float64)
    complex_rows = rows[:, :half] + 1j * rows[:, half:]
    count = len(keys)
    factor = (complex_rows[new : new + count] / complex_rows[old : old + count])[:, None, :]
    x = keys.astype(np.float64)
    turned = (x[..., :half] + 1j * x[..., half:]) * factor
    return np.concatenate([turned.real, turned.imag], axis=-1)


@dataclass
class Bench:
    """An engine on scripted parts, with one paged cache per rank."""

    world_size: int = 1
    fleet: ScriptedFleet | None = None
    segmented: bool = False
    blocks: int = 512
    instances: int = 1
    options: dict = field(default_factory=dict)

    def __post_init__(self):
        self.clock = Clock()
        self.store = ScriptedStore()
        self.sink = Recorder()
        self.sessions = EmbeddedSessions(Hasher(CHUNK), CHUNK)
        self.contexts = EmbeddedContexts()
        self.transfer = ScriptedTransfer(CHUNK, self.store, self.contexts, self.sessions)
        self.matcher = Matcher(chunk_size=CHUNK, capacity=4096, seed=1)
        self.engine = BlendEngine(
            matcher=self.matcher,
            store=self.store,
            transfer=self.transfer,
            contexts=self.contexts,
            sessions=self.sessions,
            sink=self.sink,
            fleet=self.fleet,
            # The background thread stays out of the way of what a test scripts.
            options=EngineOptions(
                segmented_prefix=self.segmented,
                clock=self.clock,
                **{"housekeeping_s": 3600, "job_ttl_s": 60, "request_ttl_s": 600, **self.options},
            ),
        )
        self.caches, self.table = [], rope_table()
        rng = np.random.default_rng(5)
        for instance in range(max(self.world_size, self.instances)):
            cache = PagedCache(2, self.blocks, block_size=BLOCK, heads=HEADS, head_size=SIZE)
            for array in cache.arrays:
                array[...] = rng.normal(size=array.shape)
            self.caches.append(cache)
            self.contexts.register(
                instance, ScriptedContext([cache.layout], model_name="m", world_size=self.world_size)
            )
            self.engine.register_rope(instance, [self.table], SIZE)

    def slots(self, instance, blocks, part):
        """All slots of a block table in order: ``[layers, tokens, heads, size]`` of K (0) or V (1)."""
        return np.stack([array[blocks, part].reshape(-1, HEADS, SIZE) for array in self.caches[instance].arrays])

    def settle(self):
        """Let everything that is under way come to its end."""
        for instance in range(len(self.caches)):
            self.contexts.get(instance).run()
        self.engine._registrar.drain()
        for _ in range(20):
            self.store.tick()
            self.engine._reap()

    def finish(self):
        """End all, and return what is wrong: read locks, jobs, spans."""
        self.store.raises.clear()
        for request_id in list(self.sessions._sessions):
            self.sessions.end(request_id)
        for request_id in {rid for _, rid, _ in self.sink.events if rid is not None}:
            self.engine.end(request_id)
        self.settle()
        status = self.engine.report_status()
        self.engine.close()
        self.engine.close()
        return {
            "store": self.store.wrong,
            "locks": self.store.total_locks(),
            "spans": self.sink.open_spans(),
            "lookups": status["active_lookups"],
            "requests": status["open_requests"],
            "orphans": status["abandoned_prefetches"],
            "pending": status["pending_registrations"],
        }


NOTHING_LEFT = {
    "store": [],
    "locks": 0,
    "spans": {},
    "lookups": {},
    "requests": 0,
    "orphans": 0,
    "pending": 0,
}


def ask(bench, tokens, request_id="r", salt="", **rest):
    return Request(request_id, [*tokens], "m", rest.pop("world_size", bench.world_size), salt, **rest)


def store(bench, tokens, salt="", seed=0, request_id="s", ranks=None):
    """Fill each rank's cache with KV of its own, and store it."""
    rng = np.random.default_rng(seed)
    for rank in range(bench.world_size) if ranks is None else ranks:
        cache = bench.caches[rank]
        blocks = cache.allocator.allocate(-(-len(tokens) // BLOCK))
        for array in cache.arrays:
            array[blocks] = rng.normal(size=array[blocks].shape)
        request = ask(bench, tokens, request_id, salt, worker_id=rank, end=len(tokens) // CHUNK * CHUNK)
        bench.engine.store(request, rank, [blocks])
        cache.allocator.free(blocks)


def look_up(bench, request, tp_size=1, polls=20):
    for _ in range(polls):
        result = bench.engine.lookup(request, tp_size)
        if result is not None:
            return result
        bench.store.tick()
    raise AssertionError("the lookup did not end")


def retrieve(bench, request, matches, instance=0, blocks=None):
    if blocks is None:
        blocks = bench.caches[instance].allocator.allocate(-(-len(request.tokens) // BLOCK))
    return bench.engine.retrieve(request, matches, [blocks], instance), blocks


def assert_spliced(bench, matches, request, instance, blocks, rank=0):
    keys, values = (bench.slots(instance, blocks, part) for part in (0, 1))
    for match in matches:
        [stored] = bench.store.objects[ObjectKey(request.scope, match.chunk_hash, rank)]
        at = slice(match.cur_start, match.cur_end)
        for layer in range(2):
            expected = rotated(stored[0, layer].reshape(CHUNK, 1, SIZE), match.old_start, match.cur_start, bench.table)
            np.testing.assert_allclose(keys[layer, at], expected, atol=1e-5)
            assert np.array_equal(values[layer, at].reshape(CHUNK, -1), stored[1, layer])


def planted_object(chunk_hash, rank, layers):
    """The KV of a chunk as one rank holds it, drawn from its hash: ``[2, layers, CHUNK, hidden]``."""
    rng = np.random.default_rng([rank, int.from_bytes(chunk_hash, "little")])
    return rng.normal(size=(2, layers, CHUNK, HEADS * SIZE)).astype(np.float32)
