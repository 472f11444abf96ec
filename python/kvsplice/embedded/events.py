"""Where an engine's events go: counters, listeners, a file."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["EventBus", "JsonLines"]

logger = logging.getLogger(__name__)


class EventBus:
    """Counts events, and hands them to listeners."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._listeners: defaultdict[str, list[Callable[[str, str | None, Mapping[str, Any]], None]]]
        self._listeners = defaultdict(list)
        self._mutex = threading.Lock()

    def subscribe(self, listener: Callable[[str, str | None, Mapping[str, Any]], None], name: str = "*") -> None:
        """Call ``listener(name, request_id, fields)`` for events of this name, or for all."""
        with self._mutex:
            self._listeners[name].append(listener)

    def publish(self, name: str, request_id: str | None, fields: Mapping[str, Any]) -> None:
        """Count an event, and hand it on. A listener that raises is logged."""
        with self._mutex:
            self._counts[name] += 1
            listeners = [*self._listeners.get("*", ()), *self._listeners.get(name, ())]
        for listener in listeners:
            try:
                listener(name, request_id, fields)
            except Exception:
                logger.exception("a listener to %s failed", name)

    def wants(self, name: str) -> bool:
        """Whether anybody listens to it."""
        with self._mutex:
            return bool(self._listeners.get("*") or self._listeners.get(name))

    def counts(self) -> dict[str, int]:
        """How often each event was published."""
        with self._mutex:
            return dict(self._counts)


class JsonLines:
    """A listener that appends each event to a file, as a line of JSON; bytes are written as hex."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._mutex = threading.Lock()

    def __call__(self, name: str, request_id: str | None, fields: Mapping[str, Any]) -> None:
        """Write one event."""
        line = json.dumps({"time": time.time(), "event": name, "request_id": request_id, **fields}, default=_plain)
        with self._mutex:
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)
