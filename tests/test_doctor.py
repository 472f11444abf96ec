"""`kvsplice doctor` on machines that lack this or that."""

from __future__ import annotations

import json
import shutil
import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvsplice.cli import main
from kvsplice.splicer import modules
from kvsplice.splicer.cpu import CpuBackend


@pytest.fixture
def doctor(capsys):
    """Run the command; return the exit code and the checks by name."""

    def run():
        code = main(["doctor", "--json"])
        out, err = capsys.readouterr()
        assert err == ""
        report = json.loads(out)
        assert report["healthy"] == (code == 0)
        return code, {check["name"]: check for check in report["checks"]}

    return run


@pytest.fixture
def without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.fixture
def ptx_folder(monkeypatch, tmp_path):
    """A copy of the kernels, to damage."""
    folder = tmp_path / "ptx"
    shutil.copytree(modules.FOLDER, folder)
    monkeypatch.setattr(modules, "FOLDER", folder)
    modules.manifest.cache_clear()
    yield folder
    modules.manifest.cache_clear()


class FakeCuPy(ModuleType):
    """What the doctor sees of CuPy where the driver shows no GPU, or worse."""

    def __init__(self, get_device_count):
        super().__init__("cupy")
        error = type("CUDARuntimeError", (RuntimeError,), {})
        self.__version__ = "14.2.0"
        self.cuda = SimpleNamespace(runtime=SimpleNamespace(CUDARuntimeError=error, getDeviceCount=get_device_count))


@pytest.mark.usefixtures("without_cupy")
def test_a_machine_without_cupy_is_healthy_and_told_what_to_install(doctor):
    code, checks = doctor()
    assert code == 0
    assert checks["cupy"]["status"] == "missing"
    assert "pip install 'kvsplice[cuda1" in checks["cupy"]["advice"]
    assert checks["splice on cpu"]["status"] == "ok"
    assert checks["splice on gpu"]["status"] == "missing"
    for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"):
        assert checks[f"ptx {dtype}"]["status"] == "ok"
    for package in ("numpy", "ml_dtypes"):
        assert checks[package]["detail"] == sys.modules[package].__version__


@pytest.mark.usefixtures("without_cupy")
def test_the_text_has_a_line_per_check_and_per_advice(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok") and " splice on cpu " in line for line in lines)
    cupy = next(number for number, line in enumerate(lines) if line.split()[:2] == ["missing", "cupy"])
    assert lines[cupy + 1].strip().startswith("-> ")


@pytest.mark.usefixtures("without_cupy")
def test_a_damaged_kernel_is_a_failure(doctor, ptx_folder):
    file = ptx_folder / "splice_bfloat16_sm80.ptx"
    file.write_bytes(file.read_bytes().replace(b"mul", b"add", 1))
    (ptx_folder / "splice_float16_sm80.ptx").unlink()
    code, checks = doctor()
    assert code == 1
    assert "damaged" in checks["ptx bfloat16"]["detail"]
    assert checks["ptx float16"]["status"] == "failed"
    assert checks["ptx float32"]["status"] == "ok"
    assert "reinstall" in checks["ptx bfloat16"]["advice"]


@pytest.mark.usefixtures("without_cupy")
@pytest.mark.parametrize("content", [None, "{}", "{"])
def test_a_missing_or_broken_manifest_is_a_failure(doctor, ptx_folder, content):
    manifest = ptx_folder / "manifest.json"
    manifest.unlink()
    if content is not None:
        manifest.write_text(content)
    code, checks = doctor()
    assert code == 1
    assert "manifest" in checks["ptx"]["detail"]
    assert checks["splice on cpu"]["status"] == "ok"


def _no_write(self, plan):
    pass


def _write_to_others(self, plan):
    CPU_WRITE(self, plan)
    plane = self._planner.layouts[0].planes[0]
    from kvsplice.arrays import view

    view(plane.pointers[0] + plane.block_stride, 4)[...] ^= 255


def _rotate_wrongly(self, plan):
    object.__setattr__(plan, "old_start", plan.old_start + 1)
    CPU_WRITE(self, plan)


def _raise(self, plan):
    raise ZeroDivisionError("oh\nno")


CPU_WRITE = CpuBackend.write


@pytest.mark.usefixtures("without_cupy")
@pytest.mark.parametrize("write", [_no_write, _write_to_others, _rotate_wrongly, _raise])
def test_a_splice_that_comes_out_wrong_is_a_failure(doctor, monkeypatch, write):
    monkeypatch.setattr(CpuBackend, "write", write)
    code, checks = doctor()
    assert code == 1
    assert checks["splice on cpu"]["status"] == "failed"
    assert "\n" not in checks["splice on cpu"]["detail"]
    assert checks["splice on cpu"]["advice"]


@pytest.mark.parametrize("count", [0, RuntimeError])
def test_cupy_without_a_gpu_is_no_failure(doctor, monkeypatch, count):
    def get_device_count():
        if count == 0:
            return 0
        raise fake.cuda.runtime.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    fake = FakeCuPy(get_device_count)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    code, checks = doctor()
    assert code == 0
    assert checks["cupy"]["status"] == "missing"
    assert "14.2.0" in checks["cupy"]["detail"]
    assert "GPU" in checks["cupy"]["detail"]


def test_a_cupy_that_fails_in_its_own_way_is_reported(doctor, monkeypatch):
    def get_device_count():
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(get_device_count))
    code, checks = doctor()
    assert code == 1
    assert checks["cupy"]["status"] == "failed"
    assert "libcudart" in checks["cupy"]["detail"]
    assert checks["splice on cpu"]["status"] == "ok"


def test_it_imports_neither_torch_nor_lmcache(doctor):
    before = set(sys.modules)
    doctor()
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] in {"torch", "lmcache"}}
