"""Assemble the committed PTX for real architectures, and tell what each kernel needs there.

Needs the packages of the dependency group ``cuda``; no GPU, driver or CUDA toolkit.

    python cuda/assemble.py         prints a table
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PTX = Path(__file__).resolve().parent.parent / "python" / "kvsplice" / "ptx"
PACKAGE = "nvidia-cuda-nvcc-cu12"

# Ampere (A100, A10), Ada, Hopper, Blackwell (B200, RTX 50).
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

_KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What a kernel takes of one architecture."""

    kernel: str
    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread that are stored to and loaded from local memory for want of registers."""


def ptxas() -> Path:
    """The assembler of the pinned package."""
    spec = importlib.util.find_spec("nvidia.cuda_nvcc")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{PACKAGE} is not installed: pip install --group cuda")
    return Path(next(iter(spec.submodule_search_locations))) / "bin" / "ptxas"


def assemble(module: Path, architecture: str) -> list[Usage]:
    """Assemble one PTX file, and throw the machine code away.

    Raises
    ------
    subprocess.CalledProcessError
        If ``ptxas`` refuses it; its message stands in ``stderr``.
    """
    command = [ptxas(), "--verbose", f"--gpu-name={architecture}", "--output-file=/dev/null", module]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [
        Usage(kernel["name"], int(kernel["registers"]), int(kernel["stores"]) + int(kernel["loads"]))
        for kernel in _KERNEL.finditer(told)
    ]


def main() -> None:
    """Print registers per thread, and bytes spilled where there are any."""
    print(f"| module | kernel | {' | '.join(ARCHITECTURES)} |")
    print("|---" * (2 + len(ARCHITECTURES)) + "|")
    for module in sorted(PTX.glob("*.ptx")):
        usages = [assemble(module, architecture) for architecture in ARCHITECTURES]
        for row in zip(*usages, strict=True):
            cells = (f"{usage.registers}" + (f" ({usage.spilled} B)" if usage.spilled else "") for usage in row)
            print(f"| {module.stem} | {row[0].kernel} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
