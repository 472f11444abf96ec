"""The engine on a GPU: its replay checks every byte of each prompt's KV."""

import json

import numpy as np
import pytest

from engine_parts import SIZE, rope_table
from kvsplice import BlendEngine, Request
from kvsplice.cli import main
from kvsplice.embedded import PagedCache
from kvsplice.retrieve import Reason
from traces import made_up_trace, write_jsonl

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [[], ["--layers", "8", "--heads", "4", "--head-size", "128"], ["--memory-bytes", "4000000", "--segmented-prefix"]],
    ids=["small", "wide", "evicting"],
)
def test_replay_on_cupy(tmp_path, capsys, dtype, options):
    trace = write_jsonl(tmp_path / "trace.jsonl", made_up_trace(3, 60))
    arguments = ["replay", "--engine", "--device", "cuda", "--dtype", dtype, "--shift", "--json", *options, trace]
    arguments += ["--cache-tokens", "65536"]
    assert main(arguments) == 0, capsys.readouterr()
    summary = json.loads(capsys.readouterr().out)
    assert summary["correct"]
    assert summary["tokens"]["non_prefix_hit"] > 0
    assert summary["spliced_bytes"] > 0


def test_a_store_waits_for_the_callers_event():
    """The event is of another stream, on which the KV is written late."""
    import cupy

    cache = PagedCache(1, 64, block_size=2, heads=1, head_size=SIZE, framework="cupy")
    engine = BlendEngine.embedded(cache.layout, [cupy.asarray(rope_table())], SIZE, chunk_size=4)
    try:
        model = cupy.cuda.Stream(non_blocking=True)
        tokens, blocks = list(range(8)), [0, 1, 2, 3]
        with model:
            busy = cupy.ones((4096, 4096))
            for _ in range(30):
                busy = busy @ busy * 1e-4
            cache.arrays[0].view(cupy.float32)[:4] = 3.0
            written = model.record()
        engine.store(Request("s", tokens), 0, [blocks], event=written)
        request = Request("r", [9, *tokens[4:], 9, 9])
        result = engine.lookup(request)
        outcome = engine.retrieve(request, result.matches, [[10, 11, 12, 13]], 0)
        outcome.event.synchronize()
        assert outcome.reason is Reason.SPLICED
        values = cache.arrays[0].view(cupy.float32)[10:14, 1].reshape(-1, SIZE).get()
        assert np.all(values[1:5] == 3.0)
    finally:
        engine.close()
