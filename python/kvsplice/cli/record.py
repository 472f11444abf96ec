"""One line of JSON to one checked object, and the words for what was wrong with it."""

from __future__ import annotations

import json
from typing import Any

from kvsplice.cli.errors import BadLineError

__all__ = ["field_of", "kind_of", "parse_record", "scope_of"]

Record = dict[str, Any]

_KINDS = {bool: "a boolean", int: "an integer", float: "a fraction", str: "a string", list: "a list", dict: "an object"}


def kind_of(value: object) -> str:
    """Name the JSON type of a parsed value."""
    return "null" if value is None else _KINDS[type(value)]


def parse_record(line: bytes) -> Record:
    """Parse one line, which must be a JSON object in UTF-8.

    Raises
    ------
    BadLineError
        It is not.
    """
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadLineError(f"invalid UTF-8 at byte {error.start + 1}") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadLineError(f"not JSON: {error.msg} at column {error.pos + 1}") from None
    except RecursionError:
        raise BadLineError("not usable JSON: nested too deeply") from None
    except ValueError as error:  # an integer of thousands of digits
        raise BadLineError(f"not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadLineError(f"not a JSON object but {kind_of(value)}")
    return value


def field_of(record: Record, name: str) -> Any:
    """Return a field that must be there."""
    try:
        return record[name]
    except KeyError:
        raise BadLineError(f'field "{name}" is missing') from None


def scope_of(record: Record, name: str) -> bytes:
    """Return the scope that a field stands for: a string's own bytes, any other value as compact JSON."""
    value = field_of(record, name)
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
    # A lone surrogate is legal in JSON; a scope is only compared, so it may pass.
    return text.encode("utf-8", "surrogatepass")
