"""Integers from outside, with an error that names the argument."""

from __future__ import annotations

import operator
from typing import Any


def as_integer(value: Any, argument: str) -> int:
    """The value as an int; numpy's and torch's integers are fine.

    Raises
    ------
    TypeError
        If it is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{argument}: expected an integer, not {type(value).__name__}") from None
