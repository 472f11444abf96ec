"""The report of `kvsplice replay`, its options, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import kvsplice
from kvsplice.cli import main
from kvsplice.cli.replay import Replay
from traces import made_up_trace, write_jsonl

COUNTS = ("requests", "tokens", "share")


@pytest.fixture
def trace(tmp_path):
    return write_jsonl(tmp_path / "trace.jsonl", made_up_trace(seed=1, requests=80))


@pytest.fixture
def replay_json(capsys):
    def run(*arguments):
        assert main(["replay", *map(str, arguments), "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return run


def tokens_file(tmp_path, records, name="tokens.jsonl"):
    return write_jsonl(tmp_path / name, records)


def counts(result):
    return {name: result[name] for name in COUNTS} | {"entries": result["matcher"]["entries"]}


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvsplice {kvsplice.__version__}\n"


def test_help_names_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "replay" in out
    assert "demo" in out


def test_no_command_is_an_error(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err == "kvsplice: the following arguments are required: COMMAND (see kvsplice --help)\n"


def test_the_json_has_the_documented_fields(replay_json, trace):
    result = replay_json(trace)
    assert list(result) == [
        "complete", "formats", "settings", "requests", "skipped_lines", "first_skipped", "tokens", "share",
        "match_latency", "matcher", "elapsed_seconds",
    ]  # fmt: skip
    assert result["complete"] is True
    assert result["formats"] == {trace: "mooncake"}
    assert result["settings"] == {
        "chunk_size": 256, "capacity": 1 << 20, "threads": 1, "every_occurrence": True, "shift": False, "seed": 0,
        "limit": None,
    }  # fmt: skip
    assert (result["requests"], result["skipped_lines"], result["first_skipped"]) == (80, 0, None)
    tokens = result["tokens"]
    parts = [tokens[name] for name in ("prefix_reusable", "non_prefix_reusable", "not_reusable")]
    assert sum(parts) == tokens["total"]
    assert tokens["preamble"] == 0
    assert list(result["share"].values()) == [part / tokens["total"] for part in parts]
    latency = result["match_latency"]
    assert 0 < latency["p50_ms"] <= latency["p99_ms"] <= latency["max_ms"]
    assert latency["ns_per_token"] > 0
    assert list(result["matcher"]) == list(kvsplice.MatcherStats._fields)
    assert result["elapsed_seconds"] > 0


def test_the_text_report_says_the_same(capsys, replay_json, trace):
    result = replay_json(trace, "--shift")
    assert main(["replay", trace, "--shift"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = {line[:22].strip(): line[22:] for line in out.splitlines()}
    assert list(rows) == [
        "requests", "tokens", "prefix-reusable", "non-prefix-reusable", "not reusable", "match latency", "entries",
        "memory", "evictions",
    ]  # fmt: skip
    tokens, stats = result["tokens"], result["matcher"]
    assert rows["requests"].strip() == "80"
    assert f"{tokens['total']:,}" in rows["tokens"]
    assert f"{tokens['preamble']:,} of them preambles" in rows["tokens"]
    assert f"{tokens['non_prefix_reusable']:,}" in rows["non-prefix-reusable"]
    assert f"{result['share']['non_prefix_reusable']:.1%}" in rows["non-prefix-reusable"]
    for word in ("p50", "p99", "max", "ns per token"):
        assert word in rows["match latency"]
    assert f"{stats['entries']:,}" in rows["entries"]
    assert f"{stats['token_bytes'] + stats['overhead_bytes']:,}" in rows["memory"]


def test_skipped_lines_are_in_the_text_report(capsys, tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b'{"tokens": [1]}\n{\n')
    assert main(["replay", str(path), "--skip-bad"]) == 0
    assert f"first: {path}:2: not JSON: " in capsys.readouterr().out


@pytest.mark.parametrize("shift", [[], ["--shift"]])
def test_a_run_repeats_itself_and_threads_change_no_count(replay_json, trace, shift):
    first = replay_json(trace, *shift)
    assert counts(replay_json(trace, *shift)) == counts(first)
    threaded = replay_json(trace, *shift, "--threads", 4)
    assert counts(threaded) == counts(first)
    # Also when chunks are evicted, which the threads' matches must not steer.
    small = replay_json(trace, *shift, "--capacity", 50)
    assert counts(replay_json(trace, *shift, "--capacity", 50, "--threads", 3)) == counts(small)


def test_the_seed_moves_the_preambles(replay_json, trace):
    zero, one = (replay_json(trace, "--shift", "--seed", seed)["tokens"]["preamble"] for seed in (0, 1))
    assert zero != one
    assert replay_json(trace, "--seed", 1)["tokens"]["preamble"] == 0


def test_the_limit_ends_the_run(replay_json, trace):
    assert replay_json(trace, trace, "--limit", 7)["requests"] == 7
    assert replay_json(trace, trace, "--limit", 85)["requests"] == 85


def test_capacity_bounds_what_is_known(replay_json, tmp_path):
    # Two texts of 8 chunks in turn, room for one: by the time that a text comes again it is gone.
    texts = [list(range(start, start + 32)) for start in (0, 100)]
    path = tokens_file(tmp_path, [{"tokens": texts[i % 2]} for i in range(10)])
    roomy = replay_json(path, "--chunk-size", 4)
    assert roomy["tokens"] == {
        "total": 320, "prefix_reusable": 256, "non_prefix_reusable": 0, "not_reusable": 64, "preamble": 0,
    }  # fmt: skip
    tight = replay_json(path, "--chunk-size", 4, "--capacity", 2)
    assert tight["matcher"]["entries"] == 2
    assert tight["matcher"]["evicted"] > 0
    assert tight["tokens"]["prefix_reusable"] < 256


def test_scopes_share_nothing(replay_json, tmp_path):
    tokens = list(range(100))
    path = tokens_file(tmp_path, [{"tokens": tokens, "user": user} for user in ("a", "b", "a", "b", "b")])
    assert replay_json(path, "--chunk-size", 10)["tokens"]["prefix_reusable"] == 400
    scoped = replay_json(path, "--chunk-size", 10, "--scope-field", "user")
    assert scoped["tokens"]["prefix_reusable"] == 300
    assert scoped["matcher"]["scopes"] == 2


def test_prefix_and_other_reuse_by_hand(replay_json, tmp_path):
    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    path = tokens_file(
        tmp_path,
        [
            {"tokens": a + b},
            {"tokens": a + c},  # a is a prefix
            {"tokens": b + a},  # both elsewhere, neither as a prefix
            {"tokens": [99, *c, *a, 98]},  # off the grid
            {"tokens": [*a, 7, *a]},  # a prefix, and again behind it
            {"tokens": []},
        ],
    )
    every = replay_json(path, "--chunk-size", 4)["tokens"]
    assert (every["total"], every["prefix_reusable"], every["non_prefix_reusable"]) == (43, 8, 20)
    first = replay_json(path, "--chunk-size", 4, "--first-occurrence")["tokens"]
    assert (first["prefix_reusable"], first["non_prefix_reusable"]) == (8, 16)


def test_requests_without_tokens_only(capsys, tmp_path):
    path = tokens_file(tmp_path, [{"tokens": []}])
    assert main(["replay", path]) == 0
    assert "ns per token" not in capsys.readouterr().out


@pytest.mark.parametrize("requests", [1, 2, 80])
def test_the_plot_is_a_png(capsys, tmp_path, requests):
    pytest.importorskip("matplotlib")
    path = write_jsonl(tmp_path / "trace.jsonl", made_up_trace(seed=1, requests=requests))
    target = tmp_path / "out.png"
    assert main(["replay", path, "--plot", str(target), "--threads", "2"]) == 0
    assert capsys.readouterr().err == ""
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("name", ["out.svg", "no/such/place.png"])
def test_a_plot_that_cannot_be_written_fails_before_the_run(capsys, tmp_path, trace, name):
    pytest.importorskip("matplotlib")
    target = tmp_path / name
    assert main(["replay", trace, "--plot", str(target)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvsplice: {target}: ")


def test_the_package_for_plots_is_named(monkeypatch, capsys, trace):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    assert main(["replay", trace, "--plot", "out.png"]) == 2
    err = capsys.readouterr().err
    assert err == "kvsplice: --plot needs the package matplotlib: pip install 'kvsplice[plot]'\n"


@pytest.mark.parametrize("limit", [[], ["--limit", "20"]])
def test_the_progress_bar_is_for_terminals_only(monkeypatch, capsys, trace, limit):
    assert main(["replay", trace, *limit]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["replay", trace, *limit]) == 0
    assert "\r" in capsys.readouterr().err
    assert main(["replay", trace, *limit, "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("threads", ["1", "3"])
def test_an_interrupt_reports_what_was_done(monkeypatch, capsys, trace, threads):
    step = Replay._step

    def interrupted(self, request, matching):
        if self.requests == 5:
            raise KeyboardInterrupt
        step(self, request, matching)

    monkeypatch.setattr(Replay, "_step", interrupted)
    assert main(["replay", trace, "--json", "--threads", threads]) == 130
    result = json.loads(capsys.readouterr().out)
    assert (result["complete"], result["requests"]) == (False, 5)
    assert main(["replay", trace, "--threads", threads]) == 130
    assert "(interrupted)" in capsys.readouterr().out


def test_an_interrupt_before_the_first_request(monkeypatch, capsys, trace):
    monkeypatch.setattr(Replay, "_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["replay", trace]) == 130
    assert "(interrupted)" in capsys.readouterr().out


def test_a_reader_that_went_away(trace):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "kvsplice", "replay", trace, "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_module_runs_as_a_program(trace):
    command = [sys.executable, "-m", "kvsplice", "replay", trace + ".missing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvsplice: {trace}.missing: No such file or directory\n"
