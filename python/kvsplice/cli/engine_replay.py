"""The replay through a whole engine: store KV, look it up, splice it into a paged cache, check every byte."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvsplice.cli.errors import CliError
from kvsplice.cli.shift import Preambles, shifted
from kvsplice.cli.synthetic import SyntheticModel
from kvsplice.embedded import PagedCache
from kvsplice.engine import BlendEngine, EngineOptions
from kvsplice.ports import Request
from kvsplice.retrieve import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvsplice.cli.replay import Settings
    from kvsplice.cli.workload import Request as WorkloadRequest
    from kvsplice.embedded.engine import EmbeddedEngine
    from kvsplice.matcher import Match

__all__ = ["EngineReplay", "EngineSettings"]

_BLOCK_SIZE = 16
_STAGES = ("lookup", "lookup_calls", "retrieve", "store")


class EngineSettings(NamedTuple):
    """The paged cache, the model whose KV is in it, and the store."""

    device: str = "cpu"
    layers: int = 2
    heads: int = 1
    head_size: int = 16
    dtype: str = "float32"
    cache_tokens: int = 1 << 17
    memory_bytes: int = 1 << 30
    disk: str | None = None
    disk_bytes: int = 64 << 30
    segmented_prefix: bool = False


class EngineReplay:
    """Runs requests through an engine, one after the other.

    For each one: look it up, poll until there is an answer; let the model compute what was not found; retrieve what
    was; compare all of the prompt's KV with what the model computes; store it.

    Parameters
    ----------
    settings : Settings
        Chunk size, capacity, shift, seed and limit are used.
    engine : EngineSettings

    Attributes
    ----------
    tokens, preamble, prefix, retained, other, spliced_bytes : array.array
        For each request: its tokens and preamble; tokens found as a prefix, behind a gap of it, and elsewhere; bytes
        that the splicer wrote.
    nanoseconds : dict of str to array.array
        For each request: ``lookup`` from the first call to the answer, of it ``lookup_calls`` inside of the calls,
        ``retrieve``, ``store``; on a GPU until the device is done.
    key_error : float
        The largest error of an element of K that was seen.
    wrong_values : int
        Elements of V that were wrong.
    not_spliced : int
        Requests whose retrieve failed, so that all of it was computed.
    guards_intact : bool
        False if something wrote outside of the prompt's blocks.
    complete : bool
        False if the run was interrupted.
    elapsed : float
        Seconds that the run took.

    Raises
    ------
    CliError
        If the device is not there, the folder for the disk cannot be made, or the chunk size is no multiple of the
        block size.
    """

    def __init__(self, settings: Settings, engine: EngineSettings) -> None:
        if settings.chunk_size % _BLOCK_SIZE:
            raise CliError(f"--chunk-size: with --engine it is a multiple of {_BLOCK_SIZE}, the tokens of a block")
        self.settings = settings
        self.engine_settings = engine
        self.tokens, self.preamble, self.prefix, self.retained, self.other, self.spliced_bytes = (
            array("q") for _ in range(6)
        )
        self.nanoseconds = {stage: array("q") for stage in _STAGES}
        self.key_error = 0.0
        self.wrong_values = self.not_spliced = 0
        self.guards_intact = True
        self.complete = True
        self.elapsed = 0.0
        self._preambles = Preambles(settings.seed) if settings.shift else None
        self._xp = np if engine.device == "cpu" else _cupy()
        cache = PagedCache(
            engine.layers,
            -(-engine.cache_tokens // _BLOCK_SIZE) + 2,
            block_size=_BLOCK_SIZE,
            heads=engine.heads,
            head_size=engine.head_size,
            dtype=engine.dtype,
            framework=self._xp.__name__,
        )
        self._model = SyntheticModel(cache.arrays, engine.dtype, engine.cache_tokens, self._xp)
        self._allocator = cache.allocator
        # Below and above all other blocks, so that a splice that misses them is seen.
        blocks = self._allocator.allocate(len(self._allocator))
        self._guards = [blocks[0], blocks[-1]]
        self._allocator.free(blocks[1:-1])
        self._model.poison(self._guards)
        try:
            self.engine: EmbeddedEngine = BlendEngine.embedded(
                cache.layout,
                [self._xp.asarray(self._model.rope_table)],
                engine.head_size,
                chunk_size=settings.chunk_size,
                capacity=settings.capacity,
                memory_bytes=engine.memory_bytes,
                disk=engine.disk,
                disk_bytes=engine.disk_bytes,
                seed=settings.seed,
                options=EngineOptions(segmented_prefix=engine.segmented_prefix),
            )
        except OSError as error:
            raise CliError(f"--disk: {engine.disk}: {error.strerror or error}") from None
        context = self.engine.contexts.get(0)
        assert context is not None
        self._stream = context.stream

    @property
    def bound(self) -> float:
        """What the error of K must not exceed: 64 roundings to the cache's dtype."""
        return self._model.bound

    @property
    def correct(self) -> bool:
        """Whether all KV was right, and nothing else was touched."""
        return self.guards_intact and not self.wrong_values and self.key_error <= self.bound and not self.not_spliced

    @property
    def requests(self) -> int:
        """Requests replayed."""
        return len(self.tokens)

    def run(self, requests: Iterable[WorkloadRequest], on_request: Callable[[int], None] | None = None) -> None:
        """Replay the requests; an interrupt ends the run early and leaves the counts so far."""
        begin = time.perf_counter()
        try:
            for request in itertools.islice(requests, self.settings.limit):
                if self._stream is None:
                    self._step(request)
                else:
                    with self._stream:
                        self._step(request)
                if on_request is not None:
                    on_request(self.tokens[-1])
        except KeyboardInterrupt:
            self.complete = False
        self.guards_intact = self.guards_intact and self._model.is_poison(self._guards)
        self.elapsed = time.perf_counter() - begin

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def _step(self, request: WorkloadRequest) -> None:
        tokens, scope = request
        tokens, preamble = shifted(tokens, self._preambles)
        room = self.engine_settings.cache_tokens
        if len(tokens) > room:
            raise CliError(f"request {self.requests + 1}: {len(tokens):,} tokens, more than --cache-tokens {room:,}")
        asked = Request(f"replay-{self.requests}", tokens, cache_salt=scope.hex())
        blocks = self._allocator.allocate(-(-len(tokens) // _BLOCK_SIZE))
        try:
            counts = self._serve(asked, blocks, scope)
        finally:
            self.engine.sessions.end(asked.request_id)
            self._allocator.free(blocks)
        # Last and together, so that an interrupt leaves no half-counted request but at worst one.
        for column, count in zip((self.prefix, self.retained, self.other, self.spliced_bytes), counts[0], strict=True):
            column.append(count)
        for stage, nanoseconds in zip(_STAGES, counts[1], strict=True):
            self.nanoseconds[stage].append(nanoseconds)
        self.preamble.append(preamble)
        self.tokens.append(len(tokens))

    def _serve(
        self, asked: Request, blocks: list[int], scope: bytes
    ) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        model, tokens = self._model, np.asarray(asked.tokens)
        model.poison(blocks)
        result, lookup, calls = self._look_up(asked)
        found = [*result.prefix, *result.retained, *result.matches]
        missing = np.ones(len(tokens), bool)
        for match in found:
            missing[match.cur_start : match.cur_end] = False
        # Before the splice: that must not touch what the model computed.
        self._compute(tokens, np.flatnonzero(missing), blocks, scope)
        retrieve, nbytes, ran = self._retrieve(asked, found, blocks)
        if not ran:
            self.not_spliced += 1
            found = []
            self._compute(tokens, np.flatnonzero(~missing), blocks, scope)
        deviation = model.check(tokens, blocks, scope)
        self.key_error = max(self.key_error, deviation.keys)
        self.wrong_values += deviation.wrong_values
        begin = time.perf_counter_ns()
        self.engine.store(asked, 0, [blocks])
        store = time.perf_counter_ns() - begin
        counts = (0, 0, 0, 0)
        if found:
            kinds = (result.prefix, result.retained, result.matches)
            prefix, retained, other = (sum(m.cur_end - m.cur_start for m in kind) for kind in kinds)
            counts = (prefix, retained, other, nbytes)
        return counts, (lookup, calls, retrieve, store)

    def _compute(self, tokens: Any, positions: Any, blocks: list[int], scope: bytes) -> None:
        self._model.compute(tokens[positions], positions, blocks, scope)

    def _look_up(self, asked: Request) -> tuple[Any, int, int]:
        inside = 0
        begin = time.perf_counter_ns()
        while True:
            call = time.perf_counter_ns()
            result = self.engine.lookup(asked)
            end = time.perf_counter_ns()
            inside += end - call
            if result is not None:
                return result, end - begin, inside
            time.sleep(0.0002)

    def _retrieve(self, asked: Request, found: Sequence[Match], blocks: list[int]) -> tuple[int, int, bool]:
        if not found:
            return 0, 0, True
        begin = time.perf_counter_ns()
        outcome = self.engine.retrieve(asked, found, [blocks], 0)
        if outcome.event is not None:
            outcome.event.synchronize()  # type: ignore[attr-defined]
        elapsed = time.perf_counter_ns() - begin
        return elapsed, outcome.nbytes, outcome.reason is Reason.SPLICED


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise CliError(f"--device cuda: needs CuPy ({error}); see kvsplice doctor") from None
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise CliError(f"--device cuda: {error}; see kvsplice doctor") from None
    return cupy
