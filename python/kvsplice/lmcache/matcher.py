"""LMCache's blend matcher interface over `kvsplice.Matcher`.

The interface is that of ``BlendTokenRangeMatcher`` in ``lmcache`` 0.5.5 and 0.5.6, and of ``BlendTokenRangeMatcherV3``
in 0.4.7 to 0.5.4, whose registration returns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kvsplice.matcher import Matcher

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CBMatchResult", "MatchResult", "TokenRangeMatcher"]


class MatchResult(Protocol):
    """The fields of LMCache's result type, whichever class it is."""

    old_st: int
    """Where the chunk began when it was stored."""
    old_ed: int
    """Where it ended when it was stored, exclusive."""
    cur_st: int
    """Where it begins in the query."""
    cur_ed: int
    """Where it ends in the query, exclusive."""
    hash: bytes
    """The storage key under which its KV was stored."""


@dataclass
class CBMatchResult:
    """Stands in for LMCache's class of this name where LMCache is not installed. See `MatchResult` for the fields."""

    old_st: int
    old_ed: int
    cur_st: int
    cur_ed: int
    hash: bytes


_result_type: Any = None


def _resolve_result_type() -> Any:
    """Return LMCache's result type, or ours where LMCache can't be imported for want of a module."""
    # Not when this module is imported: importing LMCache takes seconds, and in its server it has been done.
    global _result_type  # noqa: PLW0603
    if _result_type is None:
        try:
            from lmcache.v1.multiprocess.custom_types import CBMatchResult as lmcache_type
        except ModuleNotFoundError:
            # LMCache, or torch, which its server can't run without: no server in this process could get a result.
            _result_type = CBMatchResult
        else:
            _result_type = lmcache_type
    return _result_type


class TokenRangeMatcher:
    """LMCache's blend matcher, done by a `kvsplice.Matcher`.

    Answers as LMCache's does, except that it

    - compares tokens, so that a text of equal fingerprint is not a match;
    - finds every chunk that it holds, whatever else is held, and hands a text over to the next holder when the last
      one registered is removed;
    - never stops indexing: when ``capacity`` is reached it evicts, or refuses just what is beyond it;
    - skips a chunk hash that stands twice in one call the second time, where LMCache's would report the
      first one's text at the second one's position;
    - raises `ValueError` or `TypeError`, with nothing indexed, for what can't be right: too few chunk hashes
      (LMCache's: `IndexError`), tokens that are no integers or do not fit 32 bits, a negative ``start_chunk_idx``,
      chunk hashes of no or more than 64 bytes.

    All methods may be called from any number of threads at once. `match_sub_sequence` waits for no other thread.

    Parameters
    ----------
    chunk_size : int
        Tokens per chunk.
    dedup_content : bool
        Do not index a chunk whose text is indexed already under another chunk hash.
    capacity, on_full, seed
        As for `kvsplice.Matcher`.
    scope : bytes
        The scope of everything that goes through this object. It separates tenants where several of these share a
        `kvsplice.Matcher`; see `over`.

    Attributes
    ----------
    matcher : kvsplice.Matcher
        The matcher behind the interface, for what LMCache's lacks: strikes, registrations in flight, statistics.
    scope : bytes
        As given.
    """

    __slots__ = ("_result_type", "matcher", "scope")

    def __init__(
        self,
        chunk_size: int = 256,
        dedup_content: bool = False,
        *,
        capacity: int = 1 << 20,
        on_full: Literal["evict", "reject"] = "evict",
        seed: int | None = None,
        scope: bytes = b"",
    ) -> None:
        self._bind(Matcher(chunk_size, capacity, on_full, dedup_content, seed), scope)

    @classmethod
    def over(cls, matcher: Matcher, scope: bytes = b"") -> TokenRangeMatcher:
        """Return LMCache's interface to one scope of a matcher that others may use too."""
        instance = cls.__new__(cls)
        instance._bind(matcher, scope)
        return instance

    def _bind(self, matcher: Matcher, scope: bytes) -> None:
        self.matcher = matcher
        self.scope = scope
        self._result_type = _resolve_result_type()

    @property
    def chunk_size(self) -> int:
        """Tokens per chunk."""
        return self.matcher.chunk_size

    @property
    def dedup_content(self) -> bool:
        """Whether a text is indexed once only."""
        return self.matcher.dedup_content

    def on_new_token_hashes(
        self,
        token_ids: Any,
        token_hashes: Sequence[bytes],
        start_chunk_idx: int = 0,
        position_offset: int = 0,
    ) -> int:
        """Index the full chunks of a stored sequence.

        Parameters
        ----------
        token_ids : sequence of int
            The sequence: a list, or any other form that `kvsplice.Matcher.register` takes.
        token_hashes : sequence of bytes
            The storage key of each full chunk.
        start_chunk_idx : int
            The first chunk to index.
        position_offset : int
            Position of ``token_ids[0]`` when it was stored.

        Returns
        -------
        int
            How many chunks were newly indexed. 0 if ``start_chunk_idx`` lies beyond the last full chunk.

        Raises
        ------
        ValueError, TypeError
            An argument can't be right; the message names it as `kvsplice.Matcher.register` does. Nothing was indexed.
        """
        if start_chunk_idx >= len(token_ids) // self.matcher.chunk_size:
            # LMCache's looks at nothing else in this case, a list of chunk hashes that is too short included.
            return 0
        return self.matcher.register(token_ids, token_hashes, start_chunk_idx, position_offset, self.scope)

    def match_sub_sequence(self, token_ids: Any) -> list[MatchResult]:
        """Find the stored chunks that occur in a query, at any offset.

        Parameters
        ----------
        token_ids : sequence of int
            The query, in any form that `kvsplice.Matcher.match` takes.

        Returns
        -------
        list
            Each text that occurs, once, at its first offset and under the chunk hash registered last, in order of
            ``cur_st``: LMCache's ``CBMatchResult`` if it is installed, else `CBMatchResult`.
        """
        result = self._result_type
        matches = self.matcher.match(token_ids, self.scope)
        return [
            result(old_st=old_start, old_ed=old_end, cur_st=cur_start, cur_ed=cur_end, hash=chunk_hash)
            for old_start, old_end, cur_start, cur_end, chunk_hash in matches
        ]

    def remove_chunks(self, token_hashes: Sequence[bytes]) -> None:
        """Evict the given chunks; unknown ones are ignored."""
        self.matcher.remove(token_hashes, self.scope)

    def __repr__(self) -> str:
        return f"<TokenRangeMatcher over {self.matcher!r} scope={self.scope!r}>"
