r"""The factory that ``lmcache server --server-module`` calls, for LMCache 0.5.6 and later.

    lmcache server --engine-type blend … \
        --server-module '{"module_path": "kvsplice.lmcache", "config": {"mode": "matcher"}}'

What a server module is: ``lmcache.v1.multiprocess.ext_server_module``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvsplice import __version__
from kvsplice.lmcache.matcher import TokenRangeMatcher

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MatcherModule", "build_server_modules"]

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.6",)

OnFull = Literal["evict", "reject"]


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
        if settings.mode != "matcher":
            raise ValueError(f"config: mode is {settings.mode!r}; it has to be 'matcher'")
        if type(settings.capacity) is not int or not 1 <= settings.capacity <= 1 << 30:
            raise ValueError(f"config: capacity is {settings.capacity!r}, no number of chunks from 1 to 2**30")
        if settings.on_full not in get_args(OnFull):
            raise ValueError(f"config: on_full is {settings.on_full!r}, none of {', '.join(get_args(OnFull))}")
        if settings.seed is not None and (type(settings.seed) is not int or not 0 <= settings.seed < 1 << 64):
            raise ValueError(f"config: seed is {settings.seed!r}, no integer from 0 to 2**64 - 1")
        return settings


class MatcherModule:
    """Stands for kvsplice among the server's modules: it answers for the matcher on the status page."""

    def __init__(self, context: Any, matcher: TokenRangeMatcher) -> None:
        self.context = context
        self._matcher = matcher

    def report_status(self) -> dict[str, Any]:
        """For ``GET /status``."""
        return {
            "kvsplice": {
                "version": __version__,
                "mode": "matcher",
                "matcher": self._matcher.matcher.stats()._asdict(),
            }
        }

    def close(self) -> None:
        """Nothing is to be released."""


def build_server_modules(build: Any) -> MatcherModule:
    """Put our matcher into the server's blend module.

    Parameters
    ----------
    build : lmcache.v1.multiprocess.ext_server_module.ExtServerModuleBuildContext

    Returns
    -------
    MatcherModule

    Raises
    ------
    ValueError
        If the configuration is wrong.
    RuntimeError
        If the server has no blend module, or one whose matcher is not known.
    """
    settings = Settings.read(build.config)
    blend = _blend_module(build.modules)
    theirs = blend._token_range_matcher
    if build.mp_config.chunk_size != theirs.chunk_size:
        raise RuntimeError(f"the blend module has chunks of {theirs.chunk_size} tokens, the server of others")
    ours = TokenRangeMatcher(
        theirs.chunk_size,
        bool(getattr(theirs, "_dedup_content", False)),
        capacity=settings.capacity,
        on_full=settings.on_full,
        seed=settings.seed,
    )
    # The server takes no request yet: nothing is registered that would be lost.
    blend._token_range_matcher = ours
    logger.warning("kvsplice %s: the blend module matches with %r", __version__, ours)
    if getattr(blend, "_coordinator", None) is not None:
        logger.warning("kvsplice: with a coordinator the blend module asks that, and not its matcher")
    return MatcherModule(build.server_context, ours)


def _blend_module(modules: Any) -> Any:
    """The blend module, if its matcher is what ours can stand for."""
    for module in modules:
        matcher = getattr(module, "_token_range_matcher", None)
        if matcher is not None:
            break
    else:
        raise RuntimeError("kvsplice, mode matcher: the server has no blend module; start it with --engine-type blend")
    methods = ("on_new_token_hashes", "match_sub_sequence", "remove_chunks")
    if missing := [name for name in (*methods, "chunk_size") if not hasattr(matcher, name)]:
        raise RuntimeError(
            f"kvsplice does not know this LMCache's matcher (no {', '.join(missing)}); "
            f"it was tested with {', '.join(TESTED_VERSIONS)}"
        )
    from lmcache import __version__ as version

    if version not in TESTED_VERSIONS:
        logger.warning("kvsplice was tested with lmcache %s, not %s", ", ".join(TESTED_VERSIONS), version)
    return module
