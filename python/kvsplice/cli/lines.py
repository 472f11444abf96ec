"""Lines of a plain or gzip-compressed file, with a bound on their length."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from typing import IO, TYPE_CHECKING, cast

from kvsplice.cli.errors import BadLineError, CliError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["MAX_LINE_BYTES", "STDIN", "LineReader"]

MAX_LINE_BYTES = 64 << 20
"""Longer lines are refused unread. JSON of this size can take some 1.5 GB as Python objects; a request of ten million
tokens fits."""

STDIN = "-"

_GZIP_MAGIC = b"\x1f\x8b"
_DRAIN_BYTES = 1 << 20


class LineReader:
    """Reads one line at a time and can go on after a line that was too long.

    Parameters
    ----------
    path : str
        A file, or ``-`` for standard input. Compression is told from the first two bytes, not from the name.
    max_line_bytes : int
        The longest line that is read.

    Attributes
    ----------
    name : str
        The name to show in messages.
    number : int
        Number of the line read last, from 1; 0 before the first.
    """

    def __init__(self, path: str, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.name = "<stdin>" if path == STDIN else path
        self.number = 0
        self._max = max_line_bytes
        self._inside_long_line = False
        self._owned = path != STDIN
        try:
            # Closed by close(): the reader outlives this call.
            self._raw = cast("io.BufferedReader", open(path, "rb") if self._owned else sys.stdin.buffer)  # noqa: PTH123, SIM115
            compressed = self._raw.peek(2)[:2] == _GZIP_MAGIC
        except OSError as error:
            raise CliError(f"{self.name}: {error.strerror or error}") from error
        self._lines: IO[bytes] = io.BufferedReader(gzip.GzipFile(fileobj=self._raw)) if compressed else self._raw

    def next_line(self) -> bytes | None:
        """Return the next line with its newline, or None at the end.

        Raises
        ------
        BadLineError
            The line is too long. The next call goes on behind it.
        CliError
            The file cannot be read any further.
        """
        try:
            if self._inside_long_line:
                self._drain()
            line = self._lines.readline(self._max + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise CliError(f"{self.name}:{self.number + 1}: damaged gzip data: {error}") from error
        except OSError as error:
            raise CliError(f"{self.name}:{self.number + 1}: {error.strerror or error}") from error
        if not line:
            return None
        self.number += 1
        if len(line) > self._max:
            self._inside_long_line = not line.endswith(b"\n")
            raise BadLineError(f"the line is longer than {self._max:,} bytes")
        return line

    def _drain(self) -> None:
        while (piece := self._lines.readline(_DRAIN_BYTES)) and not piece.endswith(b"\n"):
            pass
        self._inside_long_line = False

    def position(self) -> int:
        """Return how many bytes of the file were taken in, compressed if it is; 0 if the file cannot tell."""
        try:
            return self._raw.tell()
        except OSError:
            return 0

    def close(self) -> None:
        """Close the file, unless it is standard input."""
        if self._owned:
            self._lines.close()
            self._raw.close()

    def __enter__(self) -> LineReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
