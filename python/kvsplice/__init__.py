"""kvsplice: find cached KV chunks at any offset of a prompt, and splice them into a paged cache."""

from kvsplice import hashing
from kvsplice._core import __version__
from kvsplice.engine import BlendEngine, EngineOptions
from kvsplice.lookup import LookupResult
from kvsplice.matcher import Match, Matcher, MatcherStats, Matches, coverage, non_overlapping_after_prefix
from kvsplice.ports import Request
from kvsplice.retrieve import Retrieval
from kvsplice.rope import RopeTables
from kvsplice.splicer import Chunk, PagedLayout, Splicer, SpliceResult

__all__ = [
    "BlendEngine",
    "Chunk",
    "EngineOptions",
    "LookupResult",
    "Match",
    "Matcher",
    "MatcherStats",
    "Matches",
    "PagedLayout",
    "Request",
    "Retrieval",
    "RopeTables",
    "SpliceResult",
    "Splicer",
    "__version__",
    "coverage",
    "hashing",
    "non_overlapping_after_prefix",
]
