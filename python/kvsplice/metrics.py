"""What an engine does, as Prometheus metrics. Needs prometheus_client: ``pip install 'kvsplice[metrics]'``."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvsplice import events

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from kvsplice.embedded import EventBus
    from kvsplice.engine import BlendEngine

__all__ = ["EngineMetrics"]

_BUCKETS = tuple(base * 10.0**power for power in range(-5, 1) for base in (1, 2.5, 5))
"""Seconds: a lookup in memory takes some 10 microseconds, a load from a slow disk some seconds."""

_PHASES = {
    "lookup": (events.LOOKUP_START, events.LOOKUP_END),
    "prefix_lookup": (events.PREFIX_LOOKUP_START, events.PREFIX_LOOKUP_END),
    "fingerprint_match": (events.FINGERPRINT_MATCH_START, events.FINGERPRINT_MATCH_END),
    "fleet_match": (events.FLEET_MATCH_START, events.FLEET_MATCH_END),
    "sparse_prefetch": (events.SPARSE_PREFETCH_START, events.SPARSE_PREFETCH_END),
    "retrieve": (events.RETRIEVE_START, events.RETRIEVE_END),
    "scatter": (events.SCATTER_START, events.SCATTER_END),
}

_STATUS_GAUGES = {
    "active_lookups": "Lookups that have not answered yet",
    "open_requests": "Requests between their lookup and their end",
    "read_locks": "Read locks that open requests hold",
    "abandoned_prefetches": "Prefetches that nobody waits for any more and that have not ended",
    "pending_registrations": "Stored ranges that are not indexed yet",
}
_GAUGES = {
    "matcher": {
        "entries": "Chunks in the index",
        "contents": "Different texts in the index",
        "capacity": "Chunks that the index can hold",
        "token_bytes": "Memory of the index for texts, in bytes",
        "overhead_bytes": "Memory of the index for all else, in bytes",
    },
    "memory": {
        "objects": "Objects in host memory",
        "bytes": "Host memory used, in bytes",
        "capacity": "Host memory that may be used, in bytes",
        "loading": "Objects that are being loaded",
        "disk_objects": "Objects on the disk",
        "disk_bytes": "Disk used, in bytes",
    },
    "fleet": {"waiting": "Stored ranges that the fleet's directory has not been told yet"},
}
_COUNTERS = {
    "matcher": {
        "evicted": "Chunks that left the index for want of room",
        "rejected_full": "Chunks that were not indexed for want of room",
        "rejected_collisions": "Fingerprint hits whose tokens differed",
    },
    "memory": {
        "evictions": "Objects that left host memory for want of room",
        "disk_set_aside": "Files that were torn or foreign, and were renamed",
        "disk_skipped_writes": "Objects that were not written, for the disk did not keep up",
        "disk_failed_writes": "Objects that could not be written to the disk",
    },
    "fleet": {
        "asked": "Questions to the fleet's directory",
        "refused": "Questions that were not asked: too many were under way",
        "answered": "Questions that the directory answered",
        "failed": "Questions that it did not answer, or wrongly",
        "told": "Stored ranges that the directory took",
        "lost": "Stored ranges that it did not take",
    },
}


class EngineMetrics:
    """The collector of one engine: counts its events, and asks for its status when it is scraped.

    Without an event bus only the status is exported: for an engine in a host that has metrics of the events itself.

    Parameters
    ----------
    engine : BlendEngine
    bus : EventBus, optional
        The sink that the engine publishes to; ``EmbeddedEngine.bus``.
    registry : prometheus_client.CollectorRegistry, optional
        Where it is registered; the process's own if left out. One engine each: names are the same for all.
    """

    def __init__(
        self, engine: BlendEngine, bus: EventBus | None = None, registry: CollectorRegistry | None = None
    ) -> None:
        self._engine = engine
        self._registry = REGISTRY if registry is None else registry
        self._own = CollectorRegistry()
        self._started: dict[Hashable, float] = {}
        self._mutex = threading.Lock()
        handlers = {} if bus is None else self._handlers()
        self._registry.register(self)
        for name, handler in handlers.items():
            assert bus is not None
            bus.subscribe(handler, name)

    def close(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)

    def collect(self) -> Iterator[Metric]:
        """What `prometheus_client` asks for at a scrape."""
        yield from self._own.collect()
        status = self._engine.report_status()
        for name, text in _STATUS_GAUGES.items():
            value = status[name]
            yield GaugeMetricFamily(f"kvsplice_{name}", text, value if isinstance(value, int) else len(value))
        for part in ("matcher", "memory", "fleet"):
            numbers = status.get(part) or {}
            for family, texts in ((GaugeMetricFamily, _GAUGES[part]), (CounterMetricFamily, _COUNTERS[part])):
                for name, text in texts.items():
                    if name in numbers:
                        yield family(f"kvsplice_{part}_{name}", text, numbers[name])

    def describe(self) -> Iterator[Metric]:
        """The names, so that a registry can refuse a second engine's."""
        return self.collect()

    # -- events -------------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Callable[[str, str | None, Mapping[str, Any]], None]]:
        """What to do at each event, by its name."""
        own = self._own
        lookups = Counter("kvsplice_lookups", "Lookups that ended", ["outcome"], registry=own)
        requested = Counter("kvsplice_requested_tokens", "Tokens in full chunks of what was looked up", registry=own)
        hits = Counter("kvsplice_hit_tokens", "Tokens that a lookup found KV of, by where", ["kind"], registry=own)
        stale = Counter("kvsplice_stale_chunks", "Matched chunks whose KV storage no longer holds", registry=own)
        struck = Counter("kvsplice_struck_out_chunks", "Chunks that left the index for that", registry=own)
        registered = Counter("kvsplice_registered_chunks", "Chunks that were indexed", registry=own)
        timeouts = Counter("kvsplice_fleet_timeouts", "Lookups that went on without the fleet", registry=own)
        retrieves = Counter("kvsplice_retrieves", "Retrieves, by how they ended", ["outcome"], registry=own)
        spliced = Counter("kvsplice_scattered_tokens", "Tokens written into paged caches", registry=own)
        chunks = Counter("kvsplice_scattered_chunks", "Chunks written into paged caches", ["kind"], registry=own)
        seconds = Histogram(
            "kvsplice_phase_seconds", "How long each phase took", ["phase"], buckets=_BUCKETS, registry=own
        )
        outcomes = {name: lookups.labels(name) for name in ("done", "abandoned", "no_paged_cache")}
        kinds = {name: hits.labels(name) for name in ("prefix", "segmented_prefix", "non_prefix")}
        ends = {True: retrieves.labels("spliced"), False: retrieves.labels("failed")}

        def on_lookup(fields: Mapping[str, Any]) -> None:
            outcome = "abandoned" if fields["abandoned"] else "no_paged_cache" if fields["no_gpu_context"] else "done"
            outcomes[outcome].inc()
            requested.inc(fields["requested_tokens"])
            for kind, counter in kinds.items():
                counter.inc(fields[f"{kind}_hit_tokens"])

        def on_evicted(fields: Mapping[str, Any]) -> None:
            stale.inc(fields["stale_chunks"])
            struck.inc(fields["num_chunks"])

        def on_scatter(fields: Mapping[str, Any]) -> None:
            spliced.inc(fields["scattered_tokens"])
            chunks.labels("prefix").inc(fields["n_prefix"])
            chunks.labels("shifted").inc(fields["n_shifted"])

        counted: dict[str, Callable[[Mapping[str, Any]], None]] = {
            events.LOOKUP_END: on_lookup,
            events.CHUNKS_EVICTED: on_evicted,
            events.FINGERPRINTS_REGISTERED: lambda fields: registered.inc(fields["num_chunks"]),
            events.FLEET_MATCH_END: lambda fields: timeouts.inc(int(fields["timed_out"])),
            events.RETRIEVE_END: lambda fields: ends[fields["success"]].inc(),
            events.RETRIEVE_NOOP: lambda fields: retrieves.labels(fields["reason"]).inc(),
            events.SCATTER_START: on_scatter,
        }
        starts = {start: phase for phase, (start, _) in _PHASES.items()}
        finishes = {end: (phase, seconds.labels(phase)) for phase, (_, end) in _PHASES.items()}

        def handle(name: str, request_id: str | None, fields: Mapping[str, Any]) -> None:
            now = time.perf_counter()
            # Ranks retrieve under one request id.
            worker = fields.get("worker_id")
            if name in starts:
                with self._mutex:
                    self._started[request_id, worker, starts[name]] = now
            elif name in finishes:
                phase, histogram = finishes[name]
                with self._mutex:
                    began = self._started.pop((request_id, worker, phase), None)
                if began is not None:
                    histogram.observe(now - began)
            if name in counted:
                counted[name](fields)

        return dict.fromkeys(counted.keys() | starts.keys() | finishes.keys(), handle)
