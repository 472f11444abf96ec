"""The bundled workload."""

from __future__ import annotations

import json
import sys

import pytest

from kvsplice.cli import main
from kvsplice.cli.demo import DEMO_NOTE, DEMO_SHAPES, DEMO_TOKENIZER


def test_the_demo_reports_each_shape(capsys):
    pytest.importorskip("tokenizers")
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    words = " ".join(out.split())
    for shape in DEMO_SHAPES:
        assert shape.title in words
        assert shape.meaning in words
    assert DEMO_NOTE in words
    assert out.count("non-prefix-reusable") == len(DEMO_SHAPES)


def test_what_the_demo_says_of_its_shapes_is_so(capsys):
    pytest.importorskip("tokenizers")
    assert main(["demo", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert list(results) == [shape.name for shape in DEMO_SHAPES]
    share = {name: result["share"] for name, result in results.items()}
    # Orders of documents are new, their texts are not.
    assert share["documents"]["non_prefix_reusable"] > 2 * share["documents"]["prefix_reusable"]
    # Within a run of the agent the prefix does the work.
    assert share["agent"]["prefix_reusable"] > 2 * share["agent"]["non_prefix_reusable"] > 0


def test_a_conversation_that_only_grows_is_the_prefix_caches(capsys):
    pytest.importorskip("tokenizers")
    path = next(shape.path for shape in DEMO_SHAPES if shape.name == "conversation")
    # Four conversations take turns, and keep all of up to eight exchanges.
    assert main(["replay", path, "--tokenizer", DEMO_TOKENIZER, "--limit", "36", "--json"]) == 0
    growing = json.loads(capsys.readouterr().out)["share"]
    assert main(["replay", path, "--tokenizer", DEMO_TOKENIZER, "--json"]) == 0
    dropping = json.loads(capsys.readouterr().out)["share"]
    assert growing["prefix_reusable"] > 5 * growing["non_prefix_reusable"]
    assert dropping["non_prefix_reusable"] > 2 * growing["non_prefix_reusable"]


def test_the_demo_without_its_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == "kvsplice: text needs the package tokenizers: pip install 'kvsplice[text]'\n"
