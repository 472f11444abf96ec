"""LMCache's store operation, as the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsplice.ports import Stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvsplice.lmcache.module.callbacks import Callbacks
    from kvsplice.ports import BlockTables

__all__ = ["LMCacheTransfer"]


class LMCacheTransfer:
    """The `kvsplice.ports.Transfer` of a server.

    Parameters
    ----------
    context : lmcache.v1.multiprocess.engine_context.MPCacheServerContext
    transfer : lmcache.v1.multiprocess.modules.lmcache_driven_transfer.LMCacheDrivenTransferModule
    callbacks : Callbacks
    stored : callable
        Called with the key of each store that stored something.
    """

    def __init__(self, context: Any, transfer: Any, callbacks: Callbacks, stored: Callable[[Any], None]) -> None:
        self._sessions = context.session_manager
        self._chunk_size: int = context.chunk_size
        self._transfer = transfer
        self._callbacks = callbacks
        self._stored = stored

    def store(self, request: Any, instance_id: int, block_ids: BlockTables, event: Any) -> Stored:
        """Store by LMCache; the result is its own: a handle of the event behind the copy, and whether it went well."""
        key = request.key
        handle, went_well, mask = self._transfer.store_with_chunk_mask(key, instance_id, block_ids, event)
        kept = list(mask) + [False] * ((key.end - key.start) // self._chunk_size - len(mask))
        entry = self._transfer.get_and_touch_context_entry(instance_id)
        if any(kept):
            # A session that ended meanwhile does not know them any more.
            self._sessions.get_or_create(key.request_id).set_tokens(list(key.token_ids))
            self._stored(key)

        def after(action: Callable[[], None]) -> None:
            if entry is None:
                action()
            else:
                # Behind LMCache's commit, which is called in the same way.
                self._callbacks.after(entry.cache_context.cupy_stream, action)

        return Stored((handle, went_well), kept, after)
