"""Copies KV from paged caches into the store."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kvsplice.ports import Stored
from kvsplice.splicer.gather import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvsplice.embedded.contexts import EmbeddedContexts
    from kvsplice.embedded.sessions import EmbeddedSessions
    from kvsplice.embedded.store import MemoryStore
    from kvsplice.ports import BlockTables, Request
    from kvsplice.splicer import PagedLayout

__all__ = ["EmbeddedTransfer"]


class EmbeddedTransfer:
    """The store operation of one process.

    Parameters
    ----------
    chunk_size : int
    store, contexts, sessions
        Parts of the same engine.
    """

    def __init__(
        self, chunk_size: int, store: MemoryStore, contexts: EmbeddedContexts, sessions: EmbeddedSessions
    ) -> None:
        self._chunk_size = chunk_size
        self._store = store
        self._contexts = contexts
        self._sessions = sessions

    def store(self, request: Request, instance_id: int, block_ids: BlockTables, event: object | None = None) -> Stored:
        """Store the full chunks of ``[request.start, request.end)``; chunks that are stored already are not copied.

        Returns
        -------
        Stored
            Its result is True if all chunks are held now.

        Raises
        ------
        ValueError
            If the instance has no paged cache, a block table is missing or too short, or the range is not one of full
            chunks.
        """
        context = self._contexts.get(instance_id)
        if context is None:
            raise ValueError(f"instance_id: {instance_id} has no paged cache")
        for group, index in enumerate(context.block_table_of):
            if not 0 <= index < len(block_ids):
                raise ValueError(f"block_ids: layouts[{group}] needs table {index}, only {len(block_ids)} are given")
        session = self._sessions.open(request.request_id)
        session.set_tokens(request.tokens)
        hashes = session.hashes(request.start, request.end)
        rank = request.worker_id or 0
        context.wait(event)
        kept = []
        with context.stream or nullcontext():
            for index, ranks in enumerate(self._store.keys(request, hashes)):
                key, start = ranks[rank], request.start + index * self._chunk_size
                kept.append(
                    key in self._store
                    or self._store.put(
                        key,
                        [
                            self._copy(layout, block_ids[table], start)
                            for layout, table in zip(context.layouts, context.block_table_of, strict=True)
                        ],
                    )
                )
        return Stored(all(kept), kept)

    def _copy(self, layout: PagedLayout, block_table: Sequence[int], start: int) -> Any:
        out = None
        if layout.device.kind == "cuda":
            import cupyx

            # A splice reads pinned memory faster, and without a copy of its own.
            out = cupyx.empty_pinned(layout.object_shape(self._chunk_size), f"uint{8 * layout.itemsize}")
        return gather(layout, block_table, start, self._chunk_size, out)
