"""The input formats: how a JSON object becomes the tokens of a request.

Each format has a module with one function from the object to a uint32 array. ``kvsplice replay`` knows a format by
a field that its objects have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvsplice.cli.errors import BadLineError
from kvsplice.cli.formats.chat import chat_text
from kvsplice.cli.formats.mooncake import mooncake_tokens
from kvsplice.cli.formats.text import plain_text
from kvsplice.cli.formats.tokens import plain_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvsplice.cli.tokenizer import TextTokenizer

    Reader = Callable[[dict[str, Any]], NDArray[np.uint32]]

__all__ = ["FORMATS", "TEXT_FORMATS", "detect", "reader_of"]

FORMATS = ("tokens", "text", "chat", "mooncake")

TEXT_FORMATS = ("text", "chat")
"""Formats that need a tokenizer."""

_FIELDS = {"hash_ids": "mooncake", "tokens": "tokens", "messages": "chat", "text": "text", "prompt": "text"}


def detect(record: dict[str, Any]) -> str:
    """Tell the format from the fields of an object; the first of ``_FIELDS`` that is there decides."""
    for field, name in _FIELDS.items():
        if field in record:
            return name
    known = ", ".join(f'"{field}"' for field in _FIELDS)
    raise BadLineError(f"no field tells the format: none of {known} is there")


def reader_of(name: str, tokenizer: TextTokenizer | None) -> Reader:
    """Return the function that turns an object of the format into tokens.

    Parameters
    ----------
    name : str
        One of `FORMATS`.
    tokenizer : TextTokenizer, optional
        Needed for `TEXT_FORMATS`.
    """
    if name == "tokens":
        return plain_tokens
    if name == "mooncake":
        return mooncake_tokens
    if tokenizer is None:
        raise ValueError(f"format {name} needs a tokenizer")
    encode = tokenizer.encode
    if name == "text":
        return lambda record: encode(plain_text(record), add_special_tokens=True)
    # The chat template writes the special tokens itself, so the tokenizer must not add its own.
    return lambda record: encode(chat_text(record), add_special_tokens=False)
