"""Errors that end in one line on stderr instead of a traceback."""

__all__ = ["BadLineError", "CliError"]


class CliError(Exception):
    """The command cannot go on. The message is complete: it names the file, the line or the argument at fault."""


class BadLineError(Exception):
    """One line of input is unusable. The message says why; whoever reads the file knows where."""
