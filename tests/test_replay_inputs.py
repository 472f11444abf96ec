"""What `kvsplice replay` reads, and the one line that it says about what it cannot read."""

from __future__ import annotations

import gzip
import json
import sys
import tracemalloc

import pytest

from kvsplice.cli import main
from kvsplice.cli.errors import BadLineError, CliError
from kvsplice.cli.lines import MAX_LINE_BYTES, LineReader
from kvsplice.cli.workload import Workload

GOOD = b'{"tokens": [1, 2, 3, 4]}\n'


@pytest.fixture
def run(tmp_path, capsys):
    """Replay one file of the given bytes; return exit code, stdout, stderr with the path as FILE."""

    def replay(content: bytes, *arguments: str, name: str = "in.jsonl"):
        path = tmp_path / name
        path.write_bytes(content)
        code = main(["replay", str(path), "--no-progress", "--chunk-size", "2", *arguments])
        out, err = capsys.readouterr()
        return code, out, err.replace(str(path), "FILE")

    return replay


BAD_LINES = {
    "not JSON": (b'{"tokens": [1, 2\n', "not JSON: Expecting ',' delimiter at column 17"),
    "plain text": (b"hello\n", "not JSON: Expecting value at column 1"),
    "a list": (b"[1, 2]\n", "not a JSON object but a list"),
    "a number": (b"17\n", "not a JSON object but an integer"),
    "null": (b"null\n", "not a JSON object but null"),
    "invalid UTF-8": (b'{"tokens": [1], "x": "\xff"}\n', "invalid UTF-8 at byte 23"),
    "deep nesting": (b'{"tokens": ' + b"[" * 100_000 + b"\n", "not usable JSON: nested too deeply"),
    "an endless integer": (b'{"tokens": [' + b"9" * 5000 + b"]}\n", "not usable JSON: Exceeds the limit (4300"),
    "missing field": (b'{"token": [1]}\n', 'field "tokens" is missing'),
    "tokens no list": (b'{"tokens": "1 2"}\n', 'field "tokens" is not a list but a string'),
    "tokens null": (b'{"tokens": null}\n', 'field "tokens" is not a list but null'),
    "negative": (b'{"tokens": [1, -3]}\n', 'field "tokens", index 1: -3 is negative'),
    "over 32 bits": (b'{"tokens": [4294967296]}\n', 'field "tokens", index 0: 4294967296 is over 32 bits'),
    "huge": (b'{"tokens": [1' + b"0" * 99 + b"]}\n", "index 0: an integer of 329 bits is over 32 bits"),
    "boolean": (b'{"tokens": [1, 2, true]}\n', 'field "tokens", index 2: not an integer but a boolean'),
    "fraction": (b'{"tokens": [1.0]}\n', 'field "tokens", index 0: not an integer but a fraction'),
    "not a number": (b'{"tokens": [NaN]}\n', 'field "tokens", index 0: not an integer but a fraction'),
    "string": (b'{"tokens": ["1"]}\n', 'field "tokens", index 0: not an integer but a string'),
    "nested": (b'{"tokens": [[1]]}\n', 'field "tokens", index 0: not an integer but a list'),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_with_its_reason(run, line, message):
    code, out, err = run(GOOD + line + GOOD)
    assert (code, out) == (2, "")
    assert err.startswith("kvsplice: FILE:2: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_skip_bad_goes_on_and_counts(run, line, message):
    code, out, err = run(GOOD + line + GOOD, "--skip-bad", "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert (result["requests"], result["skipped_lines"], result["tokens"]["prefix_reusable"]) == (2, 1, 4)
    assert message in result["first_skipped"]


BAD_MOONCAKE = {
    "too few ids": ({"hash_ids": [1], "input_length": 513}, '"hash_ids" has 1 ids where "input_length" 513 needs 2'),
    "too many ids": (
        {"hash_ids": [1, 2], "input_length": 512},
        '"hash_ids" has 2 ids where "input_length" 512 needs 1',
    ),
    "no length": ({"hash_ids": [1]}, 'field "input_length" is missing'),
    "length of a wrong type": (
        {"hash_ids": [1], "input_length": 1.5},
        '"input_length" is not an integer but a fraction',
    ),
    "boolean length": ({"hash_ids": [1], "input_length": True}, '"input_length" is not an integer but a boolean'),
    "negative length": ({"hash_ids": [], "input_length": -1}, '"input_length": -1 is negative'),
    "negative id": ({"hash_ids": [-1], "input_length": 5}, 'field "hash_ids", index 0: -1 is negative'),
    "id over 63 bits": (
        {"hash_ids": [1 << 63], "input_length": 5},
        'field "hash_ids", index 0: 9223372036854775808 is over',
    ),
    "length beyond reason": ({"hash_ids": [1], "input_length": 1 << 40}, '"input_length": more than 16,777,216 tokens'),
    "ids no list": ({"hash_ids": {}, "input_length": 5}, 'field "hash_ids" is not a list but an object'),
}


@pytest.mark.parametrize(("record", "message"), BAD_MOONCAKE.values(), ids=BAD_MOONCAKE)
def test_inconsistent_mooncake_lines(run, record, message):
    code, out, err = run(json.dumps(record).encode())
    assert (code, out) == (2, "")
    assert err.startswith("kvsplice: FILE:1: ")
    assert message in err


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"], ids=["empty", "blank"])
@pytest.mark.parametrize("skip", [[], ["--skip-bad"]])
def test_an_empty_file_is_an_error(run, content, skip):
    code, out, err = run(content, *skip)
    assert (code, out) == (2, "")
    assert err == f"kvsplice: FILE:{content.count(10) or 1}: no request in it: the file is empty\n"


def test_a_file_of_bad_lines_only_is_an_error(run):
    code, out, err = run(b"x\ny\n", "--skip-bad")
    assert (code, out, err) == (2, "", "kvsplice: FILE:2: no usable line, 2 skipped\n")


def test_a_format_that_nothing_tells(run):
    code, _, err = run(b'{"ids": [1]}\n')
    assert code == 2
    assert err.startswith("kvsplice: FILE:1: no field tells the format: none of ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["."], ".: is a directory"),
        (["a\nb"], "a b: No such file or directory"),
        (["a\0b"], "embedded null"),
        (
            ["x", "--chunk-size", "0"],
            "argument --chunk-size: 0 is not between 1 and 65,536 (see kvsplice replay --help)",
        ),
        (["x", "--chunk-size", "65537"], "argument --chunk-size: 65537 is not between 1 and 65,536"),
        (["x", "--chunk-size", "many"], "argument --chunk-size: 'many' is not an integer"),
        (["x", "--capacity", "-1"], "argument --capacity: -1 is not between"),
        (["x", "--threads", "0"], "argument --threads: 0 is not between"),
        (["x", "--limit", "0"], "argument --limit: 0 is not between"),
        (["x", "--format", "csv"], "argument --format: invalid choice: 'csv'"),
        (["x", "--colour"], "unrecognized arguments: --colour"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_bad_arguments_give_one_line(capsys, arguments, message):
    assert main(["replay", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvsplice: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl"])
def test_gzip_is_told_from_the_bytes(run, name):
    code, out, _ = run(gzip.compress(GOOD + GOOD), "--json", name=name)
    assert code == 0
    assert json.loads(out)["requests"] == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: data[:30] + b"\0" * 40 + data[70:]])
def test_damaged_gzip_is_named_and_cannot_be_skipped(run, damage):
    text = b"".join(b'{"tokens": [%d]}\n' % (i * i) for i in range(5000))
    code, out, err = run(damage(gzip.compress(text)), "--skip-bad")
    assert (code, out) == (2, "")
    assert "damaged gzip data: " in err


def test_a_line_of_two_gigabytes_is_refused_unread(tmp_path, capsys):
    path = tmp_path / "long"
    with path.open("wb") as file:  # sparse
        file.truncate(2 << 30)
    tracemalloc.start()
    try:
        assert main(["replay", str(path)]) == 2
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert capsys.readouterr().err == f"kvsplice: {path}:1: the line is longer than {MAX_LINE_BYTES:,} bytes\n"
    assert peak < 3 * MAX_LINE_BYTES


def test_reading_goes_on_behind_a_long_line(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"short\n" + b"x" * 10_000_000 + b"\nlast")
    with LineReader(str(path), max_line_bytes=8) as lines:
        assert lines.next_line() == b"short\n"
        with pytest.raises(BadLineError, match="longer than 8 bytes"):
            lines.next_line()
        assert (lines.next_line(), lines.number) == (b"last", 3)
        assert lines.next_line() is None


def test_a_line_of_just_the_limit_passes(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"1234567\n12345678\n1\n")
    with LineReader(str(path), max_line_bytes=8) as lines:
        assert lines.next_line() == b"1234567\n"
        with pytest.raises(BadLineError):
            lines.next_line()
        assert lines.next_line() == b"1\n"


def test_standard_input_blank_lines_and_a_byte_order_mark(monkeypatch, capsys, tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\n\r\n" + GOOD.replace(b"\n", b"\r\n") + GOOD.rstrip())
    with path.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["replay", "-", "--chunk-size", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["formats"]) == (3, {"<stdin>": "tokens"})


def test_each_file_has_its_own_format_and_all_share_what_is_stored(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b'{"hash_ids": [1], "input_length": 3}\n')
    b.write_bytes(GOOD)
    workload = Workload([str(a), str(b)])
    assert [len(request.tokens) for request in workload] == [3, 4]
    assert workload.formats == {str(a): "mooncake", str(b): "tokens"}
    # A named format holds for all files.
    with pytest.raises(CliError, match=r'a:1: field "tokens" is missing'):
        list(Workload([str(a), str(b)], "tokens"))


def test_scopes_are_strings_as_they_are_and_other_values_as_json(tmp_path):
    path = tmp_path / "in"
    values = ["x", "1", 1, None, {"b": 1, "a": [2]}, "\ud800"]
    path.write_text("".join(json.dumps({"tokens": [1], "user": value}) + "\n" for value in values))
    scopes = [request.scope for request in Workload([str(path)], scope_field="user")]
    assert scopes == [b"x", b"1", b"1", b"null", b'{"a":[2],"b":1}', b"\xed\xa0\x80"]


def test_a_missing_scope_field_is_a_bad_line(run):
    code, _, err = run(GOOD, "--scope-field", "user")
    assert (code, err) == (2, 'kvsplice: FILE:1: field "user" is missing\n')
