"""Installs a wheel into empty environments, one for each supported Python that is here, and uses it there.

The environments have no extras, and PATH has no compiler.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OLDEST, NEWEST = 10, 14
OLDEST_GLIBC_MINOR = 28
PTX = Path(__file__).resolve().parent.parent / "python" / "kvsplice" / "ptx"

USE = """
import importlib.util
import numpy as np
import kvsplice

absent = ("torch", "cupy", "tokenizers", "matplotlib")
assert not any(map(importlib.util.find_spec, absent)), "not an empty environment"
matcher = kvsplice.Matcher(chunk_size=4)
assert matcher.register([1, 2, 3, 4, 5, 6, 7, 8], [b"a", b"b"]) == 2
assert list(matcher.match([9, 5, 6, 7, 8])) == [kvsplice.Match(4, 8, 1, 5, b"b")]

cache = np.zeros((4, 2, 16, 2, 32), np.float32)
angles = (np.arange(64)[:, None] * 1e4 ** -(np.arange(16) / 16)).astype(np.float32)
rope = kvsplice.RopeTables([np.concatenate([np.cos(angles), np.sin(angles)], axis=1)], 32)
splicer = kvsplice.Splicer(kvsplice.PagedLayout.vllm([cache]), rope, chunk_tokens=4)
stored = np.ones((2, 1, 4, 64), np.float32)
assert splicer.splice([kvsplice.Chunk(stored, 40, 18)], [[3, 1, 0, 2]]).tokens == 4
assert (cache[1, 1, 2:6] == 1).all() and cache[1, 0, 2:6].any() and not cache[[0, 2, 3]].any()
try:
    kvsplice.Splicer(kvsplice.PagedLayout.vllm([cache]), rope, chunk_tokens=4, backend="cuda")
except (RuntimeError, ValueError) as error:
    assert "CUDA" in str(error), error
else:
    raise AssertionError("CUDA without CuPy")
"""


def check_names(wheel: Path) -> None:
    """Exit unless the tag promises old systems and the licences are in."""
    match = re.search(r"-cp310-abi3-manylinux_2_(\d+)", wheel.name)
    if not match or int(match[1]) > OLDEST_GLIBC_MINOR:
        sys.exit(f"{wheel.name} is not an abi3 wheel for glibc 2.{OLDEST_GLIBC_MINOR} or older")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("licenses/LICENSE", "kvsplice/py.typed", "kvsplice/_core.pyi", "kvsplice/data/demo/LICENSE.python"):
        if not any(name.endswith(wanted) for name in names):
            sys.exit(f"{wheel.name} has no {wanted}")
    kernels = {path.name for path in PTX.iterdir()}
    if missing := kernels - {Path(name).name for name in names if name.startswith("kvsplice/ptx/")}:
        sys.exit(f"{wheel.name} has no {', '.join(sorted(missing))}")


def python_at(candidate: str) -> str | None:
    """Return the version of an interpreter, or None if it does not run."""
    command = [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def interpreters() -> dict[str, str]:
    """Version and path of each supported Python that can be found."""
    candidates = [f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1)]
    candidates += [str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python3")]
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for candidate in candidates:
        version = python_at(candidate)
        if version and version.startswith("3.") and OLDEST <= int(version[2:]) <= NEWEST:
            found.setdefault(version, candidate)
    return dict(sorted(found.items(), key=lambda item: int(item[0][2:])))


def check_use(wheel: Path, python: str) -> None:
    """Install and use the wheel in a new environment."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        binaries = Path(folder) / "bin"
        environment = {**os.environ, "PATH": str(binaries)}
        for command in (
            [binaries / "python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", str(wheel)],
            [binaries / "kvsplice", "--version"],
            [binaries / "kvsplice", "doctor"],
            [binaries / "python", "-c", USE],
        ):
            subprocess.run(command, check=True, env=environment, cwd=folder)


def main() -> None:
    """Check the wheel that the command line names."""
    [wheel] = [Path(name).resolve() for name in sys.argv[1:]]
    check_names(wheel)
    for version, python in interpreters().items():
        check_use(wheel, python)
        print(f"{wheel.name} works on Python {version}", flush=True)


if __name__ == "__main__":
    main()
