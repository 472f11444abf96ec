"""Answers reorder requests by LMCache's own planner, with our matcher's hits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from lmcache.v1.multiprocess.modules.blend import reorder

from kvsplice.ports import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvsplice.matcher import Matcher

__all__ = ["Reorder"]

logger = logging.getLogger(__name__)


class Reorder:
    """What is stored, prompt by prompt, for LMCache's planner.

    Parameters
    ----------
    context : lmcache.v1.multiprocess.engine_context.MPCacheServerContext
    matcher : Matcher
    """

    def __init__(self, context: Any, matcher: Matcher) -> None:
        self._hasher = context.token_hasher
        self._sessions = context.session_manager
        self._chunk_size: int = context.chunk_size
        self._matcher = matcher
        self._prompts = reorder.PromptStore()

    def record(self, key: Any) -> None:
        """A prompt of which something was stored."""
        try:
            session = self._sessions.get_or_create(key.request_id)
            chain = [self._hasher.hash_to_bytes(each) for each in session.get_hashes(0, key.end)]
            namespace = (key.model_name, key.world_size, key.cache_salt)
            self._prompts.record(namespace, key.request_id, key.token_ids, chain)
        except Exception:
            logger.exception("reorder: the prompt of %s was not recorded", key.request_id)

    def plan(self, key: Any, keep_prefix: int, budget_ms: int) -> list[int]:
        """The prompt's tokens so that they begin with a copy of a stored prompt; empty to leave them as they are."""
        deadline = time.monotonic() + budget_ms / 1e3
        tokens = list(key.token_ids)
        try:
            namespace = self._prompts.resolve(key.model_name, key.world_size, key.cache_salt)
            if namespace is None:
                return []
            candidates, base = self._prompts.candidates(
                namespace, self._hits(tokens, namespace), self._hasher.compute_chunk_hashes(tokens)
            )
            order = reorder.plan(tokens, candidates, self._chunk_size, base, deadline, keep_prefix)
        except Exception:
            logger.exception("reorder: no plan for request %s", key.request_id)
            return []
        return [tokens[index] for index in order] if order else []

    def _hits(self, tokens: list[int], namespace: tuple[str, int, str]) -> Sequence[bytes]:
        model_name, world_size, cache_salt = namespace
        scope = Request("", (), model_name, world_size, cache_salt).scope
        return self._matcher.match(tokens, scope=scope).chunk_hashes
