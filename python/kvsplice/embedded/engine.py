"""An engine whose parts are all of this package."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kvsplice.embedded.contexts import EmbeddedContext, EmbeddedContexts
from kvsplice.embedded.disk import DiskTier
from kvsplice.embedded.events import EventBus
from kvsplice.embedded.sessions import EmbeddedSessions, Hasher
from kvsplice.embedded.store import MemoryStore
from kvsplice.embedded.transfer import EmbeddedTransfer
from kvsplice.engine import BlendEngine, EngineOptions
from kvsplice.matcher import Matcher
from kvsplice.splicer import PagedLayout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvsplice.ports import FleetDirectory

__all__ = ["EmbeddedEngine"]


class EmbeddedEngine(BlendEngine):
    """A `BlendEngine` for one process, with its parts at hand.

    Attributes
    ----------
    memory : MemoryStore
    sessions : EmbeddedSessions
    contexts : EmbeddedContexts
    bus : EventBus
    """

    def __init__(
        self,
        *,
        chunk_size: int = 256,
        capacity: int = 1 << 20,
        memory_bytes: int = 4 << 30,
        disk: str | Path | None = None,
        disk_bytes: int = 64 << 30,
        seed: int | None = None,
        fleet: FleetDirectory | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.memory = MemoryStore(memory_bytes, None if disk is None else DiskTier(disk, disk_bytes))
        self.sessions = EmbeddedSessions(Hasher(chunk_size), chunk_size)
        self.contexts = EmbeddedContexts()
        self.bus = EventBus()
        super().__init__(
            matcher=Matcher(chunk_size=chunk_size, capacity=capacity, seed=seed),
            store=self.memory,
            transfer=EmbeddedTransfer(chunk_size, self.memory, self.contexts, self.sessions),
            contexts=self.contexts,
            sessions=self.sessions,
            sink=self.bus,
            fleet=fleet,
            options=options,
        )

    def add_instance(
        self,
        layouts: PagedLayout | Sequence[PagedLayout],
        cos_sin_caches: Sequence[Any],
        head_size: int,
        *,
        instance_id: int = 0,
        is_neox: bool = True,
        group_to_cache: Sequence[int] = (),
        group_windows: Sequence[tuple[int, int] | None] = (),
        block_table_of: Sequence[int] | None = None,
        model_name: str = "",
        world_size: int = 1,
        stream: Any = None,
    ) -> EmbeddedContext:
        """Register a paged cache and its rope: `EmbeddedContext`, and `register_rope`."""
        groups = [layouts] if isinstance(layouts, PagedLayout) else list(layouts)
        context = EmbeddedContext(groups, block_table_of, model_name=model_name, world_size=world_size, stream=stream)
        before = self.contexts.get(instance_id)
        self.contexts.register(instance_id, context)
        try:
            self.register_rope(
                instance_id, cos_sin_caches, head_size, is_neox, group_to_cache, group_windows=group_windows
            )
        except Exception:
            if before is None:
                self.contexts.unregister(instance_id)
            else:
                self.contexts.register(instance_id, before)
            raise
        return context

    def report_status(self) -> dict[str, Any]:
        """See `BlendEngine.report_status`; ``memory`` is `MemoryStore.stats`."""
        return super().report_status() | {"memory": self.memory.stats()}

    def close(self) -> None:
        """See `BlendEngine.close`; finishes what is being written to the disk, too."""
        super().close()
        self.memory.close()


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of an engine, and those of its first instance.

    Raises
    ------
    TypeError
        If one is neither's.
    """
    of_engine = {name for name in inspect.signature(EmbeddedEngine.__init__).parameters if name != "self"}
    of_instance = set(inspect.signature(EmbeddedEngine.add_instance).parameters) - {"self"}
    if unknown := options.keys() - of_engine - of_instance:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    return (
        {name: value for name, value in options.items() if name in of_engine},
        {name: value for name, value in options.items() if name in of_instance},
    )
