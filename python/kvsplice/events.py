"""The events that the engine publishes, by name; their fields stand beside them.

Names and fields are those of LMCache's ``EventType.CB_*``, so that what listens there understands them. Of each span
that starts, one end follows, whatever happens.
"""

from __future__ import annotations

__all__ = [
    "CHUNKS_EVICTED",
    "FINGERPRINTS_REGISTERED",
    "FINGERPRINT_MATCH_END",
    "FINGERPRINT_MATCH_START",
    "FLEET_MATCH_END",
    "FLEET_MATCH_START",
    "LOOKUP_END",
    "LOOKUP_HASHES",
    "LOOKUP_START",
    "NAMES",
    "PREFIX_LOOKUP_END",
    "PREFIX_LOOKUP_START",
    "REQUEST_END",
    "REQUEST_START",
    "RETRIEVE_END",
    "RETRIEVE_NOOP",
    "RETRIEVE_START",
    "RETRIEVE_SUBMITTED",
    "SCATTER_END",
    "SCATTER_START",
    "SPARSE_PREFETCH_END",
    "SPARSE_PREFETCH_START",
]

REQUEST_START = "cb.request.start"
REQUEST_END = "cb.request.end"

LOOKUP_START = "cb.lookup.start"
"""num_tokens"""
LOOKUP_END = "cb.lookup.end"
"""num_tokens, fingerprint_hits, prefix_hits, prefix_chunks, storage_hits, stale_chunks, no_gpu_context,
prefix_hit_tokens, segmented_prefix_hit_tokens, non_prefix_hit_tokens, hit_tokens, requested_tokens, abandoned"""

PREFIX_LOOKUP_START = "cb.prefix_lookup.start"
PREFIX_LOOKUP_END = "cb.prefix_lookup.end"
"""prefix_chunks"""
LOOKUP_HASHES = "mp.lookup"
"""request_id, chunk_hashes, model_name, chunk_size, seq_len, dtypes, shapes"""

FINGERPRINT_MATCH_START = "cb.fingerprint_match.start"
FINGERPRINT_MATCH_END = "cb.fingerprint_match.end"
"""matches"""
FLEET_MATCH_START = "cb.coordinator_match.start"
FLEET_MATCH_END = "cb.coordinator_match.end"
"""matches, timed_out"""

SPARSE_PREFETCH_START = "cb.sparse_prefetch.start"
"""n_chunks, world_size, n_keys, l2_keys; only if keys have to be loaded"""
SPARSE_PREFETCH_END = "cb.sparse_prefetch.end"
"""found_keys, l2_keys"""
CHUNKS_EVICTED = "cb.chunks.evicted"
"""num_chunks (that were struck out of the index), stale_chunks (that storage no longer holds)"""

FINGERPRINTS_REGISTERED = "cb.fingerprints.registered"
"""num_chunks"""

RETRIEVE_START = "cb.retrieve.start"
"""num_chunks, model_name, worker_id"""
RETRIEVE_END = "cb.retrieve.end"
"""success, worker_id"""
RETRIEVE_NOOP = "cb.retrieve.noop"
"""reason, dropped_matches"""
RETRIEVE_SUBMITTED = "cb.retrieve.submitted"
"""instance_id"""
SCATTER_START = "cb.scatter.start"
"""scattered_tokens, n_prefix, n_shifted, dropped, worker_id"""
SCATTER_END = "cb.scatter.end"
"""success, worker_id"""

NAMES = tuple(value for name, value in sorted(vars().items()) if name in __all__ and name != "NAMES")
