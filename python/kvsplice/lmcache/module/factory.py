"""Makes the engine's module for a server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lmcache import __version__ as lmcache_version

from kvsplice import __version__
from kvsplice.engine import BlendEngine, EngineOptions
from kvsplice.fleet import HttpFleetDirectory
from kvsplice.lmcache.module.callbacks import Callbacks
from kvsplice.lmcache.module.contexts import LMCacheContexts
from kvsplice.lmcache.module.events import LMCacheEvents
from kvsplice.lmcache.module.handlers import EngineModule
from kvsplice.lmcache.module.reorder import Reorder
from kvsplice.lmcache.module.sessions import LMCacheSessions
from kvsplice.lmcache.module.storage import LMCacheStore
from kvsplice.lmcache.module.transfer import LMCacheTransfer
from kvsplice.matcher import Matcher

if TYPE_CHECKING:
    from kvsplice.lmcache.settings import Settings
    from kvsplice.ports import FleetDirectory

__all__ = ["make_module"]

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.6",)


def make_module(build: Any, settings: Settings) -> EngineModule:
    """The module of a server that is being built.

    Parameters
    ----------
    build : lmcache.v1.multiprocess.ext_server_module.ExtServerModuleBuildContext
    settings : Settings

    Raises
    ------
    RuntimeError
        If this LMCache is not one that was tested, or the server stores in a way that the engine does not know.
    """
    if lmcache_version not in TESTED_VERSIONS:
        raise RuntimeError(
            f"kvsplice {__version__}, mode module: this is lmcache {lmcache_version}, tested was "
            f"{', '.join(TESTED_VERSIONS)}; install that, or another kvsplice, or use mode matcher"
        )
    context, server = build.server_context, build.mp_config
    transfer = next((each for each in build.modules if hasattr(each, "store_with_chunk_mask")), None)
    if transfer is None:
        raise RuntimeError(
            "kvsplice, mode module: start the server with --supported-transfer-mode lmcache_driven or auto"
        )
    if context.storage_manager.is_multi_l1:
        raise RuntimeError("kvsplice, mode module: a server with several L1 tiers is not supported; use mode matcher")
    matcher = Matcher(
        context.chunk_size, settings.capacity, settings.on_full, server.enable_dedup_content, settings.seed
    )
    fleet = _fleet(build.coordinator_config, context.chunk_size)
    reorder = Reorder(context, matcher) if server.enable_blend_reorder and fleet is None else None
    callbacks = Callbacks(transfer)
    contexts, sessions = LMCacheContexts(context, transfer, callbacks), LMCacheSessions(context)
    engine = BlendEngine(
        matcher=matcher,
        store=LMCacheStore(context),
        transfer=LMCacheTransfer(context, transfer, callbacks, lambda key: reorder.record(key) if reorder else None),
        contexts=contexts,
        sessions=sessions,
        sink=LMCacheEvents(context),
        fleet=fleet,
        options=EngineOptions(segmented_prefix=server.enable_segmented_prefix),
    )
    logger.warning("kvsplice %s: stores, lookups and retrieves go through its engine, over %r", __version__, matcher)
    return EngineModule(context, transfer, engine, contexts, sessions, reorder)


def _fleet(coordinator: Any, chunk_size: int) -> FleetDirectory | None:
    """The coordinator, if the server has one and tells it what is stored."""
    if not (coordinator.url and coordinator.event_reporting):
        return None
    return HttpFleetDirectory(
        coordinator.url,
        chunk_size,
        budget_s=coordinator.blend_timeout,
        concurrency=coordinator.blend_match_concurrency,
        report=False,
    )
