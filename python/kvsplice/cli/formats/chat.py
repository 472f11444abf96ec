r"""OpenAI chat requests, ``{"messages": [{"role": …, "content": …}, …]}``, rendered as ChatML.

Each message becomes ``<|im_start|>ROLE\nCONTENT<|im_end|>\n``. Unless the last one is the assistant's, the opening of
the answer follows: ``<|im_start|>assistant\n``. Tool calls are written behind the content as one line of JSON. Other
fields of the request (tool definitions, sampling parameters) are not rendered.
"""

from __future__ import annotations

import json
from typing import Any

from kvsplice.cli.errors import BadLineError
from kvsplice.cli.record import field_of, kind_of

__all__ = ["chat_text"]


def chat_text(record: dict[str, Any]) -> str:
    """Return the rendered text of an object of format ``chat``."""
    messages = field_of(record, "messages")
    if not isinstance(messages, list):
        raise BadLineError(f'field "messages" is not a list but {kind_of(messages)}')
    role = None
    pieces = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadLineError(f"{where} is not an object but {kind_of(message)}")
        role = message.get("role")
        if not isinstance(role, str):
            raise BadLineError(f"{where}.role is not a string" if "role" in message else f"{where}.role is missing")
        pieces.append(f"<|im_start|>{role}\n{_content(message, where)}<|im_end|>\n")
    if role != "assistant":
        pieces.append("<|im_start|>assistant\n")
    return "".join(pieces)


def _content(message: dict[str, Any], where: str) -> str:
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None:
        # A message that only calls tools has no content in OpenAI's format.
        if not calls:
            raise BadLineError(f"{where}.content is missing")
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    else:
        raise BadLineError(f"{where}.content is neither a string nor a list of parts but {kind_of(content)}")
    if calls:
        text += "\n" * bool(text) + json.dumps(calls, ensure_ascii=False)
    return text


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise BadLineError(f"{where} is not an object but {kind_of(part)}")
    if part.get("type") != "text":
        raise BadLineError(f"{where} has type {json.dumps(part.get('type'))}; only text can be replayed")
    text = part.get("text")
    if not isinstance(text, str):
        raise BadLineError(f"{where}.text is not a string but {kind_of(text)}")
    return text
