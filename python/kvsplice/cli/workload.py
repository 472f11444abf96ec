"""The requests of some files, in order."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvsplice.cli.errors import BadLineError, CliError
from kvsplice.cli.formats import TEXT_FORMATS, detect, reader_of
from kvsplice.cli.lines import STDIN, LineReader
from kvsplice.cli.record import parse_record, scope_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kvsplice.cli.formats import Reader
    from kvsplice.cli.tokenizer import TextTokenizer

__all__ = ["Request", "Workload", "check_files"]


class Request(NamedTuple):
    """One prompt."""

    tokens: NDArray[np.uint32]
    """Shape ``(n,)``."""
    scope: bytes
    """Requests of different scopes share nothing."""


def check_files(paths: list[str]) -> None:
    """Raise `CliError` for the first path that is no readable file, before any work is done.

    Looks only, since opening a pipe twice would lose what is in it.
    """
    for path in paths:
        if path == STDIN:
            continue
        try:
            mode = Path(path).stat().st_mode
        except (OSError, ValueError) as error:
            raise CliError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
        if stat.S_ISDIR(mode):
            raise CliError(f"{path}: is a directory")
        if not os.access(path, os.R_OK):
            raise CliError(f"{path}: permission denied")


class Workload:
    """Iterates over the requests of files and keeps count of what it left out.

    Parameters
    ----------
    paths : list of str
        JSONL files, plain or gzip; ``-`` is standard input. Blank lines are passed over.
    format_name : str, optional
        One of `kvsplice.cli.formats.FORMATS`. By default each file's first usable line tells.
    tokenizer : TextTokenizer, optional
        For text formats.
    scope_field : str, optional
        The field whose value is the scope. By default all requests share one.
    skip_bad : bool
        Pass over unusable lines instead of raising.
    on_progress : callable, optional
        Called with the bytes taken in so far over all files, after each line.

    Attributes
    ----------
    formats : dict of str to str
        The format of each file read so far.
    skipped : int
        Lines passed over as unusable.
    first_skipped : str or None
        Place and reason of the first of them.
    """

    def __init__(
        self,
        paths: list[str],
        format_name: str | None = None,
        tokenizer: TextTokenizer | None = None,
        scope_field: str | None = None,
        skip_bad: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.formats: dict[str, str] = {}
        self.skipped = 0
        self.first_skipped: str | None = None
        self._paths = paths
        self._format_name = format_name
        self._tokenizer = tokenizer
        self._scope_field = scope_field
        self._skip_bad = skip_bad
        self._on_progress = on_progress

    def __iter__(self) -> Iterator[Request]:
        done = 0
        for path in self._paths:
            with LineReader(path) as lines:
                yield from self._requests(lines, done)
                done += lines.position()

    def _requests(self, lines: LineReader, done: int) -> Iterator[Request]:
        reader: Reader | None = None
        used = skipped = 0
        while True:
            try:
                line = lines.next_line()
                if line is None:
                    break
                if not line.strip():
                    continue
                record = parse_record(line)
                if reader is None:
                    reader = self._reader(lines, self._format_name or detect(record))
                scope = b"" if self._scope_field is None else scope_of(record, self._scope_field)
                request = Request(reader(record), scope)
            except BadLineError as error:
                self._skip(f"{lines.name}:{lines.number}: {error}")
                skipped += 1
                continue
            used += 1
            yield request
            if self._on_progress is not None:
                self._on_progress(done + lines.position())
        if not used:
            reason = f"no usable line, {skipped:,} skipped" if skipped else "no request in it: the file is empty"
            raise CliError(f"{lines.name}:{max(lines.number, 1)}: {reason}")

    def _reader(self, lines: LineReader, format_name: str) -> Reader:
        if format_name in TEXT_FORMATS and self._tokenizer is None:
            raise CliError(f"{lines.name}:{lines.number}: format {format_name} needs --tokenizer tokenizer.json")
        self.formats[lines.name] = format_name
        return reader_of(format_name, self._tokenizer)

    def _skip(self, message: str) -> None:
        if not self._skip_bad:
            raise CliError(message) from None
        self.skipped += 1
        self.first_skipped = self.first_skipped or message
