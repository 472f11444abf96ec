"""The README's example does what it says."""

import re
from pathlib import Path

import kvsplice

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_it_says(capsys):
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    said = re.findall(r"# (Match\(.*\))", example)
    exec(compile(example, str(README), "exec"), {"kvsplice": kvsplice})
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 1
