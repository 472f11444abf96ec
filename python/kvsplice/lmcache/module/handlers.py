"""The requests of LMCache's server that our engine answers.

LMCache compares the annotations of a handler with those of the request, so they are its own types.
"""

from typing import Any

import numpy as np
from lmcache.v1.multiprocess.custom_types import (
    CBMatchResult,
    CBUnifiedLookupResult,
    DeviceIPCWrapper,
    IPCCacheServerKey,
)
from lmcache.v1.multiprocess.engine_module import InstanceLivenessTarget
from lmcache.v1.multiprocess.request_handler import HandlerType, request_handler

from kvsplice import __version__
from kvsplice.engine import BlendEngine
from kvsplice.lmcache.module.contexts import LMCacheContexts, WorkerCache
from kvsplice.lmcache.module.reorder import Reorder
from kvsplice.lmcache.module.requests import KeyedRequest
from kvsplice.lmcache.module.sessions import LMCacheSessions
from kvsplice.matcher import Match
from kvsplice.retrieve import Reason

__all__ = ["EngineModule"]

PROTOCOL = 1
"""Version of the blend requests."""

_NO_ROPE = -1


class EngineModule(InstanceLivenessTarget):
    """The engine among the server's modules. Its handlers take the place of built-in ones of the same name."""

    def __init__(
        self,
        context: Any,
        transfer: Any,
        engine: BlendEngine,
        contexts: LMCacheContexts,
        sessions: LMCacheSessions,
        reorder: Reorder | None,
    ) -> None:
        self.context = context
        self.engine = engine
        self._transfer = transfer
        self._contexts = contexts
        self._sessions = sessions
        self._reorder = reorder

    @request_handler()
    def cb_protocol_handshake(self, client_version: int) -> tuple[int, bool]:
        """Our version of the requests, and whether the client's is the same."""
        return PROTOCOL, client_version == PROTOCOL

    @request_handler()
    def cb_register_rope(
        self,
        instance_id: int,
        cos_sin_caches_ipc: list[DeviceIPCWrapper],
        head_size: int,
        is_neox_style: bool,
        group_to_cache: list[int],
        group_rot: list[list[int]],
        group_head_size: list[int],
        kv_quant: str,
    ) -> None:
        """How a worker's model rotates K. Without tables, or in a group of -1 or without a window, it does not.

        ``group_head_size`` is not needed: the registered caches have it.
        """
        cache = self._contexts.add(instance_id, kv_quant)
        groups = max(cache.block_table_of) + 1
        tables: list[Any] = [wrapped.to_tensor() for wrapped in cos_sin_caches_ipc]
        maps = list(group_to_cache) or [0] * groups
        windows = [(window[0], window[1]) if window else None for window in group_rot or ()]
        if not tables:
            tables, maps = [np.array([[1, 0]], np.float32)], [_NO_ROPE] * groups
        if windows:
            if len(windows) != len(maps):
                raise ValueError(f"group_rot: {len(windows)} entries for {len(maps)} groups of layers")
            maps = [table if window else _NO_ROPE for table, window in zip(maps, windows, strict=True)]
        self.engine.register_rope(
            instance_id,
            tables,
            head_size,
            is_neox_style,
            maps,
            group_windows=windows,
            without_rope=_unrotatable(cache) if windows else (),
        )

    @request_handler()
    def cb_unregister_rope(self, instance_id: int) -> None:
        """Forget a worker's rope; its paged cache stays registered."""
        self.engine.unregister_rope(instance_id)
        self._contexts.remove(instance_id)

    @request_handler()
    def unregister_kv_cache(self, instance_id: int) -> None:
        """Forget a worker's paged cache: first here, so that nothing keeps its memory mapped."""
        self.drop_instance_state(instance_id)
        self._transfer.unregister_kv_cache(instance_id)

    def drop_instance_state(self, instance_id: int) -> None:
        """A worker is gone."""
        self.engine.drop_instance(instance_id)
        self._contexts.remove(instance_id)

    @request_handler(HandlerType.BLOCKING, requires_client_affinity=True)
    def store(
        self, key: IPCCacheServerKey, instance_id: int, gpu_block_ids: list[list[int]], event_ipc_handle: bytes
    ) -> tuple[bytes, bool]:
        """Store by LMCache, and index what it stored."""
        result: Any = self.engine.store(KeyedRequest.of(key), instance_id, gpu_block_ids, event_ipc_handle)
        handle, went_well = result
        return handle, went_well

    @request_handler(HandlerType.BLOCKING)
    def cb_unified_lookup(self, key: IPCCacheServerKey, tp_size: int) -> CBUnifiedLookupResult | None:
        """Begin a lookup, or poll it: None while it loads."""
        found = self.engine.lookup(KeyedRequest.of(key), tp_size, readers=key.require_num_kv_readers())
        if found is None:
            return None
        return CBUnifiedLookupResult(
            prefix_coverage_tokens=found.prefix_tokens,
            non_prefix_segments=[CBMatchResult(*match) for match in found.matches],
            segmented_prefix_segments=[CBMatchResult(*match) for match in found.retained],
        )

    @request_handler(HandlerType.BLOCKING, requires_client_affinity=True)
    def cb_retrieve_pre_computed(
        self,
        key: IPCCacheServerKey,
        cb_match_result: list[CBMatchResult],
        gpu_block_ids: list[list[int]],
        instance_id: int,
        event_ipc_handle: bytes,
    ) -> tuple[bytes, bool]:
        """Write matches into the worker's paged cache.

        The handle of an event behind the writes; and False where the worker has to compute what it counted on. That
        the block table reaches no match yet is no loss: it calls again.
        """
        matches = [Match(m.old_st, m.old_ed, m.cur_st, m.cur_ed, m.hash) for m in cb_match_result]
        done = self.engine.retrieve(KeyedRequest.of(key), matches, gpu_block_ids, instance_id, event_ipc_handle)
        handle: Any = done.event
        if handle is event_ipc_handle:
            # A process cannot open its own event's handle.
            cache = self._contexts.get(instance_id)
            handle = b"" if cache is None else cache.record()
        return handle, done.ran or done.reason is Reason.DEFERRED

    @request_handler(HandlerType.BLOCKING)
    def cb_reorder_plan(self, key: IPCCacheServerKey, keep_prefix: int, budget_ms: int) -> list[int]:
        """See `Reorder.plan`; empty where the server was started without ``--enable-blend-reorder``."""
        return [] if self._reorder is None else self._reorder.plan(key, keep_prefix, budget_ms)

    def report_status(self) -> dict[str, Any]:
        """For ``GET /status``: our own entry, and what the built-in module would say."""
        status = self.engine.report_status()
        instances = status["instances_with_rope"]
        return {
            "kvsplice": {"version": __version__, "mode": "module", **status},
            "registered_cb_rope_instances": list(instances),
            "cb_rope_meta": {str(each): [of["model_name"], of["world_size"]] for each, of in instances.items()},
            "active_cb_lookups": len(status["active_lookups"]),
        }

    def close(self) -> None:
        """Index what is pending, and release everything."""
        self.engine.close()
        self._sessions.close()


def _unrotatable(cache: WorkerCache) -> list[int]:
    """Groups of layers that share a block table with rotated ones, and hold something else (an indexer's keys)."""
    return [index for index, layout in enumerate(cache.layouts) if layout.unrotatable is not None]
