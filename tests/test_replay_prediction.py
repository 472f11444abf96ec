"""The reuse that a replay finds is the reuse that is there."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import pytest

from kvsplice.cli.formats.mooncake import expand
from kvsplice.cli.replay import Replay, Settings
from kvsplice.cli.shift import MAX_PREAMBLE_TOKENS, Preambles
from kvsplice.cli.workload import Request, Workload
from model import ModelMatcher
from traces import BLOCK, REAL_TRACES, made_up_trace, predict, read_jsonl, write_jsonl

PINNED_LENGTHS = [335, 18, 432, 401]


def replay_of(requests, **settings):
    replay = Replay(Settings(**settings))
    replay.run(requests)
    return replay


def check(trace, path, chunk_size, shift, seed=0):
    replay = replay_of(Workload([path]), chunk_size=chunk_size, shift=shift, seed=seed)
    columns = replay.columns()
    preambles = columns["preamble"].tolist()
    assert columns["tokens"].tolist() == [
        record["input_length"] + preamble for record, preamble in zip(trace, preambles, strict=True)
    ]
    expected = predict(trace, preambles, chunk_size)
    assert columns["prefix"].tolist() == expected.prefix
    assert columns["other"].tolist() == expected.other
    assert replay.stats().entries == expected.entries
    return columns


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("chunk_size", [64, 256, 300, 512, 700])
def test_a_made_up_trace_gives_what_its_ids_predict(tmp_path, chunk_size, shift):
    trace = made_up_trace(seed=chunk_size)
    columns = check(trace, write_jsonl(tmp_path / "trace.jsonl", trace), chunk_size, shift, seed=7)
    if shift:
        assert columns["prefix"].sum() == 0
        assert columns["other"].sum() > 0
    else:
        assert columns["prefix"].sum() > 0
        # Equal ids stand behind equal ids, so what is no prefix is nowhere else either.
        assert columns["other"].sum() == 0


@pytest.mark.skipif(not REAL_TRACES, reason="the public traces are not beside the checkout")
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("path", REAL_TRACES, ids=lambda path: path.stem)
def test_a_real_trace_gives_what_its_ids_predict(tmp_path, path, shift):
    # The whole ones take minutes each, nearly all of it for the prediction.
    trace = read_jsonl(path, sys.maxsize if os.environ.get("KVSPLICE_WHOLE_TRACES") else 100)
    columns = check(trace, write_jsonl(tmp_path / "trace.jsonl", trace), 256, shift)
    assert columns["other" if shift else "prefix"].sum() > 0


def test_the_prediction_itself_on_a_case_counted_by_hand():
    trace = [{"hash_ids": [5, 6], "input_length": 1000}, {"hash_ids": [5, 6], "input_length": 1000}]
    plain = predict(trace, [0, 0], 256)
    assert (plain.prefix, plain.other, plain.entries) == ([0, 768], [0, 0], 3)
    # Stored at 100: chunks at block offsets 156, 412 and 668 (and one with the preamble). All three lie in the second.
    shifted = predict(trace, [100, 3], 256)
    assert (shifted.prefix, shifted.other, shifted.entries) == ([0, 0], [0, 768], 7)


def test_distinct_blocks_share_no_token():
    tokens = np.concatenate([expand([i], BLOCK) for i in [0, 1, 2, 1000, (1 << 22) - 1]])
    assert len(np.unique(tokens)) == len(tokens)
    assert tokens.max() < 1 << 31
    assert expand([3, 4], 700).tolist() == [*expand([3], 512), *expand([4], 188)]


def test_ids_beyond_22_bits_still_stand_for_their_own_text():
    ids = [9, 9 + (1 << 22), 9 + (1 << 40), (1 << 63) - 1]
    texts = {expand([i], BLOCK).tobytes() for i in ids}
    assert len(texts) == len(ids)


def test_preambles_are_fresh_and_depend_on_the_seed_alone():
    def lengths_and_tokens(seed):
        preambles = Preambles(seed)
        parts = [preambles.next_tokens() for _ in range(2000)]
        return [len(part) for part in parts], np.concatenate(parts)

    lengths, tokens = lengths_and_tokens(1)
    assert len(np.unique(tokens)) == len(tokens)
    assert tokens.min() >= 1 << 31
    assert 1 <= min(lengths) <= 8
    assert MAX_PREAMBLE_TOKENS - 8 <= max(lengths) <= MAX_PREAMBLE_TOKENS
    assert abs(np.mean(lengths) - 256.5) < 15
    assert lengths == lengths_and_tokens(1)[0]
    assert lengths != lengths_and_tokens(2)[0]
    # Pinned: a run can be repeated elsewhere and later.
    assert lengths_and_tokens(0)[0][:4] == PINNED_LENGTHS


def mixed_requests(seed, count=60):
    """Requests put together from few texts, so that there is reuse of every kind, within a request too."""
    chance = random.Random(seed)
    texts = [[chance.randrange(50) for _ in range(chance.randint(1, 40))] for _ in range(8)] + [[7] * 30]
    for _ in range(count):
        tokens = [token for text in chance.choices(texts, k=chance.randint(0, 6)) for token in text]
        yield Request(np.array(tokens, dtype=np.uint32), chance.choice([b"", b"a", b"b"]))


@pytest.mark.parametrize("every_occurrence", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_the_counts_are_those_of_the_plain_model(monkeypatch, every_occurrence, shift):
    requests = list(mixed_requests(seed=3))
    settings = {"chunk_size": 8, "every_occurrence": every_occurrence, "shift": shift}
    real = replay_of(requests, **settings)
    monkeypatch.setattr("kvsplice.cli.replay.Matcher", ModelMatcher)
    model = replay_of(requests, **settings)
    for name in ("tokens", "preamble", "prefix", "other"):
        assert getattr(real, name) == getattr(model, name), name
    assert real.stats().entries == model.stats().entries
    assert sum(real.other) > 0
