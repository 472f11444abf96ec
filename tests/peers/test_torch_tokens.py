"""Torch tensors as tokens."""

import pytest
import torch

from kvsplice import Matcher

A = [1, 2, 3, 4]
KEYS = [b"aaaaaaaa", b"bbbbbbbb"]

KINDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FORMS = {
    **{kind: lambda tokens, kind=kind: torch.tensor(tokens, dtype=getattr(torch, kind)) for kind in KINDS},
    "every second": lambda tokens: torch.tensor([token for token in tokens for _ in range(2)])[::2],
    "column": lambda tokens: torch.tensor([tokens, tokens], dtype=torch.int32).T[:, 1],
    "items": lambda tokens: list(torch.tensor(tokens)),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form):
    matcher = Matcher(4)
    assert matcher.register(FORMS[form](A), KEYS) == 1
    assert [tuple(match) for match in matcher.match(FORMS[form]([9, *A]))] == [(0, 4, 1, 5, KEYS[0])]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (torch.tensor([1, -2, 3, -4]), ValueError, r"tokens\[1\] is negative: -2"),
        (torch.tensor([1, -2, 3, -4], dtype=torch.int32), ValueError, r"tokens\[1\] is negative: -2"),
        (torch.tensor([1, 2, 2**32, 4]), ValueError, r"tokens\[2\] does not fit 32 bits: 4294967296"),
        (torch.tensor([A, A]), ValueError, "tokens must be one-dimensional, not 2-dimensional"),
        (torch.tensor(1), ValueError, "tokens must be one-dimensional, not 0-dimensional"),
        (torch.tensor(A, dtype=torch.float32), TypeError, "tokens must hold integers, not float32"),
        (torch.tensor([True] * 4), TypeError, "tokens must hold integers, not bool"),
        (torch.tensor(A, device="meta"), (TypeError, ValueError), "tokens"),
        (torch.tensor(A, dtype=torch.bfloat16), TypeError, "tokens"),
    ],
)
def test_bad_tensor(tokens, error, message):
    matcher = Matcher(4)
    with pytest.raises(error, match=message):
        matcher.register(tokens, KEYS)
    with pytest.raises(error, match=message):
        matcher.match(tokens)
    assert len(matcher) == 0
