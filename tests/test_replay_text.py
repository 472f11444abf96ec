"""Text and chat: rendering, tokenizers, and what is wrong with either."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from kvsplice.cli import main
from kvsplice.cli.demo import DEMO_TOKENIZER
from kvsplice.cli.errors import BadLineError
from kvsplice.cli.formats.chat import chat_text
from kvsplice.cli.workload import Workload


@pytest.fixture
def run(tmp_path, capsys):
    """Replay one line; return exit code, stdout, stderr with the path as FILE."""

    def replay(line: bytes, *arguments: str):
        path = tmp_path / "in.jsonl"
        path.write_bytes(line)
        code = main(["replay", str(path), *arguments])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(path), "FILE")

    return replay


BAD_CHAT = {
    "no list": ("hi", 'field "messages" is not a list but a string'),
    "message no object": (["hi"], "messages[0] is not an object but a string"),
    "no role": ([{"content": "hi"}], "messages[0].role is missing"),
    "role of a wrong type": ([{"role": 1, "content": "hi"}], "messages[0].role is not a string"),
    "no content": ([{"role": "user"}], "messages[0].content is missing"),
    "content of a wrong type": ([{"role": "user", "content": 5}], "messages[0].content is neither a string nor a list"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        'messages[0].content[0] has type "image_url"; only text can be replayed',
    ),
    "part no object": ([{"role": "user", "content": ["hi"]}], "messages[0].content[0] is not an object but a string"),
    "part without text": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "messages[0].content[0].text is not a string but null",
    ),
}


@pytest.mark.parametrize(("messages", "message"), BAD_CHAT.values(), ids=BAD_CHAT)
def test_bad_chat_messages(messages, message):
    with pytest.raises(BadLineError) as caught:
        chat_text({"messages": messages})
    assert str(caught.value).startswith(message)


def test_chat_is_rendered_as_chatml():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": ""},
    ]
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    tail = '<|im_start|>assistant\n[{"id": "1"}]<|im_end|>\n<|im_start|>tool\n<|im_end|>\n'
    assert chat_text({"messages": messages}) == head + tail + "<|im_start|>assistant\n"
    # A finished conversation is not opened again.
    assert chat_text({"messages": messages[:3]}) == head + tail.split("<|im_start|>tool", 1)[0]
    # What one turn ends with, the next goes on with: a growing conversation stays a prefix of itself.
    assert chat_text({"messages": messages[:3]}).startswith(chat_text({"messages": messages[:2]}))


@pytest.mark.parametrize("line", [b'{"text": "a"}', b'{"prompt": "a"}', b'{"messages": []}'])
def test_text_without_a_tokenizer_says_what_it_needs(run, line):
    code, _, err = run(line)
    assert code == 2
    assert "needs --tokenizer tokenizer.json" in err


@pytest.mark.parametrize(
    ("content", "message"), [(b"{}", "not a tokenizer.json: "), (b"\xff", "invalid UTF-8"), (None, "No such")]
)
def test_a_bad_tokenizer_file(run, tmp_path, content, message):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    code, _, err = run(b'{"text": "a"}', "--tokenizer", str(path))
    assert code == 2
    assert err.startswith(f"kvsplice: {path}: ")
    assert message in err
    assert err.count("\n") == 1


def test_the_missing_package_is_named(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = run(b'{"text": "a"}', "--tokenizer", DEMO_TOKENIZER)
    assert (code, err) == (2, "kvsplice: text needs the package tokenizers: pip install 'kvsplice[text]'\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": 5}', 'field "text" is not a string but an integer'),
        (b'{"prompt": ["a"]}', 'field "prompt" is not a string but a list'),
        (b'{"text": "a \\ud800"}', "the text holds a lone surrogate, which has no UTF-8"),
    ],
)
def test_bad_text(run, line, message):
    pytest.importorskip("tokenizers")
    code, _, err = run(line, "--tokenizer", DEMO_TOKENIZER)
    assert (code, err) == (2, f"kvsplice: FILE:1: {message}\n")


def test_text_and_chat_through_a_tokenizer_that_would_cut_and_pad(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from kvsplice.cli.tokenizer import TextTokenizer

    plain = tokenizers.Tokenizer.from_file(DEMO_TOKENIZER)
    plain.enable_truncation(4)
    plain.enable_padding(length=64)
    plain.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(str(tmp_path / "tokenizer.json"))
    text = "for a comparison of the numeric types see the table below: " * 3
    path = tmp_path / "in"
    chat = {"messages": [{"role": "user", "content": text}]}
    path.write_text("".join(json.dumps(record) + "\n" for record in [chat]))
    (request,) = Workload([str(path)], tokenizer=tokenizer)
    ids = request.tokens
    assert ids.dtype == np.uint32
    assert plain.decode(ids.tolist(), skip_special_tokens=False) == chat_text(chat)
    assert ids[0] == plain.token_to_id("<|im_start|>")
    path.write_text(json.dumps({"prompt": text}))
    (request,) = Workload([str(path)], tokenizer=tokenizer)
    assert plain.decode(request.tokens.tolist()) == text
