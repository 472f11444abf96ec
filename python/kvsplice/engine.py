"""The engine: store, unified lookup and retrieve, over the ports."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsplice import _core, events
from kvsplice.locks import Locks, Orphans
from kvsplice.lookup import LookupJob, LookupParts, LookupResult
from kvsplice.registration import Registrar, Registration
from kvsplice.requests import OpenRequest
from kvsplice.retrieve import Reason, Retrieval, Retriever, Target
from kvsplice.rope import RopeTables
from kvsplice.splicer import CudaOptions, Splicer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kvsplice.embedded.engine import EmbeddedEngine
    from kvsplice.matcher import Match, Matcher
    from kvsplice.ports import (
        BlockTables,
        ChunkStore,
        Contexts,
        EventSink,
        FleetDirectory,
        Request,
        Sessions,
        Stored,
        Transfer,
    )
    from kvsplice.splicer import PagedLayout

__all__ = ["BlendEngine", "EngineOptions"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine behaves.

    Attributes
    ----------
    segmented_prefix : bool
        Keep a prompt's own chunks that lie behind a missing one.
    strike_threshold : int
        After so many lookups that found a chunk's text and not its KV, the chunk leaves the index.
    job_ttl_s, request_ttl_s : float
        How long after its last call an unfinished lookup is kept, and a finished one whose read locks were not used.
    housekeeping_s : float
        How often the background thread looks for what has expired.
    cuda : CudaOptions
        For splices on a GPU.
    clock : callable
        Seconds, never going back.
    """

    segmented_prefix: bool = False
    strike_threshold: int = 2
    job_ttl_s: float = 60.0
    request_ttl_s: float = 600.0
    housekeeping_s: float = 0.1
    cuda: CudaOptions = field(default_factory=CudaOptions)
    clock: Callable[[], float] = time.monotonic


class _Silence:
    """An event sink for whoever wants none."""

    def publish(self, name: str, request_id: str | None, fields: Mapping[str, Any]) -> None:
        pass

    def wants(self, name: str) -> bool:
        return False


class BlendEngine:
    """Stores KV, finds what a prompt can reuse of it at any offset, and writes that into the prompt's paged cache.

    A lookup returns at once, and is called again until it answers; a store takes as long as its `Transfer`, and `close`
    waits for what is under way. All may be called by several threads.

    Parameters
    ----------
    matcher : Matcher
        Its ``chunk_size`` is the engine's.
    store, transfer, contexts, sessions
        The ports, see `kvsplice.ports`. `kvsplice.embedded.engine` makes all of them for one process.
    sink : EventSink, optional
    fleet : FleetDirectory, optional
        If given, it is asked instead of the matcher.
    options : EngineOptions, optional
    """

    def __init__(
        self,
        *,
        matcher: Matcher,
        store: ChunkStore,
        transfer: Transfer,
        contexts: Contexts,
        sessions: Sessions,
        sink: EventSink | None = None,
        fleet: FleetDirectory | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.matcher = matcher
        self.store_port = store
        self.options = options or EngineOptions()
        self._transfer = transfer
        self._contexts = contexts
        self._sessions = sessions
        self._sink: EventSink = sink or _Silence()
        self._fleet = fleet
        self._mutex = threading.Lock()
        self._jobs: dict[str, LookupJob] = {}
        self._requests: dict[str, OpenRequest] = {}
        self._targets: dict[int, Target] = {}
        self._closed = False
        self._orphans = Orphans(store)
        self._registrar = Registrar(matcher, self._sink, self._reap, self.options.housekeeping_s)
        self._retriever = Retriever(matcher.chunk_size, store, self._sink, self._orphans)
        self._parts = LookupParts(
            chunk_size=matcher.chunk_size,
            matcher=matcher,
            store=store,
            sessions=sessions,
            contexts=contexts,
            sink=self._sink,
            orphans=self._orphans,
            fleet=fleet,
            segmented=self.options.segmented_prefix,
            strike_threshold=self.options.strike_threshold,
            clock=self.options.clock,
            drain=self._registrar.drain,
        )
        sessions.on_end(self.end)

    @classmethod
    def embedded(
        cls, layouts: PagedLayout | Sequence[PagedLayout], cos_sin_caches: Sequence[Any], head_size: int, **options: Any
    ) -> EmbeddedEngine:
        """An engine for one process, on `kvsplice.embedded`, with one paged cache as instance 0.

        Parameters
        ----------
        layouts, cos_sin_caches, head_size
            As in `kvsplice.embedded.EmbeddedEngine.add_instance`.
        **options
            Those of `kvsplice.embedded.EmbeddedEngine`, and of its ``add_instance``.
        """
        from kvsplice.embedded.engine import EmbeddedEngine, split_options

        of_engine, of_instance = split_options(options)
        engine = EmbeddedEngine(**of_engine)
        try:
            engine.add_instance(layouts, cos_sin_caches, head_size, **of_instance)
        except Exception:
            engine.close()
            raise
        return engine

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.matcher.chunk_size

    # -- rope ---------------------------------------------------------------------------------------------------------

    def register_rope(
        self,
        instance_id: int,
        cos_sin_caches: Sequence[Any],
        head_size: int,
        is_neox: bool = True,
        group_to_cache: Sequence[int] = (),
        *,
        group_windows: Sequence[tuple[int, int] | None] = (),
        without_rope: Collection[int] = (),
    ) -> None:
        """Say how an instance's model rotates K. A second call replaces the first.

        Parameters
        ----------
        instance_id : int
        cos_sin_caches, head_size, is_neox
            As in `kvsplice.RopeTables`.
        group_to_cache, group_windows : sequence, optional
            As there, by the engine's groups of layers: those that have a block table of their own.
        without_rope : collection of int, optional
            Layouts of the paged cache, by index, that carry no rope, whatever their group does.

        Raises
        ------
        ValueError, TypeError
            If the instance has no paged cache, no table is given, the map names a table that does not exist or leaves
            out a group, or the tables do not fit the paged cache. Nothing has changed then.
        """
        self._check_open()
        context = self._contexts.get(instance_id)
        if context is None:
            raise ValueError(f"instance_id: {instance_id} has no paged cache")
        tables_of = list(context.block_table_of)
        groups = max(tables_of) + 1
        for name, entries in (("group_to_cache", group_to_cache), ("group_windows", group_windows)):
            if len(entries) and len(entries) < groups:
                raise ValueError(f"{name}: {len(entries)} entries for {groups} groups of layers")
        caches = [group_to_cache[group] if len(group_to_cache) else 0 for group in tables_of]
        rope = RopeTables(
            cos_sin_caches,
            head_size,
            is_neox,
            [-1 if layout in without_rope else cache for layout, cache in enumerate(caches)],
            group_windows=[group_windows[group] for group in tables_of] if len(group_windows) else (),
        )
        splicer = Splicer(list(context.layouts), rope, chunk_tokens=self.chunk_size, cuda=self.options.cuda)
        with self._mutex:
            replaced = self._targets.get(instance_id)
            self._targets[instance_id] = Target(instance_id, context, splicer)
        if replaced is not None:
            replaced.splicer.close()

    def unregister_rope(self, instance_id: int) -> None:
        """Forget an instance's rope, and leave its paged cache. An unknown instance is logged."""
        if not self.drop_instance(instance_id):
            logger.warning("instance %d has no rope to unregister", instance_id)

    def drop_instance(self, instance_id: int) -> bool:
        """Forget an instance that is gone; whether it was known."""
        with self._mutex:
            target = self._targets.pop(instance_id, None)
        if target is not None:
            target.splicer.close()
        return target is not None

    # -- store --------------------------------------------------------------------------------------------------------

    def store(self, request: Request, instance_id: int, block_ids: BlockTables, event: object | None = None) -> object:
        """Store the KV of a token range, and index it once it is there.

        Parameters
        ----------
        request : Request
            With the range in ``start`` and ``end``.
        instance_id : int
        block_ids : sequence of sequences of int
            The request's block tables.
        event : optional
            What the copy waits for.

        Returns
        -------
        object
            What the transfer returned. Indexing never changes it, and never raises.
        """
        self._check_open()
        stored = self._transfer.store(request, instance_id, block_ids, event)
        # All ranks share the index.
        if request.worker_id in {0, None}:
            try:
                self._index(request, instance_id, stored)
            except Exception:
                logger.exception("request %s was stored and not indexed", request.request_id)
        return stored.result

    def _index(self, request: Request, instance_id: int, stored: Stored) -> None:
        size = self.chunk_size
        hashes = self._sessions.open(request.request_id).hashes(request.start, request.end)
        if not len(hashes):
            return
        chosen = [True] * len(hashes) if stored.kept is None else [bool(each) for each in stored.kept]
        if len(chosen) != len(hashes):
            raise ValueError(f"kept: {len(chosen)} entries for {len(hashes)} chunks")
        tokens = _core.token_array(request.tokens)[request.start : request.start + len(hashes) * size]
        if self._fleet is not None:
            self._publish_to_fleet(request, tokens, hashes, chosen)
        if request.start == 0:
            # The prefix leg finds it.
            chosen[0] = False
        registration = Registration(tokens, hashes, chosen, request.start, request.scope)
        self._registrar.announce(registration)
        after, context = stored.after, self._contexts.get(instance_id)
        if after is None and context is not None:
            after = context.after
        try:
            if after is None:
                self._registrar.put(registration)
            else:
                # Behind the copy: before it is done, a lookup would find a text without its KV.
                after(lambda: self._registrar.put(registration))
        except Exception:
            self._registrar.withdraw(registration)
            raise

    def _publish_to_fleet(self, request: Request, tokens: Any, hashes: Sequence[bytes], chosen: Sequence[bool]) -> None:
        assert self._fleet is not None
        size, first = self.chunk_size, 0
        while first < len(chosen):
            end = first
            while end < len(chosen) and chosen[end]:
                end += 1
            if end > first:
                self._fleet.publish(
                    request, tokens[first * size : end * size], hashes[first:end], request.start + first * size
                )
            first = end + 1

    # -- lookup -------------------------------------------------------------------------------------------------------

    def lookup(self, request: Request, tp_size: int = 1, *, readers: int | None = None) -> LookupResult | None:
        """Find what a prompt can reuse.

        The first call submits everything and the same call again polls. Another prompt under the same request id
        replaces the first.

        Parameters
        ----------
        request : Request
        tp_size : int
            Ranks that will retrieve. More than ``request.world_size`` means that they share each object.
        readers : int, optional
            How many retrieve each object, where the caller knows it better than these two numbers.

        Returns
        -------
        LookupResult or None
            None while something is being loaded. What the result names is locked for reading until it is retrieved,
            or the session ends, or `EngineOptions.request_ttl_s` has passed.
        """
        self._check_open()
        self._orphans.reap()
        if readers is None:
            readers = tp_size if tp_size > request.world_size else 1
        job = self._job(request, readers)
        try:
            job.start()
            result = job.advance()
        except Exception:
            self._discard(job)
            raise
        if result is not None:
            self._settle(job, result)
        return result

    def _job(self, request: Request, readers: int) -> LookupJob:
        with self._mutex:
            job = self._jobs.get(request.request_id)
        if job is not None and job.asks_the_same(request):
            return job
        fresh = LookupJob(self._parts, request, _core.token_array(request.tokens), readers)
        with self._mutex:
            replaced = self._jobs.get(request.request_id)
            if replaced is not job and replaced is not None and replaced.asks_the_same(request):
                return replaced
            self._jobs[request.request_id] = fresh
            earlier = self._requests.pop(request.request_id, None)
        if replaced is not None:
            self._abandon(replaced)
        if earlier is not None:
            self._release(request.request_id, earlier)
        return fresh

    def _settle(self, job: LookupJob, result: LookupResult) -> None:
        """Hand what a finished job holds to the request."""
        request = job.request
        prefix = [key for match in result.prefix for key in job.keys_of[match.chunk_hash]]
        if self._sessions.adopt(request, prefix, job.readers):
            job.locks.forget(prefix, job.readers)
        something = len(job.locks) > 0
        callers = job.readers * request.world_size
        opened = OpenRequest(request.scope, job.locks, job.keys_of, callers, self.options.clock(), open=True)
        with self._mutex:
            current = self._jobs.get(request.request_id) is job
            if current:
                del self._jobs[request.request_id]
                if something:
                    self._requests[request.request_id] = opened
        if not current:
            # It was ended meanwhile.
            self._release(request.request_id, opened)
        elif not something:
            self._sink.publish(events.REQUEST_END, request.request_id, {})

    # -- retrieve -----------------------------------------------------------------------------------------------------

    def retrieve(
        self,
        request: Request,
        matches: Sequence[Match],
        block_ids: BlockTables,
        instance_id: int,
        event: object | None = None,
    ) -> Retrieval:
        """Write matched ranges into the request's paged cache: all of them, or none that counts.

        Call it again as the block table grows; what is in the same blocks already is not written twice.

        Parameters
        ----------
        request : Request
            With the rank in ``worker_id`` where ``world_size`` is more than 1.
        matches : sequence of Match
            From the lookup; all of them or some, in any order. Those left out are unlocked.
        block_ids : sequence of sequences of int
            The request's block tables, one per group of layers that has its own.
        instance_id : int
        event : optional
            What the writes wait for.

        Raises
        ------
        ValueError
            If the instance has no paged cache or no rope, a block table is missing, blocks do not divide chunks, or
            the rank is missing. Nothing was written then.
        """
        self._check_open()
        context = self._contexts.get(instance_id)
        if context is None:
            raise ValueError(f"instance_id: {instance_id} has no paged cache")
        with self._mutex:
            target = self._targets.get(instance_id)
        if target is None or target.context is not context:
            # The other's memory may be gone.
            raise ValueError(f"instance_id: {instance_id} has no rope registered")
        rank, ranks = request.worker_id, request.world_size
        if ranks > 1 and (rank is None or not 0 <= rank < ranks):
            raise ValueError(f"request: worker_id is {rank}, which is no rank of a world of {ranks}")
        opened = self._opened(request)
        with opened.turns[instance_id]:
            outcome = self._retriever.run(request, matches, block_ids, target, opened, event)
            if outcome.reason in _NOTHING_DONE:
                fields = {"reason": outcome.reason.value, "dropped_matches": len(matches)}
                self._sink.publish(events.RETRIEVE_NOOP, request.request_id, fields)
            if outcome.reason is not Reason.DEFERRED:
                self._count(request.request_id, opened, instance_id)
        return outcome

    def _opened(self, request: Request) -> OpenRequest:
        other = None
        with self._mutex:
            opened = self._requests.get(request.request_id)
            if opened is not None and opened.scope != request.scope:
                # Two requests under one id: what one looked up must not reach the other.
                opened, other = None, opened
            if opened is None:
                opened = OpenRequest(request.scope, Locks(self.store_port), {}, 0, self.options.clock(), open=False)
                self._requests[request.request_id] = opened
            opened.touched = self.options.clock()
        if other is not None:
            self._release(request.request_id, other)
        return opened

    def _count(self, request_id: str, opened: OpenRequest, instance_id: int) -> None:
        """End the request's span behind the last instance's retrieve."""
        with self._mutex:
            opened.retrieved.add(instance_id)
            ended = opened.open and len(opened.retrieved) >= opened.callers
            if ended:
                opened.open = False
        if ended:
            self._sink.publish(events.REQUEST_END, request_id, {})

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, request_id: str) -> None:
        """Forget a request, and release what it holds. Called when its session ends; an unknown one is ignored."""
        with self._mutex:
            job = self._jobs.pop(request_id, None)
            opened = self._requests.pop(request_id, None)
        if job is not None:
            self._abandon(job)
        if opened is not None:
            self._release(request_id, opened)

    def close(self) -> None:
        """Index what is pending, release everything, stop. Safe to call twice."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            requests = [*self._jobs, *self._requests]
            targets = list(self._targets.values())
            self._targets.clear()
        self._registrar.close()
        for request_id in requests:
            self.end(request_id)
        self._orphans.reap()
        if self._fleet is not None:
            self._fleet.close()
        for target in targets:
            target.splicer.close()

    def report_status(self) -> dict[str, Any]:
        """What is going on, for a status page: plain values only."""
        with self._mutex:
            instances = {
                instance_id: {
                    "model_name": target.context.model_name,
                    "world_size": target.context.world_size,
                    "backend": target.splicer.backend,
                }
                for instance_id, target in self._targets.items()
            }
            lookups = {request_id: job.state.value for request_id, job in self._jobs.items()}
            requests = list(self._requests.values())
        return {
            "chunk_size": self.chunk_size,
            "instances_with_rope": instances,
            "active_lookups": lookups,
            "open_requests": len(requests),
            "read_locks": sum(len(opened.locks) for opened in requests),
            "abandoned_prefetches": len(self._orphans),
            "pending_registrations": len(self._registrar),
            "fleet": None if self._fleet is None else self._fleet.stats()._asdict(),
            "matcher": self.matcher.stats()._asdict(),
        }

    def _reap(self) -> None:
        """Give up what nobody came back for."""
        self._orphans.reap()
        now, options = self.options.clock(), self.options
        with self._mutex:
            jobs = [key for key, job in self._jobs.items() if now - job.touched > options.job_ttl_s]
            late = [self._jobs.pop(key) for key in jobs]
            requests = [key for key, opened in self._requests.items() if now - opened.touched > options.request_ttl_s]
            forgotten = [(key, self._requests.pop(key)) for key in requests]
        for job in late:
            logger.warning("lookup of request %s was given up by its caller", job.request.request_id)
            self._abandon(job)
        for request_id, opened in forgotten:
            self._release(request_id, opened)

    def _discard(self, job: LookupJob) -> None:
        with self._mutex:
            if self._jobs.get(job.request.request_id) is job:
                del self._jobs[job.request.request_id]
        self._abandon(job)

    def _abandon(self, job: LookupJob) -> None:
        if job.abandon():
            self._sink.publish(events.REQUEST_END, job.request.request_id, {})

    def _release(self, request_id: str, opened: OpenRequest) -> None:
        opened.locks.release_all()
        if opened.open:
            opened.open = False
            self._sink.publish(events.REQUEST_END, request_id, {})

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")


_NOTHING_DONE = {Reason.APPLIED, Reason.EMPTY, Reason.DEFERRED, Reason.PARTIAL}
