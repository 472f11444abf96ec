"""``python -m kvsplice.lmcache server``: an LMCache server of 0.4.7 to 0.5.5 with our matcher.

Those versions have no server modules. Their server is started as it is, after the name of its matcher's class was bound
to ours; what is not about that is LMCache's own, its arguments included.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import runpy
import sys
from typing import TYPE_CHECKING

from kvsplice import __version__
from kvsplice.lmcache.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvsplice.lmcache.matcher import TokenRangeMatcher

__all__ = ["main", "replace_matcher"]

logger = logging.getLogger(__name__)

_MODULES = "lmcache.v1.multiprocess.modules"
_V3 = (f"{_MODULES}.blend_v3", "BlendTokenRangeMatcherV3")
MATCHERS = dict.fromkeys(("0.4.7", "0.5.0", "0.5.1", "0.5.2", "0.5.3", "0.5.4"), _V3) | {
    "0.5.5": (f"{_MODULES}.blend.module", "BlendTokenRangeMatcher")
}
"""By version: the module whose server uses a matcher, and the name under which it does."""

_SERVER = "lmcache.v1.multiprocess.http_server"

_USAGE = f"""usage: python -m kvsplice.lmcache server [--kvsplice JSON] ARGUMENTS

Starts this environment's LMCache server ({", ".join(MATCHERS)}) with kvsplice's matcher
in its blend module; ARGUMENTS are those of `lmcache server`, among them --engine-type blend.
JSON: {{"capacity": chunks, "on_full": "evict" or "reject", "seed": integer}}, each optional.
For LMCache 0.5.6 and later use `lmcache server --server-module` (docs/lmcache.md)."""


class _Refusal(Exception):
    """Why nothing is started; the message is for the operator."""


def main(argv: Sequence[str] | None = None) -> int:
    """Start the server, and return when it has ended.

    Parameters
    ----------
    argv : sequence of str, optional
        Without the program's name; by default the process's.

    Returns
    -------
    int
        0, or 2 with a line on stderr that says why nothing was started.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments in (["-h"], ["--help"]):
        print(_USAGE)
        return 0
    try:
        if not arguments or arguments[0] != "server":
            raise _Refusal(f"the command has to be 'server'\n{_USAGE}")
        config, rest = _own_arguments(arguments[1:])
        try:
            settings = Settings.read({"mode": "matcher", **config})
            if settings.mode != "matcher":
                raise ValueError("mode 'module' needs LMCache 0.5.6: lmcache server --server-module (docs/lmcache.md)")
        except ValueError as error:
            raise _Refusal(f"--kvsplice: {error}") from None
        replace_matcher(settings)
    except _Refusal as refusal:
        print(f"kvsplice: {refusal}", file=sys.stderr)
        return 2
    sys.argv = ["lmcache server", *rest]
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)
    return 0


def _own_arguments(arguments: list[str]) -> tuple[dict[str, object], list[str]]:
    """Our configuration, and what is LMCache's."""
    rest, config = [], "{}"
    remaining = iter(arguments)
    for argument in remaining:
        name, given, value = argument.partition("=")
        if name != "--kvsplice":
            rest.append(argument)
        elif given:
            config = value
        else:
            config = next(remaining, "")
    try:
        read = json.loads(config)
    except json.JSONDecodeError as error:
        raise _Refusal(f"--kvsplice: {config!r} is not JSON ({error})") from None
    if not isinstance(read, dict):
        raise _Refusal(f"--kvsplice: {config!r} is no JSON object")
    return read, rest


def replace_matcher(settings: Settings) -> None:
    """Let this environment's LMCache make our matcher where it would make its own."""
    if importlib.util.find_spec("lmcache") is None:
        raise _Refusal("there is no LMCache in this environment")
    version = importlib.import_module("lmcache").__version__
    if version not in MATCHERS:
        newer = _numbers(version) > _numbers(max(MATCHERS, key=_numbers))
        advice = "use lmcache server --server-module (docs/lmcache.md)" if newer else "it is not known to kvsplice"
        raise _Refusal(f"this is LMCache {version}: {advice}; here {', '.join(MATCHERS)} can be started")
    module_name, name = MATCHERS[version]
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise _Refusal(f"this LMCache {version} has no {module_name}.{name}: it is not the published one")

    def make(chunk_size: int = 256, dedup_content: bool = False) -> TokenRangeMatcher:
        matcher = settings.matcher(chunk_size, dedup_content)
        logger.warning("kvsplice %s: the blend module of LMCache %s matches with %r", __version__, version, matcher)
        return matcher

    setattr(module, name, make)


def _numbers(version: str) -> tuple[int, ...]:
    """0.5.6.dev1 as (0, 5, 6)."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
