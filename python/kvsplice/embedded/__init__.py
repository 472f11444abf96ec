"""The engine's ports for one process: store, sessions, paged cache, events."""

from kvsplice.embedded.contexts import EmbeddedContext, EmbeddedContexts
from kvsplice.embedded.disk import DiskTier
from kvsplice.embedded.engine import EmbeddedEngine
from kvsplice.embedded.events import EventBus, JsonLines
from kvsplice.embedded.paging import BlockAllocator, PagedCache
from kvsplice.embedded.sessions import EmbeddedSessions, Hasher
from kvsplice.embedded.store import MemoryStore, ObjectKey
from kvsplice.embedded.transfer import EmbeddedTransfer

__all__ = [
    "BlockAllocator",
    "DiskTier",
    "EmbeddedContext",
    "EmbeddedContexts",
    "EmbeddedEngine",
    "EmbeddedSessions",
    "EmbeddedTransfer",
    "EventBus",
    "Hasher",
    "JsonLines",
    "MemoryStore",
    "ObjectKey",
    "PagedCache",
]
