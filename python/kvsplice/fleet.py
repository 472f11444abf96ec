"""A directory of what all servers of a fleet stored, asked over HTTP: LMCache's coordinator, in both of its forms.

``directory`` is that of LMCache 0.5.6: ``POST /directory/blend-lookup`` asks, and what was stored is told as cache
events to ``POST /events``. ``blend`` is that of LMCache 0.4.7 to 0.5.3: ``POST /blend/match`` and
``POST /blend/fingerprints``. Tokens are sent as base64 of little-endian 32-bit integers, chunk hashes as hex.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvsplice import _core
from kvsplice.ports import FleetMatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvsplice.ports import Request

__all__ = ["FleetStats", "HttpFleetDirectory"]

logger = logging.getLogger(__name__)


class FleetStats(NamedTuple):
    """What became of the calls so far."""

    asked: int
    refused: int
    """Not asked: too many were under way."""
    answered: int
    failed: int
    told: int
    """Stored ranges that the directory took."""
    lost: int
    """Stored ranges that it did not: it failed, or too many were waiting."""
    waiting: int
    """Stored ranges that are not sent yet."""


@dataclass(frozen=True)
class _Range:
    """A stored range that is to be told."""

    request: Request
    tokens: Any
    chunk_hashes: Sequence[bytes]
    start: int


class HttpFleetDirectory:
    """The `kvsplice.ports.FleetDirectory` of an LMCache coordinator. Needs httpx: ``pip install 'kvsplice[fleet]'``.

    A lookup's question goes out on one of a few threads, at once if one is free; what was stored goes out on another
    thread, in order. Neither is ever waited for by the caller, and whatever fails is an empty answer and a line in the
    log.

    Parameters
    ----------
    url : str
        Of the coordinator, ``http://host:port``.
    chunk_size : int
        Tokens per chunk, the coordinator's too.
    wire : str
        ``directory`` or ``blend``.
    budget_s : float
        How long a lookup waits, and each of the steps of one exchange.
    concurrency : int
        Questions on their way at once.
    queue : int
        Questions that may wait for their turn, and stored ranges likewise: one more question is not asked, and one more
        range pushes the oldest out.
    report : bool
        Whether to tell what was stored; not where the server that this is part of does that itself.
    instance_id : str, optional
        Under which name, for ``directory``; drawn at random if left out.
    """

    def __init__(
        self,
        url: str,
        chunk_size: int,
        *,
        wire: str = "directory",
        budget_s: float = 1.0,
        concurrency: int = 8,
        queue: int = 1024,
        report: bool = True,
        instance_id: str | None = None,
    ) -> None:
        import httpx

        if wire not in _WIRES:
            raise ValueError(f"wire: {wire!r} is none of {', '.join(_WIRES)}")
        for name, value in (("chunk_size", chunk_size), ("concurrency", concurrency), ("queue", queue)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not positive")
        if not budget_s > 0:
            raise ValueError(f"budget_s: {budget_s} is not positive")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} is not one of http:// or https://")
        self._budget_s = budget_s
        self._report = report
        self._limit = concurrency + queue
        self._wire = _WIRES[wire](chunk_size, instance_id or f"kvsplice-{uuid.uuid4()}")
        self._client = httpx.Client(
            base_url=url, timeout=budget_s, limits=httpx.Limits(max_connections=concurrency + 1)
        )
        self._mutex = threading.Lock()
        self._counts = dict.fromkeys(FleetStats._fields, 0)
        self._asking = 0
        self._ranges: deque[_Range] = deque()
        self._queue = queue
        self._wake = threading.Event()
        self._stopping = False
        self._deadline = float("inf")
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="kvsplice-fleet-ask")
        self._thread = threading.Thread(target=self._tell, name="kvsplice-fleet-tell", daemon=True)
        self._thread.start()

    @property
    def budget_s(self) -> float:
        """See `kvsplice.ports.FleetDirectory`."""
        return self._budget_s

    # -- asking -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Future[list[FleetMatch]] | None:
        """See `kvsplice.ports.FleetDirectory`; None if too many are under way, or it is closed."""
        with self._mutex:
            refused = self._stopping or self._asking >= self._limit
            self._counts["refused" if refused else "asked"] += 1
            if refused:
                return None
            self._asking += 1
            future = self._pool.submit(self._ask, request)
        future.add_done_callback(self._count_out)
        return future

    def poll(self, ticket: Future[list[FleetMatch]]) -> list[FleetMatch] | None:
        """See `kvsplice.ports.FleetDirectory`."""
        if not ticket.done():
            return None
        return [] if ticket.cancelled() else ticket.result()

    def forget(self, ticket: Future[list[FleetMatch]]) -> None:
        """See `kvsplice.ports.FleetDirectory`. A question that has not gone out does not go out."""
        ticket.cancel()

    def _ask(self, request: Request) -> list[FleetMatch]:
        try:
            path, body = self._wire.question(request)
            found = self._wire.answer(self._exchange(path, body))
        except Exception as error:
            self._count("failed")
            logger.warning("the fleet directory did not answer for request %s: %r", request.request_id, error)
            return []
        self._count("answered")
        return found

    def _count_out(self, _: Future[list[FleetMatch]]) -> None:
        with self._mutex:
            self._asking -= 1

    # -- telling ------------------------------------------------------------------------------------------------------

    def publish(self, request: Request, tokens: Any, chunk_hashes: Sequence[bytes], start: int) -> None:
        """See `kvsplice.ports.FleetDirectory`."""
        if not self._report:
            return
        with self._mutex:
            if self._stopping or len(self._ranges) >= self._queue:
                self._counts["lost"] += 1
                if self._stopping:
                    return
                self._ranges.popleft()
            self._ranges.append(_Range(request, tokens, tuple(chunk_hashes), start))
        self._wake.set()

    def _tell(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            # Asked before the queue is emptied: nothing is queued any more once it holds.
            stopping = self._stopping
            while stored := self._next():
                try:
                    path, body = self._wire.news(stored)
                    self._exchange(path, body)
                except Exception as error:
                    self._count("lost")
                    logger.warning("the fleet directory did not take %d chunks: %r", len(stored.chunk_hashes), error)
                else:
                    self._count("told")
            if stopping:
                return

    def _next(self) -> _Range | None:
        with self._mutex:
            if time.monotonic() > self._deadline:
                self._counts["lost"] += len(self._ranges)
                self._ranges.clear()
            return self._ranges.popleft() if self._ranges else None

    # -- both ---------------------------------------------------------------------------------------------------------

    def _exchange(self, path: str, body: dict[str, Any]) -> Any:
        content = json.dumps(body, separators=(",", ":")).encode()
        response = self._client.post(path, content=content, headers={"content-type": "application/json"})
        response.raise_for_status()
        return response.json()

    def _count(self, name: str) -> None:
        with self._mutex:
            self._counts[name] += 1

    def stats(self) -> FleetStats:
        """What became of the calls so far."""
        with self._mutex:
            return FleetStats(**self._counts | {"waiting": len(self._ranges)})

    def close(self) -> None:
        """Send what is waiting, begun within ``budget_s``; let what is under way end, and stop. Safe to call twice."""
        with self._mutex:
            if self._stopping:
                return
            self._stopping = True
            self._deadline = time.monotonic() + self._budget_s
        self._wake.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._thread.join()
        self._client.close()


class _Directory:
    """LMCache 0.5.6: scoped by model, world size and salt; told of storage events."""

    def __init__(self, chunk_size: int, instance_id: str) -> None:
        self._chunk_size = chunk_size
        self._instance_id = instance_id
        # A later start of the same instance fences off what an earlier one told.
        self._incarnation = time.time_ns() // 1_000_000
        self._sequence = 0

    def question(self, request: Request) -> tuple[str, dict[str, Any]]:
        body = {
            "tokens_b64": _packed(request.tokens),
            "model_name": request.model_name,
            "world_size": request.world_size,
            "cache_salt": request.cache_salt,
        }
        return "/directory/blend-lookup", body

    def answer(self, body: Any) -> list[FleetMatch]:
        return _matches(body, "chunk_hash")

    def news(self, stored: _Range) -> tuple[str, dict[str, Any]]:
        request, size = stored.request, self._chunk_size
        tokens = np.asarray(stored.tokens).tolist()
        self._sequence += 1
        entries = [
            {
                "key": {
                    "chunk_hash_hex": chunk_hash.hex(),
                    "model_name": request.model_name,
                    # World size, rank, world size on the host, rank there: a byte each.
                    "kv_rank": request.world_size << 24 | request.world_size << 8,
                    "cache_salt": request.cache_salt,
                },
                "token_ids": tokens[index * size : (index + 1) * size],
                "token_offset": stored.start + index * size,
            }
            for index, chunk_hash in enumerate(stored.chunk_hashes)
        ]
        batch = {
            "instance_id": self._instance_id,
            "incarnation": self._incarnation,
            "seq": self._sequence,
            "event_type": "store",
            "tier": "l1",
            "backend": "dram",
            "entries": entries,
            "ts": time.time(),
        }
        return "/events", {"batches": [batch]}


class _Blend:
    """LMCache 0.4.7 to 0.5.3: scoped by the model only, so that a salt has to become part of the model's name."""

    def __init__(self, chunk_size: int, instance_id: str) -> None:
        pass

    @staticmethod
    def _scope(request: Request) -> str:
        if not request.cache_salt:
            return request.model_name
        return json.dumps([request.model_name, request.cache_salt])

    def question(self, request: Request) -> tuple[str, dict[str, Any]]:
        return "/blend/match", {"model_scope": self._scope(request), "tokens_b64": _packed(request.tokens)}

    def answer(self, body: Any) -> list[FleetMatch]:
        return _matches(body, "object_key")

    def news(self, stored: _Range) -> tuple[str, dict[str, Any]]:
        entry = {
            "model_scope": self._scope(stored.request),
            "tokens": np.asarray(stored.tokens).tolist(),
            "object_keys": [chunk_hash.hex() for chunk_hash in stored.chunk_hashes],
            "old_st_base": stored.start,
        }
        return "/blend/fingerprints", {"ranges": [entry]}


_WIRES: dict[str, type[_Directory | _Blend]] = {"directory": _Directory, "blend": _Blend}


def _packed(tokens: Any) -> str:
    return base64.b64encode(np.asarray(_core.token_array(tokens), "<u4").tobytes()).decode("ascii")


def _matches(body: Any, name: str) -> list[FleetMatch]:
    found = [FleetMatch(bytes.fromhex(hit[name]), hit["old_st"], hit["cur_st"]) for hit in body["matches"]]
    if not all(type(position) is int for match in found for position in (match.old_start, match.cur_start)):
        raise TypeError("a position is no integer")
    return found
