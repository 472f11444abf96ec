"""What this machine can do: the checks of ``kvsplice doctor``."""

from __future__ import annotations

import ctypes
import hashlib
import platform
import re
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsplice import __version__
from kvsplice.splicer import modules, selftest
from kvsplice.splicer.cuda import require_cupy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Check", "Status", "examine"]

# Compute capability and CUDA version of the driver that the committed PTX asks for.
_CAPABILITY = (8, 0)
_CUDA_12, _CUDA_13 = 12000, 13000

_REINSTALL = "reinstall kvsplice"


class Status(str, Enum):
    """How a check ended. Only ``failed`` means that something is broken; what is ``missing`` may not be needed."""

    OK = "ok"
    MISSING = "missing"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One line of the report. ``advice`` is empty where all is well."""

    name: str
    status: Status
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class _Gpu:
    index: int
    name: str
    capability: tuple[int, int]


def examine() -> Iterator[Check]:
    """Yield the checks one by one; none raises."""
    yield Check("python", Status.OK, f"{platform.python_version()} on {platform.platform()}")
    yield Check("kvsplice", Status.OK, __version__)
    for package in ("numpy", "ml_dtypes"):
        yield Check(package, Status.OK, _version(package) or "of unknown version")
    yield _guarded("torch", _torch)
    yield _guarded("lmcache", _lmcache)
    driver = _guarded("driver", _driver)
    yield driver
    yield _guarded("gpu", _gpu)
    cupy = _guarded("cupy", _cupy)
    yield cupy
    usable = cupy.status is Status.OK
    try:
        listed = modules.manifest()["modules"]
    except (OSError, ValueError, KeyError) as error:
        yield Check("ptx", Status.FAILED, f"manifest.json: {_line(error)}", _REINSTALL)
        listed = []
    for module in listed:
        yield _guarded(f"ptx {module['dtype']}", partial(_ptx, module=module, load=usable))
    yield _guarded("splice on cpu", _splice_on_cpu)
    if usable:
        for gpu in _gpus(_libcuda()):
            yield _guarded(f"splice on gpu {gpu.index}", partial(_splice_on_gpu, gpu=gpu))
    else:
        yield Check("splice on gpu", Status.MISSING, "not tried: it needs a GPU and CuPy")


def _guarded(name: str, check: Callable[[str], Check]) -> Check:
    try:
        return check(name)
    except Exception as error:
        return Check(name, Status.FAILED, f"{type(error).__name__}: {_line(error)}", "please report this")


def _line(error: object) -> str:
    return " ".join(str(error).split())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _torch(name: str) -> Check:
    version = _version("torch")
    if version is None:
        return Check(name, Status.MISSING, "not installed", "needed only for paged caches that are torch tensors")
    return Check(name, Status.OK, version)


def _lmcache(name: str) -> Check:
    version = _version("lmcache")
    if version is None:
        return Check(name, Status.MISSING, "not installed", "needed only next to LMCache: pip install lmcache")
    return Check(name, Status.OK, version)


def _libcuda() -> Any:
    """The driver's library, initialized, or None."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def _cuda_version(library: Any) -> int:
    """1000 * major + 10 * minor of the newest CUDA that the driver knows."""
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _driver(name: str) -> Check:
    library = _libcuda()
    if library is None:
        return Check(
            name,
            Status.MISSING,
            "no NVIDIA driver with a GPU",
            "splices run on the CPU; a GPU needs driver 525 or newer",
        )
    known = _cuda_version(library)
    detail = f"CUDA {known // 1000}.{known % 1000 // 10}"
    try:
        release = re.search(r"Module\D*(\d+\.\d+(?:\.\d+)?)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        release = None
    if release:
        detail = f"{release[1]}, {detail}"
    if known < _CUDA_12:
        return Check(name, Status.FAILED, detail, "update the driver to 525 or newer")
    return Check(name, Status.OK, detail)


def _gpus(library: Any) -> list[_Gpu]:
    """All GPUs that the driver shows to this process."""
    count = ctypes.c_int()
    if library is None or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        label = ctypes.create_string_buffer(256)
        library.cuDeviceGet(ctypes.byref(device), index)
        library.cuDeviceGetName(label, len(label), device)
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        library.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
        library.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append(_Gpu(index, label.value.decode(errors="replace"), (major.value, minor.value)))
    return found


def _gpu(name: str) -> Check:
    found = _gpus(_libcuda())
    if not found:
        return Check(
            name, Status.MISSING, "none", "splices run on the CPU; in a container, check that it was given the GPU"
        )
    detail = ", ".join(f"{gpu.index}: {gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in found)
    if any(gpu.capability < _CAPABILITY for gpu in found):
        return Check(name, Status.FAILED, detail, "the kernels need compute capability 8.0 (Ampere) or newer")
    return Check(name, Status.OK, detail)


def _cupy(name: str) -> Check:
    library = _libcuda()
    extra = "cuda13" if library is not None and _cuda_version(library) >= _CUDA_13 else "cuda12"
    install = f"pip install 'kvsplice[{extra}]'"
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return Check(name, Status.MISSING, "not installed", f"needed only for splices on a GPU: {install}")
        return Check(name, Status.FAILED, _line(error), f"reinstall it: {install}")
    try:
        require_cupy()
    except RuntimeError as error:
        # Without a GPU that is no fault of CuPy's.
        status = Status.FAILED if _gpus(library) else Status.MISSING
        return Check(name, status, f"{cupy.__version__}: {_line(error)}", install if _gpus(library) else "")
    toolkit = cupy.cuda.runtime.runtimeGetVersion()
    return Check(name, Status.OK, f"{cupy.__version__}, CUDA {toolkit // 1000}.{toolkit % 1000 // 10}")


def _ptx(name: str, module: dict[str, Any], *, load: bool) -> Check:
    try:
        content = (modules.FOLDER / module["file"]).read_bytes()
    except OSError as error:
        return Check(name, Status.FAILED, _line(error), _REINSTALL)
    if hashlib.sha256(content).hexdigest() != module["sha256"]:
        return Check(name, Status.FAILED, "damaged: its SHA-256 is not that of the manifest", _REINSTALL)
    detail = f"PTX {module['ptx_version']}, {module['target']}"
    if not load:
        return Check(name, Status.OK, f"{detail}; intact, not loaded")
    try:
        modules.load(require_cupy(), module["dtype"])
    except RuntimeError as error:
        return Check(name, Status.FAILED, _line(error), "update the driver to 525 or newer")
    return Check(name, Status.OK, f"{detail}; loads")


def _splice_on_cpu(name: str) -> Check:
    for dtype in selftest.ROTATABLE:
        selftest.on_cpu(dtype)
    return Check(name, Status.OK, ", ".join(selftest.ROTATABLE))


def _splice_on_gpu(name: str, gpu: _Gpu) -> Check:
    for dtype in selftest.ROTATABLE:
        selftest.on_gpu(dtype, gpu.index)
    return Check(name, Status.OK, f"{', '.join(selftest.ROTATABLE)}; from device, staged, direct")
