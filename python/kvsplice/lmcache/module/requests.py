"""LMCache's request keys, as the engine's requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsplice.ports import Request

__all__ = ["KeyedRequest"]


@dataclass(frozen=True)
class KeyedRequest(Request):
    """A request that knows the key it came as.

    Attributes
    ----------
    key : lmcache.v1.multiprocess.custom_types.IPCCacheServerKey
    """

    key: Any = None

    @classmethod
    def of(cls, key: Any) -> KeyedRequest:
        """The request of a key."""
        return cls(
            request_id=key.request_id,
            tokens=key.token_ids,
            model_name=key.model_name,
            world_size=key.world_size,
            cache_salt=key.cache_salt,
            worker_id=key.worker_id,
            start=key.start,
            end=key.end,
            key=key,
        )
