"""The unified lookup of one request: a job that is polled until every leg has answered.

Its states, who moves it on, and who owes the release of which read locks: docs/engine.md. The code reads like that
table.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice import events
from kvsplice.locks import Locks, loaded_keys
from kvsplice.matcher import Match, Matcher, Matches, non_overlapping_after_prefix
from kvsplice.ports import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvsplice.locks import Orphans
    from kvsplice.ports import (
        ChunkStore,
        Contexts,
        EventSink,
        Fetched,
        FleetDirectory,
        Key,
        Request,
        Sessions,
        Ticket,
    )

__all__ = ["LookupJob", "LookupParts", "LookupResult", "State"]

logger = logging.getLogger(__name__)

Span = tuple[Match, ...]

_NO_MATCHES = Matches.from_rows(())

_POSITIONS = 1 << 31
"""No text is longer: what the fleet claims beyond is not true."""


@dataclass(frozen=True)
class LookupResult:
    """What a request can reuse, all of it in memory and locked for reading.

    Attributes
    ----------
    prefix_tokens : int
        Tokens of the prompt's beginning whose KV is stored as it is.
    matches : tuple of Match
        Found elsewhere, in order of ``cur_start``; they overlap neither the prefix, nor ``retained``, nor each other.
    retained : tuple of Match
        With a segmented prefix: the prompt's own chunks behind a gap, at their own positions.
    prefix : tuple of Match
        The chunks of the prefix, at their own positions: for a retrieve that writes the prefix too.
    """

    prefix_tokens: int
    matches: Span = ()
    retained: Span = ()
    prefix: Span = ()

    @property
    def reused_tokens(self) -> int:
        """Tokens of the prompt that all of these cover."""
        return self.prefix_tokens + _length(self.matches) + _length(self.retained)


class State(Enum):
    """Where a job stands. Each waits for what it is named after."""

    NEW = "not started"
    PREFIX = "prefix leg"
    FLEET = "fleet leg"
    SPARSE = "sparse leg"
    DONE = "done"
    ABANDONED = "abandoned"


@dataclass(frozen=True)
class LookupParts:
    """What jobs work with; ``clock`` is in seconds."""

    chunk_size: int
    matcher: Matcher
    store: ChunkStore
    sessions: Sessions
    contexts: Contexts
    sink: EventSink
    orphans: Orphans
    fleet: FleetDirectory | None
    segmented: bool
    strike_threshold: int
    clock: Callable[[], float]
    drain: Callable[[], None]


@dataclass
class _Leg:
    """A prefetch in flight."""

    ticket: Ticket
    keys: list[Key]


@dataclass
class _Sparse:
    """The candidates of the sparse leg, and the keys of each, which are submitted in this order."""

    candidates: Matches
    keys_of: dict[bytes, Sequence[Key]] = field(default_factory=dict)


class LookupJob:
    """One lookup. Not thread-safe but for `abandon`; `advance` lets a second caller go away without an answer."""

    def __init__(self, parts: LookupParts, request: Request, tokens: NDArray[np.uint32], readers: int) -> None:
        self.request = request
        self.readers = readers
        self.state = State.NEW
        self.locks = Locks(parts.store)
        # Apart, since a key may be part of the prefix and of a match.
        self._sparse_locks = Locks(parts.store)
        self.keys_of: dict[bytes, Sequence[Key]] = {}
        self.touched = parts.clock()
        self._parts = parts
        self._tokens = tokens
        self._mutex = threading.Lock()
        self._hashes: Sequence[bytes] = ()
        self._leg: _Leg | None = None
        self._prefix_chunks = 0
        self._retained: list[int] = []
        self._matches = _NO_MATCHES
        self._fleet_ticket: object | None = None
        self._deadline = 0.0
        self._sparse = _Sparse(self._matches)
        self._result: LookupResult | None = None
        self._no_context = False
        self._open: list[tuple[str, dict[str, Any]]] = []

    def asks_the_same(self, request: Request) -> bool:
        """Whether a call of this request polls the job, and does not begin another."""
        return request.scope == self.request.scope and _same_tokens(request.tokens, self.request.tokens)

    # -- the two ways in ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Submit the prefix leg, and match or ask the fleet."""
        with self._mutex:
            if self.state is not State.NEW:
                return
            self._publish(events.REQUEST_START)
            fields = {"num_tokens": len(self._tokens)}
            self._begin(events.LOOKUP_START, events.LOOKUP_END, fields, {})
            self._submit_prefix()
            if self._parts.fleet is None:
                self._match()
            else:
                self._ask_fleet(self._parts.fleet)
            self.state = State.PREFIX

    def advance(self) -> LookupResult | None:
        """Go as far as can be gone without waiting; the result, once."""
        if not self._mutex.acquire(blocking=False):
            return None
        try:
            self.touched = self._parts.clock()
            if self.state is State.PREFIX and self._poll_prefix():
                self.state = State.FLEET
            if self.state is State.FLEET and self._poll_fleet():
                self._submit_sparse()
                self.state = State.SPARSE
            if self.state is State.SPARSE and self._poll_sparse():
                self.state = State.DONE
                return self._result
            return None
        finally:
            self._mutex.release()

    def abandon(self) -> bool:
        """Release what is held, now or once it is loaded. False if the job had not begun, or had ended."""
        with self._mutex:
            before, self.state = self.state, State.ABANDONED
            if before in {State.NEW, State.ABANDONED}:
                return False
            if before is State.DONE:
                self.state = State.DONE
                return False
            if self._leg is not None:
                self._parts.orphans.add(self._leg.ticket, self._leg.keys, self.readers)
                self._leg = None
            self._forget_fleet()
            self.locks.release_all()
            self._sparse_locks.release_all()
            self._close_spans()
            return True

    # -- prefix leg ---------------------------------------------------------------------------------------------------

    def _submit_prefix(self) -> None:
        parts, request = self._parts, self.request
        self._begin(events.PREFIX_LOOKUP_START, events.PREFIX_LOOKUP_END, {}, {"prefix_chunks": 0})
        try:
            if not parts.contexts.covers(request.model_name, request.world_size):
                self._no_context = True
                logger.warning(
                    "no paged cache of model %r, world size %d: nothing can be reused",
                    request.model_name,
                    request.world_size,
                )
                return
            session = parts.sessions.open(request.request_id)
            session.set_tokens(self._tokens)
            session.lookup = request
            self._hashes = session.hashes(0)
            if not len(self._hashes):
                return
            if parts.sink.wants(events.LOOKUP_HASHES):
                self._publish(events.LOOKUP_HASHES, **self._hash_record())
            keys = [key for ranks in parts.store.keys(request, self._hashes) for key in ranks]
            policy = Policy.SEGMENTED_PREFIX if parts.segmented else Policy.PREFIX
            self._leg = _Leg(parts.store.submit(keys, policy, self.readers, request), keys)
        except Exception:
            logger.exception("prefix leg of request %s: taken as no hit", request.request_id)

    def _hash_record(self) -> dict[str, Any]:
        request = self.request
        layouts = self._parts.contexts.describe(request.model_name, request.world_size)
        return {
            "request_id": request.request_id,
            "chunk_hashes": list(self._hashes),
            "model_name": request.model_name,
            "chunk_size": self._parts.chunk_size,
            "seq_len": len(self._tokens),
            "dtypes": [dtype for dtype, _ in layouts],
            "shapes": [list(shape) for _, shape in layouts],
        }

    def _poll_prefix(self) -> bool:
        """True once the prefix leg has answered."""
        if self._leg is not None:
            answered, fetched = self._poll(self._leg, "prefix")
            if not answered:
                return False
            keys, self._leg = self._leg.keys, None
            if fetched is not None:
                self._take_prefix(keys, fetched)
        self._end(events.PREFIX_LOOKUP_END, prefix_chunks=self._prefix_chunks)
        return True

    def _take_prefix(self, keys: list[Key], fetched: Fetched) -> None:
        loaded = loaded_keys(keys, fetched)
        if not loaded:
            return
        self.locks.hold(loaded, self.readers)
        ranks = len(keys) // len(self._hashes)
        whole = fetched.loaded.reshape(-1, ranks).all(axis=1)
        missing = np.flatnonzero(~whole)
        self._prefix_chunks = int(missing[0]) if len(missing) else len(self._hashes)
        self._retained = np.flatnonzero(whole).tolist() if self._parts.segmented else list(range(self._prefix_chunks))
        for chunk in self._retained:
            self.keys_of[self._hashes[chunk]] = keys[chunk * ranks : (chunk + 1) * ranks]
        kept = {key for own in self.keys_of.values() for key in own}
        self.locks.release([key for key in loaded if key not in kept])

    # -- match or fleet leg -------------------------------------------------------------------------------------------

    def _match(self) -> None:
        parts = self._parts
        self._begin(events.FINGERPRINT_MATCH_START, events.FINGERPRINT_MATCH_END, {}, {"matches": 0})
        try:
            parts.drain()
            self._matches = parts.matcher.match(self._tokens, scope=self.request.scope)
        except Exception:
            logger.exception("matching request %s: taken as no match", self.request.request_id)
        self._end(events.FINGERPRINT_MATCH_END, matches=len(self._matches))

    def _ask_fleet(self, fleet: FleetDirectory) -> None:
        if len(self._tokens) < self._parts.chunk_size:
            return
        self._fleet_ticket = fleet.submit(self.request)
        if self._fleet_ticket is not None:
            self._deadline = self._parts.clock() + fleet.budget_s
            self._begin(events.FLEET_MATCH_START, events.FLEET_MATCH_END, {}, {"matches": 0, "timed_out": False})

    def _poll_fleet(self) -> bool:
        """True once there is nothing to wait for: an answer, none asked, or the deadline."""
        fleet, ticket = self._parts.fleet, self._fleet_ticket
        if fleet is None or ticket is None:
            return True
        found = fleet.poll(ticket)
        if found is None:
            if self._parts.clock() < self._deadline:
                return False
            logger.warning("request %s: the fleet did not answer in %.3f s", self.request.request_id, fleet.budget_s)
            self._forget_fleet()
            self._end(events.FLEET_MATCH_END, matches=0, timed_out=True)
            return True
        self._fleet_ticket = None
        size, last = self._parts.chunk_size, len(self._tokens) - self._parts.chunk_size
        self._matches = Matches.from_rows(
            Match(hit.old_start, hit.old_start + size, hit.cur_start, hit.cur_start + size, hit.chunk_hash)
            for hit in sorted(found, key=lambda hit: hit.cur_start)
            if 0 <= hit.old_start < _POSITIONS and 0 <= hit.cur_start <= last
        )
        self._end(events.FLEET_MATCH_END, matches=len(self._matches), timed_out=False)
        return True

    def _forget_fleet(self) -> None:
        if self._parts.fleet is not None and self._fleet_ticket is not None:
            self._parts.fleet.forget(self._fleet_ticket)
            self._fleet_ticket = None

    # -- sparse leg ---------------------------------------------------------------------------------------------------

    def _candidates(self) -> Matches:
        """Matches outside of what the prefix leg brought."""
        matches, size = self._matches, self._parts.chunk_size
        if not matches:
            return matches
        wanted = matches.cur_start >= self._prefix_chunks * size
        if self._parts.segmented:
            # A match covers part of two of the prompt's chunks at most, and a chunk is written as a whole or not.
            for covered in (matches.cur_start, matches.cur_end - 1):
                wanted &= ~np.isin(covered // size, self._retained)
        return matches.take(np.flatnonzero(wanted))

    def _submit_sparse(self) -> None:
        parts, request = self._parts, self.request
        if self._no_context:
            return
        candidates = self._candidates()
        if not candidates:
            return
        sparse = _Sparse(candidates)
        try:
            hashes = list(dict.fromkeys(candidates.chunk_hashes))
            sparse.keys_of = dict(zip(hashes, parts.store.keys(request, hashes), strict=True))
            keys = [key for ranks in sparse.keys_of.values() for key in ranks]
            ticket = parts.store.submit(keys, Policy.SPARSE, self.readers, request)
        except Exception:
            logger.exception("sparse leg of request %s: taken as no hit", request.request_id)
            return
        self._sparse, self._leg = sparse, _Leg(ticket, keys)
        if ticket.loading:
            self._begin(
                events.SPARSE_PREFETCH_START,
                events.SPARSE_PREFETCH_END,
                {
                    "n_chunks": len(candidates),
                    "world_size": request.world_size,
                    "n_keys": len(keys),
                    "l2_keys": ticket.loading,
                },
                {"found_keys": 0, "l2_keys": ticket.loading},
            )

    def _poll_sparse(self) -> bool:
        """True once the sparse leg has answered, and the result stands."""
        found: list[Match] = []
        if self._leg is not None:
            answered, fetched = self._poll(self._leg, "sparse")
            if not answered:
                return False
            leg, self._leg = self._leg, None
            self._end(
                events.SPARSE_PREFETCH_END, found_keys=0 if fetched is None else int(np.count_nonzero(fetched.loaded))
            )
            if fetched is not None:
                found = self._classify(leg.keys, fetched)
        self._finish(found)
        return True

    def _classify(self, keys: list[Key], fetched: Fetched) -> list[Match]:
        """Keep what every rank has, strike what storage lost, release the rest."""
        sparse, locks = self._sparse, self._sparse_locks
        landed = loaded_keys(keys, fetched)
        locks.hold(landed, self.readers)
        by_chunk = (len(sparse.keys_of), -1)
        loaded = fetched.loaded.reshape(by_chunk).all(axis=1)
        held = (fetched.loaded | fetched.present).reshape(by_chunk).all(axis=1)
        hashes = list(sparse.keys_of)
        whole = {hashes[chunk] for chunk in np.flatnonzero(loaded).tolist()}
        stale = [hashes[chunk] for chunk in np.flatnonzero(~held).tolist()]
        try:
            self._keep_score(whole, stale)
        except Exception:
            logger.exception("request %s: hits and misses were not counted", self.request.request_id)
        # Deduplicated after the prefetch, so that a chunk that cannot be fetched does not beat one that can.
        usable = [index for index, chunk_hash in enumerate(sparse.candidates.chunk_hashes) if chunk_hash in whole]
        found = list(non_overlapping_after_prefix(sparse.candidates.take(usable), 0))
        kept = {match.chunk_hash: sparse.keys_of[match.chunk_hash] for match in found}
        used = {key for ranks in kept.values() for key in ranks}
        locks.release([key for key in landed if key not in used])
        self.locks.absorb(locks)
        self.keys_of.update(kept)
        return found

    def _keep_score(self, whole: set[bytes], stale: list[bytes]) -> None:
        matcher, scope = self._parts.matcher, self.request.scope
        matcher.confirm(list(whole), scope=scope)
        if stale:
            evicted = matcher.strike(stale, self._parts.strike_threshold, scope=scope)
            self._publish(events.CHUNKS_EVICTED, num_chunks=len(evicted), stale_chunks=len(stale))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, found: list[Match]) -> None:
        size = self._parts.chunk_size

        def own(chunks: Sequence[int]) -> Span:
            return tuple(
                Match(chunk * size, (chunk + 1) * size, chunk * size, (chunk + 1) * size, self._hashes[chunk])
                for chunk in chunks
            )

        self._result = LookupResult(
            self._prefix_chunks * size,
            tuple(found),
            own([chunk for chunk in self._retained if chunk >= self._prefix_chunks]),
            own(range(self._prefix_chunks)),
        )
        self._end(events.LOOKUP_END, **self._accounts(abandoned=False))

    def _accounts(self, *, abandoned: bool) -> dict[str, Any]:
        result = self._result or LookupResult(0)
        tokens, size = len(self._tokens), self._parts.chunk_size
        return {
            "num_tokens": tokens,
            "fingerprint_hits": len(result.matches),
            "prefix_hits": len(result.prefix),
            "prefix_chunks": len(result.prefix),
            "storage_hits": len(result.matches),
            "stale_chunks": len(self._sparse.candidates) - len(result.matches),
            "no_gpu_context": self._no_context,
            "prefix_hit_tokens": result.prefix_tokens,
            "segmented_prefix_hit_tokens": _length(result.retained),
            "non_prefix_hit_tokens": _length(result.matches),
            "hit_tokens": result.reused_tokens,
            "requested_tokens": tokens // size * size,
            "abandoned": abandoned,
        }

    def _poll(self, leg: _Leg, name: str) -> tuple[bool, Fetched | None]:
        """Whether a leg has answered, and what; a leg that fails is no hit."""
        try:
            fetched = self._parts.store.poll(leg.ticket)
        except Exception:
            logger.exception("%s leg of request %s: taken as no hit", name, self.request.request_id)
            self._parts.orphans.add(leg.ticket, leg.keys, self.readers)
            return True, None
        return fetched is not None, fetched

    # -- events -------------------------------------------------------------------------------------------------------

    def _publish(self, name: str, **fields: Any) -> None:
        self._parts.sink.publish(name, self.request.request_id, fields)

    def _begin(self, start: str, end: str, fields: dict[str, Any], if_abandoned: dict[str, Any]) -> None:
        self._publish(start, **fields)
        self._open.append((end, if_abandoned))

    def _end(self, name: str, **fields: Any) -> None:
        for index, (end, defaults) in enumerate(self._open):
            if end == name:
                del self._open[index]
                self._publish(name, **{**defaults, **fields})
                return

    def _close_spans(self) -> None:
        for name, fields in reversed(self._open):
            self._publish(name, **(self._accounts(abandoned=True) if name == events.LOOKUP_END else fields))
        self._open.clear()


def _length(matches: Span) -> int:
    """Tokens of matches that do not overlap."""
    return sum(match.cur_end - match.cur_start for match in matches)


def _same_tokens(one: Any, other: Any) -> bool:
    """Whether two prompts are equal, cheaply where they are one object."""
    if one is other:
        return True
    if len(one) != len(other):
        return False
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return bool(one == other)
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))
