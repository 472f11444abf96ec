"""Plain text: ``{"text": "…"}`` or ``{"prompt": "…"}``."""

from __future__ import annotations

from typing import Any

from kvsplice.cli.errors import BadLineError
from kvsplice.cli.record import field_of, kind_of

__all__ = ["plain_text"]


def plain_text(record: dict[str, Any]) -> str:
    """Return the text of an object of format ``text``; ``text`` goes before ``prompt``."""
    field = "prompt" if "prompt" in record and "text" not in record else "text"
    value = field_of(record, field)
    if not isinstance(value, str):
        raise BadLineError(f'field "{field}" is not a string but {kind_of(value)}')
    return value
