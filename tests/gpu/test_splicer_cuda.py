"""The CUDA splicer: against the plain loops at small sizes, against the CPU splicer at real ones."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from kvsplice.splicer import CudaOptions, StagedMemory
from splice_cases import Case, Rig, cases

pytestmark = pytest.mark.gpu
EXAMPLES = settings(
    max_examples=int(os.environ.get("KVSPLICE_GPU_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def wait() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def place_of(framework: Any) -> Any:
    def place(bits: np.ndarray, dtype: str) -> Any:
        return framework.place(bits, dtype)

    place.typed = framework.typed  # type: ignore[attr-defined]
    return place


@pytest.mark.parametrize("format", range(19))
@EXAMPLES
@given(data=st.data())
def test_every_format_against_plain_loops(framework: Any, format: int, data: st.DataObject) -> None:
    case: Case = data.draw(cases(format))
    where = data.draw(st.sampled_from(["device", "pinned", "pageable"]))
    paths = {"device": ["auto"], "pinned": ["auto", "direct", "staged"], "pageable": ["auto", "staged"]}[where]
    path = data.draw(st.sampled_from(paths))

    def place_object(bits: np.ndarray, dtype: str) -> Any:
        if where == "pinned":
            return framework.pin(bits, dtype)
        if where == "device" and framework.typed:
            return framework.place(bits, dtype)
        # Bytes of the object, for what has no dtype of its own.
        flat = bits.reshape(-1).view(np.uint8)
        return framework.place(flat, "uint8") if where == "device" else flat.copy()

    rig = Rig(case, place_of(framework), place_object)
    splicer = rig.splicer(cuda=CudaOptions(staging_chunks=2))
    result = splicer.splice(rig.chunks(), rig.block_tables, path=path)
    wait()
    rig.check(framework.fetch)
    expected = {"device": "device", "pinned": "direct" if path == "auto" else path, "pageable": "staged"}[where]
    assert result.path == (expected if case.chunks else "none")
    splicer.close()


@pytest.mark.parametrize("format", range(19))
@EXAMPLES
@given(data=st.data())
def test_reading_every_format_against_plain_loops(framework: Any, format: int, data: st.DataObject) -> None:
    rig = Rig(data.draw(cases(format)), place_of(framework))
    most = 20 * min(group.geometry.block_size for group in rig.case.groups)
    start = data.draw(st.integers(0, most - 1))
    rig.check_gather(start, data.draw(st.integers(1, min(9, most - start))))


# ---- real shapes, against the CPU splicer ---------------------------------------------------------------------------

LAYERS, HEADS, SIZE, BLOCK, TOKENS, BLOCKS = 32, 8, 128, 16, 256, 128


class Large:
    """Llama-3-8B: 32 layers of 8 KV heads of 128, bf16, blocks of 16."""

    def __init__(self, framework: Any, count: int, seed: int = 0, where: str = "pinned") -> None:
        self.framework = framework
        rng = np.random.default_rng(seed)
        shape = (2, LAYERS, TOKENS, HEADS * SIZE)
        host = [rng.normal(0, 1, shape).astype(ml_dtypes.bfloat16) for _ in range(count)]
        poison = [rng.integers(0, 1 << 16, (2, BLOCKS, BLOCK, HEADS, SIZE), dtype=np.uint16) for _ in range(LAYERS)]
        self.caches = [framework.place(bits, "bfloat16") for bits in poison]
        self.expected = [bits.copy() for bits in poison]
        frequencies = 500000.0 ** -(np.arange(SIZE // 2) / (SIZE // 2))
        angles = np.arange(4096)[:, None] * frequencies
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(ml_dtypes.bfloat16)
        self.table = rng.permutation(BLOCKS).tolist()
        self.starts = [(int(rng.integers(0, 3000)), 5 + index * (TOKENS + 3)) for index in range(count)]
        place = {
            "pinned": framework.pin,
            "device": framework.place,
            "pageable": lambda bits, dtype: bits.view(ml_dtypes.bfloat16),
        }
        self.objects = [place[where](array.view(np.uint16), "bfloat16") for array in host]
        if where == "device" and not framework.typed:
            self.objects = [StagedMemory(array.data.ptr, array.nbytes) for array in self.keep(self.objects)]
        self.layout = PagedLayout.from_format(1, self.caches, dtype="bfloat16")
        self.rope = RopeTables([table], SIZE)
        self.splicer = Splicer(self.layout, self.rope)
        cpu = Splicer(PagedLayout.from_format(1, self.expected, dtype="bfloat16"), self.rope)
        cpu.splice([Chunk(array, *start) for array, start in zip(host, self.starts, strict=True)], self.table)

    def keep(self, objects: Any) -> Any:
        self.kept = objects
        return objects

    def chunks(self) -> list[Chunk]:
        return [Chunk(obj, *start) for obj, start in zip(self.objects, self.starts, strict=True)]

    def check(self) -> None:
        for cache, expected in zip(self.caches, self.expected, strict=True):
            got = self.framework.fetch(cache)
            np.testing.assert_array_equal(got[1], expected[1])
            assert_close(got[0], expected[0])


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    """Bits of bfloat16, equal but for fp32 sums that were rounded from the other side of a tie, or nearly cancel."""
    if np.array_equal(got, expected):
        return
    differ = got != expected
    assert differ.mean() < 1e-3
    one, other = (bits[differ].view(ml_dtypes.bfloat16).astype(np.float64) for bits in (got, expected))
    assert (np.abs(one - other) <= np.abs(other) * 2.0**-7 + 3e-6).all()


@pytest.mark.parametrize("where", ["device", "pinned", "pageable"])
@pytest.mark.parametrize("path", ["auto", "staged", "direct"])
def test_real_shape(framework: Any, where: str, path: str) -> None:
    large = Large(framework, 6, where=where)
    if (where, path) == ("pageable", "direct"):
        with pytest.raises(ValueError, match=r"path: 'direct' needs pinned"):
            large.splicer.splice(large.chunks(), large.table, path=path)
        return
    result = large.splicer.splice(large.chunks(), large.table, path=path)
    result.event.synchronize()
    assert result.path == ("device" if where == "device" else path if path == "direct" else "staged")
    assert result.nbytes == 6 * 2 * LAYERS * TOKENS * HEADS * SIZE * 2
    large.check()


def test_sources_of_several_kinds(framework: Any) -> None:
    large = Large(framework, 4)
    moved = framework.place(np.asarray(_bits(large.objects[1])), "bfloat16")
    large.objects[1] = moved if framework.typed else StagedMemory(moved.data.ptr, moved.nbytes)
    large.objects[2] = np.asarray(_bits(large.objects[2])).copy().view(ml_dtypes.bfloat16)
    result = large.splicer.splice(large.chunks(), large.table)
    wait()
    assert result.path == "device+staged"
    large.check()


def _bits(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array.view(np.uint16)
    import torch

    return array.view(torch.int16).numpy().view(np.uint16)


def test_objects_across_pinned_registrations(framework: Any) -> None:
    """Two registrations that meet inside an object: no single copy may cross them."""
    import cupy

    runtime = cupy.cuda.runtime
    large = Large(framework, 2)
    nbytes = 2 * LAYERS * TOKENS * HEADS * SIZE * 2
    memory = np.empty(nbytes + 2 * 4096, dtype=np.uint8)
    start = -memory.ctypes.data % 4096
    middle = 4096 * 1000
    memory[start : start + nbytes] = _bits(large.objects[0]).reshape(-1).view(np.uint8)
    address = memory.ctypes.data + start
    runtime.hostRegister(address, middle, 0)
    runtime.hostRegister(address + middle, nbytes - middle, 0)
    try:
        large.objects[0] = StagedMemory(address, nbytes, breaks=(middle,))
        for path in ("staged", "direct"):
            large.splicer.splice(large.chunks(), large.table, path=path)
            wait()
            large.check()
    finally:
        runtime.hostUnregister(address)
        runtime.hostUnregister(address + middle)


def test_a_given_stream_orders_the_writes(framework: Any) -> None:
    large = Large(framework, 3)
    stream = framework.stream()
    result = large.splicer.splice(large.chunks(), large.table, stream=stream)
    stream.synchronize()
    assert result.event.done
    large.check()


def test_the_current_stream_of_the_framework_is_used(framework: Any) -> None:
    large = Large(framework, 3)
    stream = framework.stream()
    if framework.typed:
        import torch

        with torch.cuda.stream(stream):
            result = large.splicer.splice(large.chunks(), large.table)
    else:
        with stream:
            result = large.splicer.splice(large.chunks(), large.table)
    stream.synchronize()
    assert result.event.done
    large.check()


def test_nothing_waits_for_the_device(framework: Any) -> None:
    """A splice is enqueued and done while another stream is busy."""
    import cupy

    large = Large(framework, 6)
    large.splicer.splice(large.chunks(), large.table)
    wait()
    spin = cupy.RawKernel(
        """extern "C" __global__ void spin(long long cycles) {
            long long start = clock64();
            while (clock64() - start < cycles) {}
        }""",
        "spin",
    )
    busy = cupy.cuda.Stream(non_blocking=True)
    with busy:
        spin((1,), (1,), (1,))
        wait()
        spin((1,), (1,), (1_000_000_000,))
    began = time.perf_counter()
    result = large.splicer.splice(large.chunks(), large.table, stream=framework.stream())
    enqueued = time.perf_counter() - began
    result.event.synchronize()
    assert not busy.done
    assert enqueued < 0.2
    busy.synchronize()
    large.check()


def test_callers_on_their_own_streams(framework: Any) -> None:
    """Eight threads, each with its own stream and request, through one splicer and its small ring."""
    larges = [Large(framework, 2, seed) for seed in range(8)]
    shared = larges[0]
    # Two rounds of four callers, each with 40 blocks of one cache.
    for round_number in range(2):
        callers = larges[round_number * 4 : round_number * 4 + 4]
        caches = [
            shared.framework.place(bits, "bfloat16")
            for bits in [np.zeros((2, 160, BLOCK, HEADS, SIZE), np.uint16)] * LAYERS
        ]
        splicer = Splicer(
            PagedLayout.from_format(1, caches, dtype="bfloat16"), shared.rope, cuda=CudaOptions(staging_chunks=2)
        )
        tables = [list(range(index * 40, index * 40 + 40)) for index in range(4)]
        errors: list[BaseException] = []

        def call(
            caller: Large, table: list[int], splicer: Splicer = splicer, errors: list[BaseException] = errors
        ) -> None:
            try:
                stream = framework.stream()
                for _ in range(5):
                    splicer.splice(caller.chunks(), table, stream=stream)
                stream.synchronize()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=pair) for pair in zip(callers, tables, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        for caller, table in zip(callers, tables, strict=True):
            for got, expected in zip(caches, caller.expected, strict=True):
                mine, theirs = framework.fetch(got)[:, table], expected[:, caller.table[:40]]
                for _, position in caller.starts:
                    tokens = np.arange(position, position + TOKENS)
                    cell = (slice(None), tokens // BLOCK, tokens % BLOCK)
                    assert_close(mine[cell], theirs[cell])


def test_rope_tables_on_the_device(framework: Any) -> None:
    large = Large(framework, 2)
    host = large.rope.host_rows(0)
    if framework.typed:
        tables = [framework.place(host.view(np.uint16), "bfloat16")]
    else:
        import cupy

        tables = [cupy.asarray(host.astype(np.float32))]
    splicer = Splicer(large.layout, RopeTables(tables, SIZE))
    splicer.splice(large.chunks(), large.table)
    wait()
    large.check()


def test_errors_come_before_any_write(framework: Any) -> None:
    import cupy

    large = Large(framework, 2)
    before = [framework.fetch(cache).copy() for cache in large.caches]
    on_device = cupy.asarray(np.asarray(large.table))
    for match, arguments in {
        r"block_tables\[0\]: the table is on a GPU": (large.chunks(), on_device),
        r"block_tables\[0\]\[0\]: block 128 of 128": (large.chunks(), [128, *large.table[1:]]),
        r"block_tables\[0\]: block \d+ stands twice": (large.chunks(), [large.table[1], *large.table[1:]]),
        r"block_tables\[0\]: 3 blocks of 16 tokens": (large.chunks(), large.table[:3]),
    }.items():
        with pytest.raises(ValueError, match=match):
            large.splicer.splice(*arguments)
    with pytest.raises(TypeError, match=r"stream: str is no CUDA stream"):
        large.splicer.splice(large.chunks(), large.table, stream="main")
    wait()
    for cache, expected in zip(large.caches, before, strict=True):
        np.testing.assert_array_equal(framework.fetch(cache), expected)


def test_the_cpu_backend_refuses_a_gpu_cache(framework: Any) -> None:
    large = Large(framework, 1)
    with pytest.raises(ValueError, match=r"layouts\[0\] is on cuda:0"):
        Splicer(large.layout, large.rope, backend="cpu")


def test_a_closed_splicer_says_so(framework: Any) -> None:
    large = Large(framework, 1)
    large.splicer.close()
    large.splicer.close()
    with pytest.raises(RuntimeError, match="closed"):
        large.splicer.splice(large.chunks(), large.table)
