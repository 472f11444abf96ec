"""Token ids as they are: ``{"tokens": [1, 2, …]}``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.cli.errors import BadLineError
from kvsplice.cli.record import field_of, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["integer_list", "plain_tokens"]

_MAX_TOKEN = (1 << 32) - 1


def integer_list(record: dict[str, Any], field: str, maximum: int) -> list[int]:
    """Return a field that must be a list of integers from 0 to ``maximum``; the error names the first that is not."""
    values = field_of(record, field)
    if not isinstance(values, list):
        raise BadLineError(f'field "{field}" is not a list but {kind_of(values)}')
    # The exact type, since True is an int to isinstance and to numpy.
    if not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= maximum):
        return values
    for index, value in enumerate(values):
        where = f'field "{field}", index {index}'
        if type(value) is not int:
            raise BadLineError(f"{where}: not an integer but {kind_of(value)}")
        if value < 0:
            raise BadLineError(f"{where}: {_shown(value)} is negative")
        if value > maximum:
            raise BadLineError(f"{where}: {_shown(value)} is over {maximum.bit_length()} bits")
    raise AssertionError("no bad value in a list that failed its check")


def _shown(value: int) -> str:
    return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"


def plain_tokens(record: dict[str, Any]) -> NDArray[np.uint32]:
    """Return the tokens of an object of format ``tokens``."""
    return np.array(integer_list(record, "tokens", _MAX_TOKEN), dtype=np.uint32)
