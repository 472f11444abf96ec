"""The command line's arguments."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NoReturn

from kvsplice import __version__
from kvsplice.cli.engine_replay import EngineSettings
from kvsplice.cli.errors import CliError
from kvsplice.cli.formats import FORMATS
from kvsplice.cli.synthetic import MODEL_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["make_parser"]

_DEFAULT_CAPACITY = 1 << 20


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line like every other error, where argparse would print the usage first.
        raise CliError(f"{message} (see {self.prog} --help)")


def _integer(minimum: int, maximum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{value} is not between {minimum:,} and {maximum:,}")
        return value

    return parse


def _even(minimum: int, maximum: int) -> Callable[[str], int]:
    parse = _integer(minimum, maximum)

    def parse_even(text: str) -> int:
        value = parse(text)
        if value % 2:
            raise argparse.ArgumentTypeError(f"{value} is odd")
        return value

    return parse_even


_chunk_size = _integer(1, 65536)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="kvsplice", description="Reuses cached KV at any offset of a prompt.")
    parser.add_argument("--version", action="version", version=f"kvsplice {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_replay(commands)
    _add_demo(commands)
    _add_doctor(commands)
    return parser


def _add_replay(commands: argparse._SubParsersAction[_Parser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="replay a workload and report what non-prefix reuse would give",
        description="Replays requests in order: each is matched against all that came before it, counted, and stored.",
    )
    add = replay.add_argument
    add("files", nargs="+", metavar="FILE", help="JSONL, plain or gzip; - is standard input")
    add("--format", choices=FORMATS, help="format of all files (default: told from each file's first line)")
    add("--tokenizer", metavar="FILE", help="a Hugging Face tokenizer.json, for text and chat")
    add("--scope-field", metavar="NAME", help="requests that differ in this field share nothing (e.g. a tenant)")
    add("--chunk-size", type=_chunk_size, default=256, metavar="N", help="tokens per chunk (default: %(default)s)")
    add(
        "--capacity",
        type=_integer(1, 1 << 30),
        default=_DEFAULT_CAPACITY,
        metavar="N",
        help="the most chunks held at once; beyond it the longest unused goes (default: %(default)s)",
    )
    add("--limit", type=_integer(1, 1 << 62), metavar="N", help="stop after this many requests")
    add(
        "--threads",
        type=_integer(1, 256),
        default=1,
        metavar="N",
        help="match each request in N threads at once; changes latencies, never counts (default: %(default)s)",
    )
    add("--shift", action="store_true", help="put a preamble of 1 to 512 unique tokens before each request")
    add(
        "--seed",
        type=_integer(0, (1 << 64) - 1),
        default=0,
        metavar="N",
        help="seed of the preamble lengths and the matcher (default: %(default)s)",
    )
    add("--first-occurrence", action="store_true", help="count a text once per request, as LMCache's lookup does")
    add("--skip-bad", action="store_true", help="pass over unusable lines and count them")
    add("--plot", metavar="FILE.png", help="draw reuse and latency over the run")
    _add_output(replay)
    _add_engine(replay)


def _add_engine(replay: argparse.ArgumentParser) -> None:
    """Options of an engine; the defaults are `EngineSettings`', so that one that was given can be told."""
    group = replay.add_argument_group(
        "with an engine", "store KV of a synthetic model, look it up, splice it into a paged cache, check every byte"
    )
    group.add_argument("--engine", action="store_true", help="run the whole pipeline, not the matcher alone")

    def add(name: str, default: object, text: str, **rest: Any) -> None:
        group.add_argument(name, help=f"{text} (default: {default})", **rest)

    of = EngineSettings()
    add("--device", of.device, "where the paged cache is; cuda needs CuPy", choices=("cpu", "cuda"))
    add("--layers", of.layers, "of the model", type=_integer(1, 512), metavar="N")
    add("--heads", of.heads, "KV heads of the model", type=_integer(1, 512), metavar="N")
    add("--head-size", of.head_size, "elements per head, even", type=_even(2, 512), metavar="N")
    add("--dtype", of.dtype, "of the KV", choices=MODEL_DTYPES)
    add("--cache-tokens", of.cache_tokens, "the longest prompt", type=_integer(1, 1 << 24), metavar="N")
    add("--memory-bytes", of.memory_bytes, "host memory for stored KV", type=_integer(0, 1 << 50), metavar="N")
    add("--disk", "none", "a folder for stored KV, behind the memory", metavar="FOLDER")
    add("--disk-bytes", of.disk_bytes, "of the disk that may be used", type=_integer(0, 1 << 50), metavar="N")
    group.add_argument(
        "--segmented-prefix", action="store_true", default=None, help="keep a prompt's own chunks behind a missing one"
    )


def _add_demo(commands: argparse._SubParsersAction[_Parser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="replay the bundled workload",
        description="Replays three bundled workloads of real text, made from the documentation of Python.",
    )
    demo.add_argument("--chunk-size", type=_chunk_size, default=256, metavar="N", help="default: %(default)s")
    _add_output(demo)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="tell what this machine can do",
        description="Tells what is installed, which kernels load, and whether splices on the CPU and on each GPU come "
        "out right. Exits with 1 if something is broken; what is merely missing is no error.",
    )
    doctor.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
