"""Requests over their calls, and the hashes of their chunks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice import _core
from kvsplice.hashing import chained_chunk_hashes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvsplice.ports import Key, Request, TokenHasher

__all__ = ["EmbeddedSession", "EmbeddedSessions", "Hasher"]


class Hasher:
    """Chained BLAKE3 hashes, the same as LMCache's."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def chunk_hashes(self, tokens: Any) -> list[bytes]:
        """The hash of each full chunk."""
        return chained_chunk_hashes(tokens, self.chunk_size)


class EmbeddedSession:
    """One request."""

    def __init__(self, hasher: TokenHasher, chunk_size: int) -> None:
        self.lookup: Request | None = None
        self._hasher = hasher
        self._chunk_size = chunk_size
        self._tokens: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._hashes: Sequence[bytes] | None = None
        self._mutex = threading.Lock()

    def set_tokens(self, tokens: Any) -> None:
        """The prompt, whole."""
        tokens = _core.token_array(tokens)
        with self._mutex:
            if not np.array_equal(tokens, self._tokens):
                self._tokens, self._hashes = tokens, None

    def hashes(self, start: int, end: int | None = None) -> Sequence[bytes]:
        """The hashes of the full chunks in a token range, whose bounds are multiples of the chunk size.

        Raises
        ------
        ValueError
            If a bound is none, or beyond the prompt.
        """
        with self._mutex:
            if self._hashes is None:
                self._hashes = self._hasher.chunk_hashes(self._tokens)
            full = len(self._hashes) * self._chunk_size
            end = full if end is None else end
            for name, bound in (("start", start), ("end", end)):
                if bound % self._chunk_size:
                    raise ValueError(f"{name}: {bound} is no multiple of the chunk size {self._chunk_size}")
                if not 0 <= bound <= full:
                    raise ValueError(f"{name}: {bound} is outside of the prompt's {full} tokens in full chunks")
            return self._hashes[start // self._chunk_size : end // self._chunk_size]


class EmbeddedSessions:
    """Sessions by request id, until they are ended."""

    def __init__(self, hasher: TokenHasher, chunk_size: int) -> None:
        self._hasher = hasher
        self._chunk_size = chunk_size
        self._sessions: dict[str, EmbeddedSession] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request_id: str) -> EmbeddedSession:
        """The session of this id, made if there is none."""
        with self._mutex:
            return self._sessions.setdefault(request_id, EmbeddedSession(self._hasher, self._chunk_size))

    def end(self, request_id: str) -> None:
        """Forget a request, and tell the listeners."""
        with self._mutex:
            self._sessions.pop(request_id, None)
            listeners = list(self._listeners)
        for listener in listeners:
            listener(request_id)

    def on_end(self, listener: Callable[[str], None]) -> None:
        """Call the listener with the id of each session that ends."""
        with self._mutex:
            self._listeners.append(listener)

    def adopt(self, request: Request, keys: Sequence[Key], locks: int) -> bool:
        """No: there is no other retrieve here than the engine's."""
        return False
