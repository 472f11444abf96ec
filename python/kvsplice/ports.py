"""What the engine needs of the software it runs in, as Protocols.

Each port has an implementation in `kvsplice.embedded`, for one process without other software.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Key = Hashable
"""Names one stored object: a chunk, as one rank holds it. Only the store looks inside."""

BlockTables = Sequence[Sequence[int]]
"""A request's block numbers, one table per group of layers that the inference engine keeps apart."""


class Policy(str, Enum):
    """Which of the keys that exist a prefetch loads."""

    PREFIX = "prefix"
    """Those before the first that is missing."""
    SEGMENTED_PREFIX = "segmented_prefix"
    """All, in the order of a prompt: what lies behind a gap is kept."""
    SPARSE = "sparse"
    """All."""


@dataclass(frozen=True)
class Request:
    """One call's request, as the inference engine names it.

    Attributes
    ----------
    request_id : str
    tokens : sequence of int
        The whole prompt, in any form that `kvsplice.Matcher.match` takes.
    model_name : str
    world_size : int
        Ranks that hold a part of each chunk; 1 where all ranks share one object (MLA).
    cache_salt : str
        Requests with different salts never see each other's KV.
    worker_id : int or None
        The rank that calls; None where the call is not one rank's.
    start, end : int
        Token range of a store, multiples of the chunk size; ``end`` None is the last full chunk's.
    """

    request_id: str
    tokens: Any
    model_name: str = ""
    world_size: int = 1
    cache_salt: str = ""
    worker_id: int | None = None
    start: int = 0
    end: int | None = None

    @cached_property
    def scope(self) -> bytes:
        """What must agree for one request to use another's KV, as bytes."""
        return json.dumps([self.model_name, self.world_size, self.cache_salt]).encode()


class Ticket(Protocol):
    """A prefetch in flight."""

    @property
    def loading(self) -> int:
        """How many of its keys are not in memory and have to be loaded."""
        ...


@dataclass(frozen=True)
class Fetched:
    """What a prefetch found, by position in the keys that were submitted.

    Attributes
    ----------
    loaded : bool array ``[keys]``
        In memory, each with the read locks that were asked for.
    present : bool array ``[keys]``
        Held by the store, loaded or not. What is present and not loaded was left out for want of memory, or by the
        policy, and holds no read lock.
    """

    loaded: NDArray[np.bool_]
    present: NDArray[np.bool_]


class ChunkStore(Protocol):
    """Stored KV. Every method returns at once, and may be called by several threads."""

    def keys(self, request: Request, chunk_hashes: Sequence[bytes]) -> Sequence[Sequence[Key]]:
        """The keys of each chunk, one per rank of the request's world."""
        ...

    def submit(self, keys: Sequence[Key], policy: Policy, locks: int, request: Request) -> Ticket:
        """Begin to load what of these distinct keys exists. Each that is loaded gets so many read locks."""
        ...

    def poll(self, ticket: Any) -> Fetched | None:
        """What was found; None while it loads. Not called again after an answer."""
        ...

    def read(self, keys: Sequence[Key]) -> Sequence[object] | None:
        """The objects of keys that the caller holds read locks on, or None if one is gone.

        Each is what `kvsplice.Chunk` takes as its source.
        """
        ...

    def release(self, keys: Sequence[Key], locks: int) -> None:
        """Drop so many read locks of each key."""
        ...


class PagedContext(Protocol):
    """The paged cache of one instance of the inference engine."""

    @property
    def layouts(self) -> Sequence[Any]:
        """A `kvsplice.PagedLayout` per group of layers that is written alike."""
        ...

    @property
    def block_table_of(self) -> Sequence[int]:
        """Which of a request's block tables each of these groups uses."""
        ...

    @property
    def stream(self) -> object | None:
        """The stream that splices run on; None in host memory."""
        ...

    @property
    def model_name(self) -> str:
        """Whose KV it is."""
        ...

    @property
    def world_size(self) -> int:
        """Of how many ranks this is one."""
        ...

    def wait(self, event: object | None) -> None:
        """Let the stream wait for the caller's event."""
        ...

    def record(self) -> object | None:
        """An event behind all that is on the stream, to be handed to the caller."""
        ...

    def after(self, action: Callable[[], None]) -> None:
        """Call this when all that is on the stream now is done; at once in host memory."""
        ...


class Contexts(Protocol):
    """The instances that registered a paged cache."""

    def get(self, instance_id: int) -> PagedContext | None:
        """An instance's paged cache, if it has one."""
        ...

    def covers(self, model_name: str, world_size: int) -> bool:
        """Whether some instance of this model and world has one."""
        ...

    def describe(self, model_name: str, world_size: int) -> Sequence[tuple[str, Sequence[int]]]:
        """The dtype and shape of a stored object of each group of layers, for the record of a lookup."""
        ...


@dataclass(frozen=True)
class Stored:
    """How a store went.

    Attributes
    ----------
    result : object
        For the caller, who gets it unchanged.
    kept : sequence of bool, or None
        For each chunk of the range, whether storage holds it now; None if it holds all.
    after : callable, or None
        Calls what it is given when storage holds them; None where `PagedContext.after` of the instance does.
    """

    result: object
    kept: Sequence[bool] | None = None
    after: Callable[[Callable[[], None]], None] | None = None


class Transfer(Protocol):
    """Copies KV out of paged caches into the store."""

    def store(self, request: Request, instance_id: int, block_ids: BlockTables, event: object | None) -> Stored:
        """Store ``[request.start, request.end)``. On a GPU it may be under way when this returns."""
        ...


class Session(Protocol):
    """What is known of a request over its calls."""

    lookup: Request | None

    def set_tokens(self, tokens: Any) -> None:
        """The prompt, whole."""
        ...

    def hashes(self, start: int, end: int | None = None) -> Sequence[bytes]:
        """The chained hashes of the full chunks in a token range."""
        ...


class Sessions(Protocol):
    """Sessions by request id."""

    def open(self, request_id: str) -> Session:
        """The session of this id, made if there is none."""
        ...

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Call the listener with the id of each session that ends."""
        ...

    def adopt(self, request: Request, keys: Sequence[Key], locks: int) -> bool:
        """Offer the read locks on a prompt's prefix: so many on each key, in order; no key where there is no prefix.

        True if the host takes them, to release them when its own retrieve has read the prefix or the session ends. The
        engine keeps them for its retrieve otherwise.
        """
        ...


class TokenHasher(Protocol):
    """Turns tokens into storage keys' hashes."""

    def chunk_hashes(self, tokens: Any) -> Sequence[bytes]:
        """The chained hash of each full chunk."""
        ...


class EventSink(Protocol):
    """Takes what happens. Must not raise."""

    def publish(self, name: str, request_id: str | None, fields: Mapping[str, Any]) -> None:
        """One event; see `kvsplice.events`."""
        ...

    def wants(self, name: str) -> bool:
        """Whether anybody listens to this name, for records that are costly to build."""
        ...


@dataclass(frozen=True)
class FleetMatch:
    """A chunk that some server of the fleet stored, and where its text stands in the prompt."""

    chunk_hash: bytes
    old_start: int
    cur_start: int


class FleetDirectory(Protocol):
    """Knows what all servers stored. Every method returns at once and does not raise."""

    @property
    def budget_s(self) -> float:
        """How long a lookup waits for an answer."""
        ...

    def submit(self, request: Request) -> object | None:
        """Ask; None if it cannot be asked."""
        ...

    def poll(self, ticket: Any) -> Sequence[FleetMatch] | None:
        """The answer, empty if it failed; None while it is awaited."""
        ...

    def forget(self, ticket: Any) -> None:
        """Drop the answer, whenever it comes."""
        ...

    def publish(self, request: Request, tokens: Any, chunk_hashes: Sequence[bytes], start: int) -> None:
        """Tell it what was stored: chunks of these tokens, the first at position ``start``."""
        ...

    def stats(self) -> Any:
        """Counters since it was made, as a NamedTuple of integers."""
        ...

    def close(self) -> None:
        """Stop. Safe to call twice."""
        ...
