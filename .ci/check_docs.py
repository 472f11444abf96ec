"""Links between the Markdown files lead somewhere, and every `make` target that they name exists."""

import re
import subprocess
import sys
from pathlib import Path

root = Path(__file__).parent.parent
listed = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=root, check=True, capture_output=True, text=True,
).stdout.split()  # fmt: skip
targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
wrong = []
for name in listed:
    text = (root / name).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, _ = link.partition("#")
        if path and "://" not in path and not ((root / name).parent / path).exists():
            wrong.append(f"{name}: nothing at {link}")
    wrong += [
        f"{name}: no target {target} in the Makefile"
        for target in re.findall(r"`make ([a-z-]+)", text)
        if target not in targets
    ]
if wrong:
    sys.exit("\n".join(wrong))
print(f"{len(listed)} Markdown files, links and targets are right")
