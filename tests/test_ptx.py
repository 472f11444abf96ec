"""The committed PTX is what the source compiles to, and every supported architecture takes it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from assemble import ARCHITECTURES, assemble
from kvsplice.dtypes import DTYPES

ROOT = Path(__file__).resolve().parent.parent
PTX = ROOT / "python" / "kvsplice" / "ptx"
MANIFEST = json.loads((PTX / "manifest.json").read_text())
MODULES = [module["file"] for module in MANIFEST["modules"]]

# 65,536 registers per multiprocessor, 256 threads per block: with more than this two blocks no longer fit.
MOST_REGISTERS = 128


def test_the_sources_compile_to_what_is_committed():
    subprocess.run([sys.executable, ROOT / "cuda" / "build.py", "--check"], check=True)


def test_a_stale_file_is_noticed(tmp_path):
    for folder in ("cuda", "python/kvsplice/ptx"):
        (tmp_path / folder).mkdir(parents=True)
        for file in (ROOT / folder).iterdir():
            if file.is_file():
                (tmp_path / folder / file.name).write_bytes(file.read_bytes())
    changed = tmp_path / "python/kvsplice/ptx" / MODULES[0]
    changed.write_text(changed.read_text().replace("fma.rn", "fma.rz", 1))
    done = subprocess.run(
        [sys.executable, tmp_path / "cuda/build.py", "--check"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert MODULES[0] in done.stderr
    assert MODULES[1] not in done.stderr


def test_the_manifest_lists_what_is_there():
    assert {path.name for path in PTX.glob("*.ptx")} == set(MODULES)
    source = (ROOT / MANIFEST["source"]).read_bytes()
    assert hashlib.sha256(source).hexdigest() == MANIFEST["source_sha256"]
    for module in MANIFEST["modules"]:
        ptx = (PTX / module["file"]).read_bytes()
        assert hashlib.sha256(ptx).hexdigest() == module["sha256"]
        assert f".version {module['ptx_version']}\n".encode() in ptx


def test_there_is_a_module_for_each_dtype_that_can_be_rotated():
    assert {module["dtype"] for module in MANIFEST["modules"]} == set(DTYPES) - {"uint8"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("module", MANIFEST["modules"], ids=lambda module: module["dtype"])
def test_a_module_assembles_without_spills(module, architecture):
    usages = assemble(PTX / module["file"], architecture)
    assert {usage.kernel for usage in usages} == set(module["entries"])
    for usage in usages:
        assert usage.spilled == 0
        assert usage.registers <= MOST_REGISTERS


def test_broken_ptx_is_refused(tmp_path):
    broken = tmp_path / "broken.ptx"
    broken.write_text((PTX / MODULES[0]).read_text().replace("fma.rn.f32", "fma.f32", 1))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        assemble(broken, "sm_90")
    assert "fma" in refused.value.stderr
