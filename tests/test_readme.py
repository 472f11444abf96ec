"""The examples in the documentation do what they say."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("document", ["README.md", "docs/splicer.md"])
def test_the_example_prints_what_it_says(document, capsys):
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    said = re.findall(r"^ *print\(.*\)  # (\w+\(.*\))$", example, re.MULTILINE)
    exec(compile(example, document, "exec"), {})
    assert capsys.readouterr().out.splitlines() == said
    assert len(said) == 1
