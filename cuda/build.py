"""Compile the kernels to PTX with the pinned NVRTC, and list the result in the manifest.

Needs the packages of the dependency group ``cuda``; no GPU, driver or CUDA toolkit.

    python cuda/build.py            writes python/kvsplice/ptx/
    python cuda/build.py --check    exits with 1 if what is committed differs
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "cuda"
OUTPUT = ROOT / "python" / "kvsplice" / "ptx"
TARGET = "compute_80"
OPTIONS = (f"--gpu-architecture={TARGET}", "--std=c++17", "--restrict")
PACKAGE = "nvidia-cuda-nvrtc-cu12"

# Element types, as the package and as the kernel call them. A module for each, since the driver compiles a whole
# module.
TYPES = {
    "bfloat16": "Bf16",
    "float16": "Fp16",
    "float32": "Fp32",
    "float8_e4m3fn": "E4m3",
    "float8_e5m2": "E5m2",
}


class Nvrtc:
    """The part of NVRTC's C interface that is needed here (https://docs.nvidia.com/cuda/nvrtc/)."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
        if spec is None or not spec.submodule_search_locations:
            sys.exit(f"{PACKAGE} is not installed: pip install --group cuda")
        folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
        self.library = ctypes.CDLL(str(folder / "libnvrtc.so.12"))

    def version(self) -> str:
        """The compiler's own version, ``major.minor``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: bytes, name: str, definition: str) -> bytes:
        """The PTX of one source file."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, name.encode(), 0, None, None)
        options = [option.encode() for option in (*OPTIONS, f"-D{definition}")]
        status = self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self._text("nvrtcGetProgramLog", program).decode().strip()
        if log:
            print(log, file=sys.stderr)
        if status != 0:
            sys.exit(f"{name} does not compile")
        return self._text("nvrtcGetPTX", program)

    def _text(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            sys.exit(f"{name} failed with status {status}")


def build() -> dict[str, bytes]:
    """The files of the ``ptx`` folder: name -> content."""
    nvrtc = Nvrtc()
    files: dict[str, bytes] = {}
    entries = []
    source = (SOURCES / "splice.cu").read_bytes()
    for dtype, type_name in TYPES.items():
        name = f"splice_{dtype}_sm80.ptx"
        ptx = nvrtc.compile(source, "splice.cu", f"SPLICE_TYPE={type_name}")
        files[name] = ptx
        lines = ptx.decode().splitlines()
        entries.append(
            {
                "file": name,
                "dtype": dtype,
                "sha256": hashlib.sha256(ptx).hexdigest(),
                "target": TARGET,
                "ptx_version": next(line.split()[1] for line in lines if line.startswith(".version")),
                "entries": [line.split()[-1].rstrip("(") for line in lines if ".entry" in line],
            }
        )
    manifest = {
        "compiler": {
            "package": PACKAGE,
            "package_version": importlib.metadata.version(PACKAGE),
            "nvrtc": nvrtc.version(),
            "options": list(OPTIONS),
        },
        "source": "cuda/splice.cu",
        "source_sha256": hashlib.sha256(source).hexdigest(),
        "modules": entries,
    }
    files["manifest.json"] = (json.dumps(manifest, indent=2) + "\n").encode()
    return files


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is committed instead of writing it")
    check = parser.parse_args().check
    files = build()
    committed = {path.name for path in OUTPUT.iterdir() if path.suffix in {".ptx", ".json"}}
    if check:
        stale = sorted(
            name
            for name in committed | files.keys()
            if name not in committed or files.get(name) != (OUTPUT / name).read_bytes()
        )
        if stale:
            sys.exit(f"not what the sources compile to: {', '.join(stale)}; run cuda/build.py")
        return
    for name in committed - files.keys():
        (OUTPUT / name).unlink()
    for name, content in files.items():
        (OUTPUT / name).write_bytes(content)


if __name__ == "__main__":
    main()
