"""What an operator may say about our matcher in a server of LMCache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvsplice.lmcache.matcher import TokenRangeMatcher

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings"]

OnFull = Literal["evict", "reject"]

MODES = ("matcher", "module")
"""Our matcher in LMCache's blend module, or our engine in its place."""


@dataclass(frozen=True)
class Settings:
    """The keys of ``config``, and their defaults."""

    mode: str = ""
    capacity: int = 1 << 20
    on_full: OnFull = "evict"
    seed: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        """Take them from the flag's JSON.

        Raises
        ------
        ValueError
            One is unknown or wrong; the message says which, and what there is.
        """
        known = [field.name for field in fields(cls)]
        if unknown := config.keys() - set(known):
            raise ValueError(f"config: unknown key {sorted(unknown)[0]!r}; there are {', '.join(known)}")
        settings = cls(**config)
        if settings.mode not in MODES:
            raise ValueError(f"config: mode is {settings.mode!r}; it has to be {' or '.join(map(repr, MODES))}")
        if type(settings.capacity) is not int or not 1 <= settings.capacity <= 1 << 30:
            raise ValueError(f"config: capacity is {settings.capacity!r}, no number of chunks from 1 to 2**30")
        if settings.on_full not in get_args(OnFull):
            raise ValueError(f"config: on_full is {settings.on_full!r}, none of {', '.join(get_args(OnFull))}")
        if settings.seed is not None and (type(settings.seed) is not int or not 0 <= settings.seed < 1 << 64):
            raise ValueError(f"config: seed is {settings.seed!r}, no integer from 0 to 2**64 - 1")
        return settings

    def matcher(self, chunk_size: int = 256, dedup_content: bool = False) -> TokenRangeMatcher:
        """A matcher of these settings, made as LMCache makes its own."""
        return TokenRangeMatcher(
            chunk_size, dedup_content, capacity=self.capacity, on_full=self.on_full, seed=self.seed
        )
