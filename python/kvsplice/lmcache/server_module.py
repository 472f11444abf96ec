r"""The factory that ``lmcache server --server-module`` calls, for LMCache 0.5.6 and later.

    lmcache server --engine-type blend … \
        --server-module '{"module_path": "kvsplice.lmcache", "config": {"mode": "matcher"}}'

What a server module is: ``lmcache.v1.multiprocess.ext_server_module``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvsplice import __version__
from kvsplice.lmcache.settings import Settings

if TYPE_CHECKING:
    from kvsplice.lmcache.matcher import TokenRangeMatcher

__all__ = ["MatcherModule", "build_server_modules"]

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.5.6",)


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


def build_server_modules(build: Any) -> Any:
    """Put our matcher into the server's blend module, or make our engine's module.

    Parameters
    ----------
    build : lmcache.v1.multiprocess.ext_server_module.ExtServerModuleBuildContext

    Returns
    -------
    MatcherModule or kvsplice.lmcache.module.handlers.EngineModule

    Raises
    ------
    ValueError
        If the configuration is wrong.
    RuntimeError
        If the server is not one that this mode knows; the message says what to do.
    """
    settings = Settings.read(build.config)
    if settings.mode == "module":
        # Imports LMCache, which is there: it is calling.
        from kvsplice.lmcache.module.factory import make_module

        return make_module(build, settings)
    return _put_matcher(build, settings)


def _put_matcher(build: Any, settings: Settings) -> MatcherModule:
    blend = _blend_module(build.modules)
    theirs = blend._token_range_matcher
    if build.mp_config.chunk_size != theirs.chunk_size:
        raise RuntimeError(f"the blend module has chunks of {theirs.chunk_size} tokens, the server of others")
    ours = settings.matcher(theirs.chunk_size, bool(getattr(theirs, "_dedup_content", False)))
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
