"""Mooncake-style traces for the tests, and what a replay of one must find, counted over the ids alone."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK = 512

REAL_TRACES = sorted((Path(__file__).resolve().parents[2] / "shared" / "data").glob("mooncake_*_trace.jsonl"))
"""Public traces, where they are at hand beside the checkout."""


def made_up_trace(seed: int, requests: int = 120) -> list[dict]:
    """Requests that extend a beginning of an earlier one, as the traces' do: shared blocks, then new ones."""
    chance = random.Random(seed)
    fresh = iter(range(1 << 20))
    trace: list[dict] = []
    for _ in range(requests):
        parent = chance.choice(trace)["hash_ids"] if trace and chance.random() < 0.8 else []
        ids = parent[: chance.randint(0, len(parent))] + [next(fresh) for _ in range(chance.randint(0, 6))]
        # The last block is cut anywhere, also one that stands whole in another request.
        cut = chance.choice([0, 0, chance.randint(0, BLOCK - 1)]) if ids else 0
        trace.append({"timestamp": 0, "input_length": BLOCK * len(ids) - cut, "output_length": 1, "hash_ids": ids})
    return trace


def write_jsonl(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def read_jsonl(path: Path, limit: int) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(limit), strict=False)]


@dataclass
class Prediction:
    """Tokens of each request that a replay must find."""

    prefix: list[int]
    other: list[int]
    entries: int


def predict(trace: list[dict], preambles: list[int], chunk: int, *, index_first: bool = True) -> Prediction:
    """Count reuse by brute force over (hash id, offset in its block) and unique preamble symbols, never over tokens.

    A chunk counts as prefix if it and all before it were a request's beginning before. From there on the walk takes
    each window that is a chunk of an earlier request, at any offset, and goes on behind it. An engine does not index a
    request's first chunk (`index_first`): it is found as a prefix.
    """
    stored: set[bytes] = set()
    chains: dict[tuple[int, bytes], int] = {}
    result = Prediction([], [], 0)
    unique = -1
    for record, preamble in zip(trace, preambles, strict=True):
        blocks = np.array(record["hash_ids"], dtype=np.int64)[:, None] * BLOCK + np.arange(BLOCK)
        front = np.arange(unique, unique - preamble, -1)
        unique -= preamble
        symbols = np.concatenate([front, blocks.reshape(-1)[: record["input_length"]]]).tobytes()
        step = 8 * chunk
        chunks = [symbols[at : at + step] for at in range(0, len(symbols) - step + 1, step)]

        parent = found = 0
        while found < len(chunks) and (parent := chains.get((parent, chunks[found]), 0)):
            found += 1
        result.prefix.append(found * chunk)

        other, at = 0, found * step
        while at + step <= len(symbols):
            if symbols[at : at + step] in stored:
                other += chunk
                at += step
            else:
                at += 8
        result.other.append(other)

        stored.update(chunks[0 if index_first else 1 :])
        parent = 0
        for window in chunks:
            parent = chains.setdefault((parent, window), len(chains) + 1)
    result.entries = len(chains)
    return result
