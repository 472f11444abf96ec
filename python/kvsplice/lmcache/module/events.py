"""LMCache's event bus, as the engine's."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lmcache.v1.mp_observability.event import Event, EventType

from kvsplice import events

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LMCacheEvents"]

logger = logging.getLogger(__name__)

_TYPES = {name: EventType(name) for name in events.NAMES}


class LMCacheEvents:
    """The `kvsplice.ports.EventSink` of a server.

    Parameters
    ----------
    context : lmcache.v1.multiprocess.engine_context.MPCacheServerContext
    """

    def __init__(self, context: Any) -> None:
        self._bus = context.event_bus
        self._chunk_size: int = context.chunk_size

    def publish(self, name: str, request_id: str | None, fields: Mapping[str, Any]) -> None:
        """One event, under LMCache's type of that name."""
        metadata = dict(fields)
        if name == events.FINGERPRINTS_REGISTERED:
            metadata["num_tokens"] = metadata["num_chunks"] * self._chunk_size
        session = {} if request_id is None else {"session_id": request_id}
        try:
            self._bus.publish(Event(event_type=_TYPES[name], metadata=metadata, **session))
        except Exception:
            logger.exception("event %s was not published", name)

    def wants(self, name: str) -> bool:
        """Whether anybody listens to this name."""
        return bool(self._bus.has_subscribers(_TYPES[name]))
