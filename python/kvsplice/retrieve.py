"""Writes what a lookup found into the request's paged cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvsplice import events
from kvsplice.locks import Locks, loaded_keys
from kvsplice.ports import Policy
from kvsplice.splicer import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from kvsplice.locks import Orphans
    from kvsplice.matcher import Match
    from kvsplice.ports import BlockTables, ChunkStore, EventSink, Key, PagedContext, Request
    from kvsplice.requests import OpenRequest
    from kvsplice.splicer import Splicer

__all__ = ["Reason", "Retrieval", "Retriever", "Target"]

logger = logging.getLogger(__name__)


class Reason(str, Enum):
    """How a retrieve ended."""

    SPLICED = "spliced"
    """All matches are in the blocks, once the event is reached."""
    APPLIED = "applied"
    """They were there already, written by an earlier call."""
    EMPTY = "empty"
    """No match was asked for."""
    DEFERRED = "deferred"
    """The block table does not reach any match yet: call again when it has grown. Nothing is lost."""
    PARTIAL = "partial"
    """The block table reaches some matches only."""
    GONE = "gone"
    """A stored object is no longer there."""
    FAILED = "failed"
    """Something raised; the log has it."""


@dataclass(frozen=True)
class Retrieval:
    """What a retrieve did.

    Attributes
    ----------
    ran : bool
        Whether the paged cache holds all matches, once the event is reached. If not, the engine must compute them.
    event : object or None
        From the instance's paged cache: recorded behind the last write. The caller's own where nothing was enqueued.
    reason : Reason
    tokens, nbytes : int
        Written by this call.
    path : str
        How the bytes came, see `kvsplice.SpliceResult`.
    """

    ran: bool
    event: object | None
    reason: Reason
    tokens: int = 0
    nbytes: int = 0
    path: str = "none"


@dataclass(frozen=True)
class Target:
    """An instance's paged cache, and the splicer that its rope made."""

    instance_id: int
    context: PagedContext
    splicer: Splicer


@dataclass(frozen=True)
class Retriever:
    """The retrieves of one engine."""

    chunk_size: int
    store: ChunkStore
    sink: EventSink
    orphans: Orphans

    def run(
        self,
        request: Request,
        matches: Sequence[Match],
        block_ids: BlockTables,
        target: Target,
        opened: OpenRequest,
        event: object | None,
    ) -> Retrieval:
        """See `kvsplice.BlendEngine.retrieve`."""
        context = target.context
        tables = self._tables(context, block_ids)
        ordered = sorted(matches, key=lambda match: match.cur_start)
        if not ordered:
            self._release_rank(request, opened)
            return Retrieval(True, event, Reason.EMPTY)
        slots = min(len(table) * layout.block_size for table, layout in zip(tables, context.layouts, strict=True))
        fitting = sum(match.cur_end <= slots for match in ordered)
        if not fitting:
            return Retrieval(False, event, Reason.DEFERRED)
        if fitting < len(ordered):
            self._release_rank(request, opened)
            return Retrieval(False, event, Reason.PARTIAL)
        applied = opened.applied[target.instance_id]
        destinations = {match: _blocks(match, tables, context) for match in ordered}
        todo = [match for match in ordered if applied.get(match) != destinations[match]]
        if not todo:
            return Retrieval(True, event, Reason.APPLIED)
        outcome = self._splice(request, todo, tables, target, opened, event)
        if outcome.ran:
            applied.update({match: destinations[match] for match in todo})
        return outcome

    def _tables(self, context: PagedContext, block_ids: BlockTables) -> list[Sequence[int]]:
        """The block table of each group of layers."""
        tables = []
        for group, (layout, index) in enumerate(zip(context.layouts, context.block_table_of, strict=True)):
            if self.chunk_size % layout.block_size:
                raise ValueError(
                    f"layouts[{group}]: blocks of {layout.block_size} tokens do not divide chunks of {self.chunk_size}"
                )
            if not 0 <= index < len(block_ids):
                # Another group's table would put KV into blocks of somebody else.
                raise ValueError(f"block_ids: layouts[{group}] needs table {index}, only {len(block_ids)} are given")
            tables.append(block_ids[index])
        return tables

    def _splice(
        self,
        request: Request,
        todo: list[Match],
        tables: list[Sequence[int]],
        target: Target,
        opened: OpenRequest,
        event: object | None,
    ) -> Retrieval:
        context, fields = target.context, {"worker_id": request.worker_id}
        self._publish(request, events.RETRIEVE_START, num_chunks=len(todo), model_name=request.model_name, **fields)
        locks = Locks(self.store)
        scattering = False
        outcome, reason, result = None, Reason.FAILED, None
        try:
            keys = self._take(request, todo, opened, locks)
            context.wait(event)
            objects = None if keys is None else self.store.read(keys)
            if objects is None:
                reason = Reason.GONE
            else:
                shifted = sum(match.old_start != match.cur_start for match in todo)
                self._publish(
                    request,
                    events.SCATTER_START,
                    scattered_tokens=sum(match.cur_end - match.cur_start for match in todo),
                    n_prefix=len(todo) - shifted,
                    n_shifted=shifted,
                    dropped=0,
                    **fields,
                )
                scattering = True
                chunks = [_chunk(match, source) for match, source in zip(todo, objects, strict=True)]
                result = target.splicer.splice(chunks, tables, stream=context.stream)
                outcome = context.record()
                reason = Reason.SPLICED
                self._publish(request, events.RETRIEVE_SUBMITTED, instance_id=target.instance_id)
        except Exception:
            logger.exception("retrieve of request %s: the engine has to compute these tokens", request.request_id)
        success = reason is Reason.SPLICED

        def settle() -> None:
            locks.release_all()
            if scattering:
                self._publish(request, events.SCATTER_END, success=success, **fields)
            self._publish(request, events.RETRIEVE_END, success=success, **fields)

        # What was enqueued before a failure may still read the objects.
        _after(context, settle)
        self._release_rank(request, opened)
        if result is None or not success:
            return Retrieval(False, event, reason)
        return Retrieval(True, outcome, reason, result.tokens, result.nbytes, result.path)

    def _take(self, request: Request, todo: list[Match], opened: OpenRequest, locks: Locks) -> list[Key] | None:
        """Lock the rank's key of each match; None if one is gone."""
        missing = list(dict.fromkeys(m.chunk_hash for m in todo if m.chunk_hash not in opened.keys_of))
        keys_of = dict(opened.keys_of)
        if missing:
            keys_of.update(zip(missing, self.store.keys(request, missing), strict=True))
        keys = [_own(keys_of[match.chunk_hash], request) for match in todo]
        distinct = list(dict.fromkeys(keys))
        locks.absorb(opened.locks.take(distinct))
        unlocked = [key for key in distinct if not locks.holds([key])]
        if unlocked and not self._lock_again(request, unlocked, locks):
            return None
        return keys

    def _lock_again(self, request: Request, keys: list[Key], locks: Locks) -> bool:
        """Lock what an earlier call has used up, or what was never looked up, if it is in memory."""
        ticket = self.store.submit(keys, Policy.SPARSE, 1, request)
        try:
            fetched = self.store.poll(ticket)
        except Exception:
            self.orphans.add(ticket, keys, 1)
            raise
        if fetched is None:
            self.orphans.add(ticket, keys, 1)
            return False
        locks.hold(loaded_keys(keys, fetched))
        return bool(fetched.loaded.all())

    def _release_rank(self, request: Request, opened: OpenRequest) -> None:
        """Drop the rank's locks on chunks that were looked up and not asked for."""
        own = dict.fromkeys(_own(ranks, request) for ranks in opened.keys_of.values())
        opened.locks.take(own).release_all()

    def _publish(self, request: Request, name: str, **fields: Any) -> None:
        self.sink.publish(name, request.request_id, fields)


def _own(ranks: Sequence[Key], request: Request) -> Key:
    return ranks[0] if len(ranks) == 1 else ranks[request.worker_id or 0]


def _blocks(match: Match, tables: list[Sequence[int]], context: PagedContext) -> Hashable:
    """The blocks that a match is written into, group by group."""
    return tuple(
        tuple(table[match.cur_start // layout.block_size : -(-match.cur_end // layout.block_size)])
        for table, layout in zip(tables, context.layouts, strict=True)
    )


def _chunk(match: Match, source: object) -> Chunk:
    """A match of a whole chunk; what takes part of one will say here from which token on."""
    return Chunk(source, match.old_start, match.cur_start, count=match.cur_end - match.cur_start)


def _after(context: PagedContext, action: Callable[[], None]) -> None:
    try:
        context.after(action)
    except Exception:
        logger.exception("the stream takes no callback; not waiting for it")
        action()
