"""The soak for some seconds: KVSPLICE_SOAK_SECONDS makes them more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from traces import made_up_trace, write_jsonl

SCRIPT = Path(__file__).resolve().parents[1] / "benches" / "soak_engine.py"
SECONDS = os.environ.get("KVSPLICE_SOAK_SECONDS", "8")


@pytest.mark.parametrize("disk", [[], ["--disk"]], ids=["memory", "disk"])
def test_memory_and_threads_stay_as_they_are(tmp_path, disk):
    trace = write_jsonl(tmp_path / "trace.jsonl", made_up_trace(8, 120))
    result = tmp_path / "result.json"
    arguments = ["--seconds", SECONDS, "--memory-bytes", "2000000", "--json", str(result), *disk]
    done = subprocess.run([sys.executable, str(SCRIPT), trace, *arguments], check=False, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(result.read_text())
    # It was about something.
    assert numbers["evictions"] > 100
    assert numbers["hit_tokens"] > 0
    assert numbers["requests"] > 50
