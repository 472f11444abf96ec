"""`kvsplice doctor` where there is a GPU."""

from __future__ import annotations

import json

import pytest

from kvsplice.cli import main

pytestmark = pytest.mark.gpu


def test_every_gpu_splices_and_every_kernel_loads(capsys):
    assert main(["doctor", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {checks[name]["status"] for name in ("driver", "gpu", "cupy", "splice on cpu", "splice on gpu 0")} == {"ok"}
    kernels = [check for name, check in checks.items() if name.startswith("ptx ")]
    assert len(kernels) == 5
    assert all(check["detail"].endswith("loads") for check in kernels)
