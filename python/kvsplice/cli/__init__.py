"""The ``kvsplice`` command."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from kvsplice.cli.arguments import make_parser
from kvsplice.cli.commands import run_demo, run_doctor, run_replay
from kvsplice.cli.errors import CliError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = {"demo": run_demo, "doctor": run_doctor, "replay": run_replay}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments without the program's name; by default the process's.

    Returns
    -------
    int
        0, 1 if `kvsplice doctor` or a replay with an engine found something broken, 2 after an error that the user can
        mend (one line on stderr says which), 130 after an interrupt, 141 if the reader of stdout went away.
    """
    logging.basicConfig(format="kvsplice: %(message)s", level=logging.WARNING)
    try:
        arguments = make_parser().parse_args(argv)
        code = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
    except CliError as error:
        # A line break in a file name must not make two lines of it.
        print("kvsplice:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    except SystemExit as done:  # argparse, after --help and --version
        return int(done.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code
