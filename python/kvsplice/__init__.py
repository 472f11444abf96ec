"""kvsplice: find cached KV chunks at any offset of a prompt."""

from kvsplice import hashing
from kvsplice._core import __version__
from kvsplice.matcher import Match, Matcher, MatcherStats, Matches, coverage, non_overlapping_after_prefix

__all__ = [
    "Match",
    "Matcher",
    "MatcherStats",
    "Matches",
    "__version__",
    "coverage",
    "hashing",
    "non_overlapping_after_prefix",
]
