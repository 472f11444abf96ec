"""The engine under random interleavings: nothing leaks, nothing wrong is served."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine_parts import BLOCK, CHUNK, NOTHING_LEFT, Bench, ScriptedFleet, rotated
from kvsplice import Request
from kvsplice.embedded import ObjectKey
from kvsplice.hashing import chained_chunk_hashes
from kvsplice.ports import FleetMatch
from kvsplice.retrieve import Reason

# Three documents of a chunk, one of a chunk and a half that overlaps with them, and single tokens between.
PARTS = [tuple(range(10 * n, 10 * n + CHUNK)) for n in range(3)] + [(2, 3, 10, 11, 12, 13), (90,)]
PROMPTS = st.lists(st.sampled_from(PARTS), min_size=2, max_size=6).map(
    lambda parts: [t for part in parts for t in part]
)
SALTS = st.sampled_from(["", "", "", "other"])
IDS = st.sampled_from(["one", "two", "three"])


class Engine(RuleBasedStateMachine):
    finished = Bundle("finished")

    @initialize(fleet=st.booleans(), segmented=st.booleans(), world_size=st.sampled_from([1, 1, 2]))
    def begin(self, fleet, segmented, world_size):
        self.fleet = ScriptedFleet() if fleet else None
        self.bench = Bench(world_size=world_size, fleet=self.fleet, segmented=segmented)
        self.running = {}
        self.text_of = {}
        self.count = 0
        # The fleet's test double answers out of an index of everything that was stored.
        self.index = {}
        for order in ((0, 1, 2), (2, 0, 3, 1)):
            self.store_prompt([token for part in order for token in PARTS[part]], "", 0, set())

    def request(self, request_id, tokens, salt, **rest):
        return Request(request_id, tokens, "m", self.bench.world_size, salt, **rest)

    @rule(
        tokens=PROMPTS, salt=SALTS, start=st.sampled_from([0, 0, CHUNK]), refused=st.sets(st.integers(0, 3), max_size=1)
    )
    def store(self, tokens, salt, start, refused):
        if start <= len(tokens):
            self.store_prompt(tokens, salt, start, refused)

    def store_prompt(self, tokens, salt, start, refused):
        bench, self.count = self.bench, self.count + 1
        bench.transfer.refused = refused
        rng = np.random.default_rng(self.count)
        for rank in range(bench.world_size):
            cache = bench.caches[rank]
            blocks = cache.allocator.allocate(-(-len(tokens) // BLOCK))
            for array in cache.arrays:
                array[blocks] = rng.normal(size=array[blocks].shape)
            request = self.request(
                f"store{self.count}", tokens, salt, worker_id=rank, start=start, end=len(tokens) // CHUNK * CHUNK
            )
            assert bench.engine.store(request, rank, [blocks]) == ("stored", request.request_id)
            cache.allocator.free(blocks)
        hashes = chained_chunk_hashes(tokens, CHUNK)
        for index, chunk_hash in enumerate(hashes):
            text = tokens[index * CHUNK : (index + 1) * CHUNK]
            self.text_of[request.scope, chunk_hash] = text, index * CHUNK
            self.index.setdefault((request.scope, tuple(text)), (chunk_hash, index * CHUNK))

    @rule(
        target=finished,
        request_id=IDS,
        tokens=PROMPTS,
        salt=SALTS,
        latency=st.sampled_from([0, 0, 1, 2]),
        polls=st.integers(1, 8),
    )
    def look_up(self, request_id, tokens, salt, latency, polls):
        self.bench.store.latency = latency
        self.running[request_id] = self.request(request_id, tokens, salt)
        return self.poll_until(request_id, polls)

    @rule(target=finished, request_id=IDS, polls=st.integers(1, 8))
    def poll(self, request_id, polls):
        return self.poll_until(request_id, polls)

    def poll_until(self, request_id, polls):
        request = self.running.get(request_id)
        if request is None:
            return multiple()
        for turn in range(polls):
            if turn % 2:
                self.bench.store.tick()
                self.answer_fleet()
            result = self.bench.engine.lookup(request)
            if result is not None:
                del self.running[request_id]
                self.check(request, result)
                return request, result
        return multiple()

    def check(self, request, result):
        tokens, ends = request.tokens, result.prefix_tokens
        assert result.prefix_tokens % CHUNK == 0
        assert [match.cur_start for match in result.prefix] == list(range(0, result.prefix_tokens, CHUNK))
        for match in result.matches:
            assert match.cur_start >= ends, "matches overlap"
            ends = match.cur_end
        for match in (*result.prefix, *result.matches, *result.retained):
            text, old = self.text_of[request.scope, match.chunk_hash]
            assert tokens[match.cur_start : match.cur_end] == text
            assert match.old_start == old
        for match in (*result.prefix, *result.retained):
            assert match.old_start == match.cur_start

    @rule(finished=consumes(finished), whole=st.booleans(), cut=st.integers(0, 3), pick=st.randoms())
    def retrieve(self, finished, whole, cut, pick):
        request, result = finished
        bench = self.bench
        matches = [*result.prefix, *result.matches, *result.retained]
        if not whole:
            matches = [match for match in matches if pick.random() < 0.7]
        pick.shuffle(matches)
        for rank in range(bench.world_size):
            cache = bench.caches[rank]
            blocks = cache.allocator.allocate(max(-(-len(request.tokens) // BLOCK) - cut, 0))
            before = [bench.slots(rank, blocks, part) for part in (0, 1)]
            all_before = [array.copy() for array in cache.arrays]
            asked = self.request(request.request_id, request.tokens, request.cache_salt, worker_id=rank)
            outcome = bench.engine.retrieve(asked, matches, [blocks], rank)
            covered = np.zeros(len(blocks) * BLOCK, bool)
            if outcome.ran:
                self.check_bytes(request, matches, rank, blocks, before, covered)
                again = bench.engine.retrieve(asked, matches, [blocks], rank)
                assert again.ran
                assert again.reason is (Reason.APPLIED if matches else Reason.EMPTY)
            else:
                assert [np.array_equal(*pair) for pair in zip(cache.arrays, all_before, strict=True)] == [True, True]
            others = np.setdiff1d(np.arange(bench.blocks), blocks)
            for array, old in zip(cache.arrays, all_before, strict=True):
                assert np.array_equal(array[others], old[others])
            cache.allocator.free(blocks)

    def check_bytes(self, request, matches, rank, blocks, before, covered):
        bench = self.bench
        keys, values = (bench.slots(rank, blocks, part) for part in (0, 1))
        for match in matches:
            at = slice(match.cur_start, match.cur_end)
            covered[at] = True
            [stored] = bench.store.objects[ObjectKey(request.scope, match.chunk_hash, rank)]
            for layer in range(2):
                old_keys = stored[0, layer].reshape(CHUNK, 1, -1)
                if match.old_start == match.cur_start:
                    assert np.array_equal(keys[layer, at], old_keys)
                else:
                    expected = rotated(old_keys, match.old_start, match.cur_start, bench.table)
                    np.testing.assert_allclose(keys[layer, at], expected, atol=1e-5)
                assert np.array_equal(values[layer, at].reshape(CHUNK, -1), stored[1, layer])
        for now, old in zip((keys, values), before, strict=True):
            assert np.array_equal(now[:, ~covered], old[:, ~covered])

    @rule(
        trouble=st.sampled_from(["end", "end", "evict", "evict", "evict", "hide", "raise", "later", "much later"]),
        request_id=IDS,
        what=st.sampled_from(["submit", "poll", "read"]),
        pick=st.randoms(),
    )
    def trouble(self, trouble, request_id, what, pick):
        bench, store = self.bench, self.bench.store
        if trouble == "end":
            self.running.pop(request_id, None)
            bench.sessions.end(request_id)
        elif trouble == "evict" and store.objects:
            store.evict(pick.choice(sorted(store.objects)))
        elif trouble == "hide":
            # Memory runs short: an object that exists cannot be loaded for now.
            store.hidden = {key for key in sorted(store.objects) if pick.random() < 0.2}
        elif trouble == "raise":
            store.raises[what] = 1
        else:
            bench.clock.now += 2 if trouble == "later" else 601
            bench.engine._reap()

    @rule(deferred=st.booleans())
    def streams(self, deferred):
        for rank in range(self.bench.world_size):
            context = self.bench.contexts.get(rank)
            context.deferred = deferred
            context.run()

    def answer_fleet(self):
        if self.fleet is None:
            return
        for ticket, request in self.fleet.asked.items():
            if ticket in self.fleet.answers:
                continue
            tokens = list(request.tokens)
            windows = ((at, (request.scope, tuple(tokens[at : at + CHUNK]))) for at in range(len(tokens) - CHUNK + 1))
            hits = [(*self.index[text], at) for at, text in windows if text in self.index]
            self.fleet.answers[ticket] = [FleetMatch(*hit) for hit in hits]

    @invariant()
    def the_store_was_used_rightly(self):
        if hasattr(self, "bench"):
            assert self.bench.store.wrong == []
            # The index can be checked only while nobody writes to it.
            self.bench.engine._registrar.drain()
            assert self.bench.matcher._index.check() is None

    def teardown(self):
        if hasattr(self, "bench"):
            left = self.bench.finish()
            assert left == NOTHING_LEFT


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
