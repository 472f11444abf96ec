"""`kvsplice replay --engine`: what it finds against a count over the trace's ids, and that it sees what is wrong."""

import dataclasses
import json

import numpy as np
import pytest

from kvsplice import Splicer
from kvsplice.cli import main
from kvsplice.cli.engine_replay import EngineReplay, EngineSettings
from kvsplice.cli.replay import Settings
from kvsplice.cli.shift import Preambles
from kvsplice.cli.synthetic import MODEL_DTYPES, SyntheticModel
from kvsplice.cli.workload import Workload
from kvsplice.embedded import MemoryStore, PagedCache
from traces import made_up_trace, predict, write_jsonl

SMALL = ["--layers", "1", "--head-size", "4", "--cache-tokens", "16384"]


@pytest.fixture
def run(tmp_path, capsys):
    def run(trace, *arguments, code=0):
        path = write_jsonl(tmp_path / "trace.jsonl", trace)
        assert main(["replay", path, "--engine", *SMALL, *map(str, arguments)]) == code
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def as_json(out):
    return json.loads(out)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("chunk_size", [64, 256])
def test_it_finds_what_the_ids_predict(run, chunk_size, shift):
    trace = made_up_trace(5)
    lengths = Preambles(7)
    preambles = [len(lengths.next_tokens()) if shift else 0 for _ in trace]
    expected = predict(trace, preambles, chunk_size, index_first=False)
    options = ["--chunk-size", chunk_size, "--seed", 7, "--json", *(["--shift"] if shift else [])]
    result = as_json(run(trace, *options))
    assert result["correct"]
    assert result["complete"]
    assert result["requests"] == len(trace)
    assert result["tokens"]["prefix_hit"] == sum(expected.prefix)
    assert result["tokens"]["non_prefix_hit"] == sum(expected.other)
    # The trace has the same text at the same place only, so that a preamble makes all of it another place.
    assert (sum(expected.prefix) > 0, sum(expected.other) > 0) == (not shift, shift)
    # One layer, K and V, one head of four elements in float32.
    hits = result["tokens"]["prefix_hit"] + result["tokens"]["non_prefix_hit"]
    assert result["spliced_bytes"] == hits * 2 * 4 * 4
    assert (result["largest_key_error"] > 1e-7) == shift, "K that moved is rounded once more"
    assert result["memory"]["read_locks"] == 0


def test_with_too_little_memory_less_is_found_and_all_of_it_is_right(run):
    trace = made_up_trace(5)
    plenty = as_json(run(trace, "--shift", "--json"))
    result = as_json(run(trace, "--shift", "--json", "--memory-bytes", 300_000))
    assert result["correct"]
    assert 0 < result["tokens"]["non_prefix_hit"] < plenty["tokens"]["non_prefix_hit"]
    assert result["memory"]["evictions"] > 0
    assert result["memory"]["bytes"] <= 300_000
    assert result["matcher"]["struck_out"] > 0
    assert result["memory"]["read_locks"] == 0


def test_a_disk_brings_back_what_memory_lost(run, tmp_path, monkeypatch):
    trace = made_up_trace(5)
    plenty = as_json(run(trace, "--shift", "--json"))
    options = ["--shift", "--json", "--memory-bytes", 600_000]
    without = as_json(run(trace, *options))
    put = MemoryStore.put

    def written_at_once(self, key, arrays):
        kept = put(self, key, arrays)
        self.flush()
        return kept

    monkeypatch.setattr(MemoryStore, "put", written_at_once)
    result = as_json(run(trace, *options, "--disk", tmp_path / "kv"))
    assert result["correct"]
    assert result["memory"]["evictions"] > 0
    assert result["memory"]["disk_objects"] > 0
    most = plenty["tokens"]["non_prefix_hit"]
    assert without["tokens"]["non_prefix_hit"] < 0.8 * most
    # Not to the last chunk: matches that overlap are loaded, too, and there may be no room for all of one prompt.
    assert 0.95 * most < result["tokens"]["non_prefix_hit"] <= most
    assert result["events"]["cb.sparse_prefetch.start"] > 0
    assert result["matcher"]["struck_out"] == 0


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_each_dtype(run, dtype):
    result = as_json(run(made_up_trace(2, 40), "--shift", "--json", "--dtype", dtype, "--head-size", 16))
    assert result["correct"]
    assert result["tokens"]["non_prefix_hit"] > 0


def test_scopes_share_nothing(run):
    trace = [{"tokens": [*range(64)], "tenant": tenant} for tenant in "aabab"]
    options = ["--chunk-size", 16, "--scope-field", "tenant", "--json"]
    result = as_json(run(trace, *options))
    assert result["correct"]
    assert result["tokens"]["prefix_hit"] == 3 * 64


def test_segmented_prefix(run):
    """Another second half keeps no prefix hit behind it; the first chunks are evicted."""
    first, second = [*range(64)], [*range(100, 164)]
    trace = [{"tokens": tokens} for tokens in (first + second, second, first + second)]
    options = ["--chunk-size", 16, "--segmented-prefix"]
    text = run(trace, *options)
    assert "retained hit" in text
    assert "retained hit" not in run(trace, "--chunk-size", 16)


def test_the_report(run):
    text = run(made_up_trace(2, 40), "--shift")
    rows = [line[:22].strip() for line in text.splitlines()]
    counted = ["requests", "tokens", "prefix hit", "non prefix hit", "computed", "spliced"]
    assert rows == [*counted, "lookup", "lookup calls", "retrieve", "store", "memory", "index", "verified"]
    assert "V equal in every bit" in text
    assert "of them preambles" in text


def test_an_empty_prompt_and_one_below_a_chunk(run):
    result = as_json(run([{"tokens": []}, {"tokens": [1]}, {"tokens": [1]}], "--json"))
    assert (result["requests"], result["tokens"]["computed"], result["correct"]) == (3, 2, True)


# -- it sees what is wrong --------------------------------------------------------------------------------------------


def test_k_at_a_wrong_position_is_seen(run, monkeypatch):
    splice = Splicer.splice

    def shifted(self, chunks, *rest, **options):
        moved = [dataclasses.replace(chunk, old_start=chunk.old_start + 1) for chunk in chunks]
        return splice(self, moved, *rest, **options)

    monkeypatch.setattr(Splicer, "splice", shifted)
    text = run(made_up_trace(2, 40), "--shift", code=1)
    assert "WRONG" in text
    assert "K is off by" in text


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_one_changed_bit_of_v_is_seen(run, monkeypatch, dtype):
    read = MemoryStore.read

    def corrupt(self, keys):
        objects = read(self, keys)
        if objects:
            [array] = objects[0]
            changed = array.copy()
            changed.view(f"u{array.itemsize}")[1, 0, 5, 2] ^= 1
            objects[0] = (changed,)
        return objects

    monkeypatch.setattr(MemoryStore, "read", corrupt)
    assert "elements of V differ" in run(made_up_trace(2, 40), "--dtype", dtype, code=1)


def test_kv_that_was_found_and_not_delivered_is_seen(run, monkeypatch):
    monkeypatch.setattr(MemoryStore, "read", lambda self, keys: None)
    text = run(made_up_trace(2, 40), code=1)
    assert "requests found KV and did not get it" in text
    assert "V differ" not in text


def test_a_write_to_somebody_elses_block_is_seen(run, monkeypatch):
    look_up = EngineReplay._look_up

    def vandal(self, asked):
        self._model._arrays[0][self._guards[1], 0, 3] = 0
        return look_up(self, asked)

    monkeypatch.setattr(EngineReplay, "_look_up", vandal)
    assert "blocks of others were written" in run(made_up_trace(2, 10), code=1)


def test_an_interrupt_leaves_a_report(run, monkeypatch):
    look_up = EngineReplay._look_up

    def interrupted(self, asked):
        if self.requests == 7:
            raise KeyboardInterrupt
        return look_up(self, asked)

    monkeypatch.setattr(EngineReplay, "_look_up", interrupted)
    result = as_json(run(made_up_trace(2, 40), "--json", code=130))
    assert (result["complete"], result["requests"], result["correct"]) == (False, 7, True)
    assert result["memory"]["read_locks"] == 0


# -- the model --------------------------------------------------------------------------------------------------------


def test_the_models_k_turns_with_its_position_and_v_does_not():
    """K of a token at p is K at 0, turned by p * base**(-2i / size), pair by pair: written out without arrays."""
    cache = PagedCache(2, 4, block_size=4, heads=2, head_size=4, dtype="float32")
    model = SyntheticModel(cache.arrays, "float32", 16)
    model.compute(np.full(16, 77, np.uint32), np.arange(16), [3, 1, 0, 2], b"s")
    for array in cache.arrays:
        keys, values = (array[[3, 1, 0, 2], part].reshape(16, 2, 4).astype(float) for part in (0, 1))
        assert np.ptp(values, axis=0).max() == 0
        for position in range(16):
            for head in range(2):
                for pair in range(2):
                    angle = position * 10000.0 ** (-pair / 2)
                    start = complex(keys[0, head, pair], keys[0, head, pair + 2])
                    turned = start * complex(np.cos(angle), np.sin(angle))
                    held = complex(keys[position, head, pair], keys[position, head, pair + 2])
                    assert abs(turned - held) < 1e-6


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_the_models_numbers_differ_by_token_layer_head_element_and_scope(dtype):
    cache = PagedCache(3, 2, block_size=16, heads=2, head_size=8, dtype=dtype)
    model = SyntheticModel(cache.arrays, dtype, 32)
    seen = []
    for scope in (b"a", b"b"):
        model.compute(np.arange(32, dtype=np.uint32), np.arange(32), [0, 1], scope)
        seen += [array[:, 1].astype(np.float64).ravel() for array in cache.arrays]
    everything = np.concatenate(seen)
    assert -1 <= everything.min() < -0.9
    assert 0.9 < everything.max() <= 1
    assert abs(everything.mean()) < 0.05
    if dtype == "float32":
        assert len(np.unique(everything)) > 0.99 * len(everything)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float16"], "--dtype: needs --engine"),
        (["--segmented-prefix"], "--segmented-prefix: needs --engine"),
        (["--engine", "--threads", "2"], "--threads: not with --engine"),
        (["--engine", "--first-occurrence"], "--first-occurrence: not with --engine"),
        (["--engine", "--plot", "x.png"], "--plot: not with --engine"),
        (["--engine", "--chunk-size", "24"], "--chunk-size: with --engine it is a multiple of 16"),
        (["--engine", "--head-size", "5"], "5 is odd"),
        (["--engine", "--cache-tokens", "100"], "request 2: 101 tokens, more than --cache-tokens 100"),
        (["--engine", "--disk", "/dev/null/kv"], "--disk: /dev/null/kv: Not a directory"),
        (["--engine", "--dtype", "float8_e4m3fn"], "invalid choice: 'float8_e4m3fn'"),
    ],
)
def test_what_cannot_be_asked_for(tmp_path, capsys, arguments, message):
    path = write_jsonl(tmp_path / "t.jsonl", [{"tokens": [*range(count)]} for count in (100, 101)])
    assert main(["replay", path, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_gpu_that_is_not_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    path = write_jsonl(tmp_path / "t.jsonl", [{"tokens": [1]}])
    assert main(["replay", path, "--engine", "--device", "cuda"]) == 2
    assert "--device cuda: needs CuPy" in capsys.readouterr().err


def test_a_replay_can_be_used_as_a_library(tmp_path):
    path = write_jsonl(tmp_path / "t.jsonl", [{"tokens": [*range(64)]}] * 3)
    replay = EngineReplay(Settings(chunk_size=16), EngineSettings(cache_tokens=128))
    replay.run(Workload([path]))
    replay.close()
    assert list(replay.prefix) == [0, 64, 64]
    assert replay.correct
