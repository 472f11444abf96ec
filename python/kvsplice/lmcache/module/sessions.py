"""LMCache's sessions, as the engine sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.hashing import chained_chunk_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvsplice.ports import Key

__all__ = ["LMCacheSession", "LMCacheSessions", "ServerHasher"]


class ServerHasher:
    """The `kvsplice.ports.TokenHasher` of a server: ours where both agree, since it is faster.

    Parameters
    ----------
    hasher : lmcache.v1.multiprocess.token_hasher.TokenHasher
    """

    def __init__(self, hasher: Any) -> None:
        self._theirs = hasher
        self.chunk_size: int = hasher.chunk_size
        probe = np.arange(2 * self.chunk_size, dtype=np.uint32)
        # Algorithm and seed are the server's settings.
        self._agree = chained_chunk_hashes(probe, self.chunk_size) == hasher.compute_chunk_hashes(probe.tolist())

    def chunk_hashes(self, tokens: Any) -> list[bytes]:
        """The chained hash of each full chunk."""
        if self._agree:
            return chained_chunk_hashes(tokens, self.chunk_size)
        hashes: list[bytes] = self._theirs.compute_chunk_hashes([int(token) for token in tokens])
        return hashes

    def to_bytes(self, chunk_hash: Any) -> bytes:
        """A hash as the sessions keep it, as a storage key has it."""
        key: bytes = self._theirs.hash_to_bytes(chunk_hash)
        return key


class LMCacheSession:
    """The `kvsplice.ports.Session` of one request."""

    def __init__(self, session: Any, hasher: ServerHasher, windows: Callable[[Any], Sequence[int]]) -> None:
        self._session = session
        self._hasher = hasher
        self._windows = windows
        self._tokens: Any = None
        self._lookup: Any = None

    @property
    def lookup(self) -> Any:
        """The request of the last lookup through this object."""
        return self._lookup

    @lookup.setter
    def lookup(self, request: Any) -> None:
        self._lookup = request
        self._session.set_tokens(list(request.key.token_ids))
        self._session.begin_lookup(request.key, tuple(self._windows(request)))

    def set_tokens(self, tokens: Any) -> None:
        """The prompt, whole."""
        self._tokens = tokens

    def hashes(self, start: int, end: int | None = None) -> Sequence[bytes]:
        """The chained hashes of the full chunks in a token range."""
        if self._tokens is None:
            return [self._hasher.to_bytes(each) for each in self._session.get_hashes(start, end)]
        size = self._hasher.chunk_size
        hashes = self._hasher.chunk_hashes(self._tokens)
        return hashes[start // size : None if end is None else end // size]


class LMCacheSessions:
    """The `kvsplice.ports.Sessions` of a server.

    Parameters
    ----------
    context : lmcache.v1.multiprocess.engine_context.MPCacheServerContext
    """

    def __init__(self, context: Any) -> None:
        self._manager = context.session_manager
        self._descriptions = context.layout_desc_registry
        self._hasher = ServerHasher(context.token_hasher)
        self._listeners: list[Callable[[Any], None]] = []

    def open(self, request_id: str) -> LMCacheSession:
        """The session of this id, made if there is none."""
        return LMCacheSession(self._manager.get_or_create(request_id), self._hasher, self._windows)

    def _windows(self, request: Any) -> Sequence[int]:
        windows: Sequence[int] = self._descriptions.find_attn_desc(
            request.model_name, request.world_size
        ).num_chunks_in_sw
        return windows

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Call the listener with the id of each session that ends."""

        def ended(session: Any) -> None:
            listener(session.request_id)

        self._listeners.append(ended)
        self._manager.destroy_listeners.append(ended)

    def adopt(self, request: Any, keys: Sequence[Key], locks: int) -> bool:
        """Yes: LMCache's own retrieve reads the prefix, and it or the freeing of lookup locks releases them."""
        del locks
        session = self._manager.get_or_create(request.request_id)
        session.record_prefetch_result(len(keys) // request.world_size, (0,))
        return True

    def close(self) -> None:
        """Listen no more."""
        for listener in self._listeners:
            if listener in self._manager.destroy_listeners:
                self._manager.destroy_listeners.remove(listener)
        self._listeners.clear()
