"""Bad input to the splicer: an error that names the argument, and not a byte written."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from kvsplice.splicer import CudaOptions, StagedMemory

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, SIZE, TOKENS = 2, 6, 4, 2, 8, 8
SHAPE = (2, LAYERS, TOKENS, HEADS * SIZE)
NBYTES = 4 * int(np.prod(SHAPE))
POSITIONS = 40


def table(positions=POSITIONS, width=SIZE):
    angles = np.arange(positions)[:, None] * 10.0 ** -np.arange(width // 2)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


class Machine:
    """A splicer of one group or two in host memory."""

    def __init__(self, groups=1):
        self.caches = [
            [np.full((BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE), 7, np.float32) for _ in range(LAYERS)] for _ in range(groups)
        ]
        self.before = np.array(self.caches)
        self.layouts = [PagedLayout.from_format("NL_X_NB_TWO_BS_NH_HS", group) for group in self.caches]
        self.splicer = Splicer(self.layouts, RopeTables([table()], SIZE), chunk_tokens=TOKENS)

    def refuses(self, message, chunks, block_tables, error=ValueError):
        with pytest.raises(error, match=message):
            self.splicer.splice(chunks, block_tables)
        with pytest.raises(error, match=message):
            self.splicer.plan(chunks, block_tables)
        np.testing.assert_array_equal(np.array(self.caches), self.before)

    def accepts(self, chunks, block_tables):
        assert self.splicer.splice(chunks, block_tables).tokens > 0
        assert not np.array_equal(np.array(self.caches), self.before)


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def two_groups():
    return Machine(groups=2)


def stored():
    return np.ones(SHAPE, np.float32)


def good(**changes):
    return Chunk(**({"source": stored(), "old_start": 3, "cur_start": 0} | changes))


TABLE = [5, 0, 3]


def test_what_the_others_change_is_accepted(machine):
    machine.accepts([good()], TABLE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cur_start": -1}, r"chunks\[1\]\.cur_start: -1 is negative"),
        ({"old_start": -1}, r"chunks\[1\]\.old_start: -1 is negative"),
        ({"old_start": -2}, r"chunks\[1\]\.old_start: -2 is negative"),
        ({"offset": -1}, r"chunks\[1\]\.offset: -1 is not in an object of 8 tokens"),
        ({"offset": TOKENS}, r"chunks\[1\]\.offset: 8 is not in an object of 8 tokens"),
        ({"count": 0}, r"chunks\[1\]\.count: 0 of an object of 8"),
        ({"count": -3}, r"chunks\[1\]\.count: -3"),
        ({"offset": 4, "count": 5}, r"chunks\[1\]\.count: 5 of an object of 8 tokens, from 4 on"),
        ({"old_start": POSITIONS - TOKENS + 1}, r"chunks\[1\]\.old_start: positions up to 40, but the rope table ends"),
        ({"old_start": 2**62}, r"chunks\[1\]: position \d+ is not below 2\*\*31"),
        ({"old_start": 2**80}, r"chunks\[1\]: position \d+ is not below 2\*\*31"),
        ({"cur_start": POSITIONS - TOKENS + 1}, r"chunks\[1\]\.cur_start: positions up to 40, but the rope table ends"),
        ({"cur_start": 7}, r"chunks\[0\] and chunks\[1\] overlap at position 7"),
        ({"cur_start": 0, "count": 1}, r"chunks\[\d\] and chunks\[\d\] overlap at position 0"),
        (
            {"source": np.ones((1, *SHAPE[1:]), np.float32)},
            r"chunks\[1\]\.source: shape \[1, 2, 8, 16\], expected \[2,",
        ),
        ({"source": np.ones(SHAPE, np.float16)}, r"chunks\[1\]\.source: float16, but the layout is float32"),
        ({"source": np.ones(SHAPE, np.float64)}, r"chunks\[1\]\.source: float64 is no element type"),
        ({"source": np.ones(NBYTES - 1, np.uint8)}, r"chunks\[1\]\.source: shape \[2047\]"),
        ({"source": stored().transpose(0, 1, 3, 2).copy().transpose(0, 1, 3, 2)}, r"chunks\[1\]\.source: .* C order"),
        ({"source": np.ones(NBYTES + 1, np.uint8)[1:]}, r"chunks\[1\]\.source: address 0x\w+ is not a multiple of .*4"),
        ({"source": StagedMemory(4096, NBYTES + 4)}, r"chunks\[1\]\.source: 2052 bytes, expected 2048"),
        ({"source": StagedMemory(4098, NBYTES)}, r"chunks\[1\]\.source: address 0x1002 is not a multiple"),
        ({"source": StagedMemory(4096, NBYTES, location="device")}, r"chunks\[1\]\.source is on a GPU"),
        ({"source": [stored(), stored()]}, r"chunks\[1\]\.source: 2 objects for 1 group"),
        ({"source": []}, r"chunks\[1\]\.source: 0 objects for 1 group"),
    ],
)
def test_a_bad_chunk(machine, changes, message):
    machine.refuses(message, [good(), good(**({"cur_start": TOKENS} | changes))], [*TABLE, 1, 2, 4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cur_start": "x"}, r"chunks\[0\]\.cur_start: expected an integer, not str"),
        ({"cur_start": None}, r"chunks\[0\]\.cur_start: expected an integer, not NoneType"),
        ({"old_start": 1.0}, r"chunks\[0\]\.old_start: expected an integer, not float"),
        ({"offset": 1.5}, r"chunks\[0\]\.offset: expected an integer, not float"),
        ({"count": b"1"}, r"chunks\[0\]\.count: expected an integer, not bytes"),
        ({"source": 4096}, r"chunks\[0\]\.source: expected an array of numpy, torch or CuPy, not int"),
        ({"source": None}, r"chunks\[0\]\.source: expected an array"),
    ],
)
def test_a_chunk_of_the_wrong_types(machine, changes, message):
    machine.refuses(message, [good(**changes)], TABLE, TypeError)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (None, "chunks: expected a sequence of Chunk, not NoneType"),
        (good(), "chunks: expected a sequence of Chunk, not Chunk"),
        ([stored()], r"chunks\[0\]: expected a Chunk, not ndarray"),
        ([good(), None], r"chunks\[1\]: expected a Chunk, not NoneType"),
    ],
)
def test_no_chunks(machine, chunks, message):
    machine.refuses(message, chunks, TABLE, TypeError)


@pytest.mark.parametrize(
    ("block_table", "message"),
    [
        ([5], r"block_tables\[0\]: 1 blocks of 4 tokens do not reach position 7"),
        ([], r"block_tables\[0\]: 0 blocks of 4 tokens do not reach position 7"),
        ([5, BLOCKS], r"block_tables\[0\]\[1\]: block 6 of 6"),
        ([-1, 5], r"block_tables\[0\]\[0\]: block -1 of 6"),
        ([5, 2**40], r"block_tables\[0\]\[1\]: block 1099511627776 of 6"),
        ([5, 5], r"block_tables\[0\]: block 5 stands twice"),
        ([[5, 0], [1, 2]], r"block_tables: 2 for 1 groups"),
        (np.zeros((1, 1, 2), np.int32), r"block_tables\[0\]: expected one axis, got 3"),
    ],
)
def test_a_bad_block_table(machine, block_table, message):
    machine.refuses(message, [good()], block_table)


@pytest.mark.parametrize(
    ("block_table", "message"),
    [
        (None, "block_tables: expected block numbers, not NoneType"),
        (5, "block_tables: expected block numbers, not int"),
        ([[5.0, 0.0]], r"block_tables\[0\]: expected integers, not float64"),
        ([["a", "b"]], r"block_tables\[0\]: expected integers, not <U1"),
        ([[[1], [1, 2]]], r"block_tables\[0\]: expected block numbers"),
    ],
)
def test_a_block_table_of_the_wrong_type(machine, block_table, message):
    machine.refuses(message, [good()], block_table, TypeError)


def test_blocks_that_are_not_written_may_be_anything(machine):
    machine.accepts([good(cur_start=4)], [-1, 2, 4, 10**9])


def test_a_block_table_on_a_gpu_is_refused(machine):
    for on_gpu in (
        SimpleNamespace(ndim=1, __cuda_array_interface__={}),
        SimpleNamespace(ndim=1, device=SimpleNamespace(type="cuda")),
    ):
        machine.refuses(r"block_tables\[0\]: the table is on a GPU", [good()], on_gpu)


def test_groups_have_an_object_and_a_table_each(two_groups):
    chunk = good(source=[stored(), stored()])
    two_groups.refuses(r"block_tables: 1 for 2 groups", [chunk], [TABLE])
    two_groups.refuses(r"chunks\[0\]\.source: 1 objects for 2 groups", [good()], [TABLE, TABLE])
    two_groups.refuses(r"block_tables\[1\]: 1 blocks of 4 tokens", [chunk], [TABLE, [1]])
    two_groups.refuses(r"block_tables\[1\]\[0\]: block 9 of 6", [chunk], [TABLE, [9, 1]])
    small = good(source=[stored(), np.ones(3, np.float32)])
    two_groups.refuses(r"chunks\[0\]\.source\[1\]: shape \[3\]", [small], [TABLE, TABLE])
    two_groups.accepts([chunk], [TABLE, TABLE])


def test_groups_in_the_same_memory_write_to_different_blocks():
    caches = [np.full((BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE), 7, np.float32) for _ in range(LAYERS)]
    layouts = [PagedLayout.from_format(2, caches)] * 2
    splicer = Splicer(layouts, RopeTables([table()], SIZE), chunk_tokens=TOKENS)
    chunk = good(source=[stored(), stored()])
    with pytest.raises(ValueError, match=r"block_tables\[1\]: block 3 is written through block_tables\[0\] too"):
        splicer.splice([chunk], [[1, 3], [3, 0]])
    assert (np.array(caches) == 7).all()
    splicer.splice([chunk], [[1, 3], [2, 0]])
    assert not (np.array(caches)[:, [0, 1, 2, 3]] == 7).any()
    assert (np.array(caches)[:, [4, 5]] == 7).all()


def test_groups_in_the_same_memory_have_equal_blocks():
    caches = np.zeros((4, 2, 4, 2, 8), np.float32)
    halves = caches.reshape(8, 2, 2, 2, 8)
    layouts = [PagedLayout.from_format(2, [caches]), PagedLayout.from_format(2, [halves])]
    with pytest.raises(ValueError, match=r"layouts\[1\] lies in the memory of layouts\[0\]"):
        Splicer(layouts, None)


def test_no_chunk_is_nothing_to_do(machine):
    result = machine.splicer.splice([], TABLE)
    assert (result.tokens, result.nbytes, result.path, result.event) == (0, 0, "none", None)
    np.testing.assert_array_equal(np.array(machine.caches), machine.before)


def test_positions_beyond_the_table_need_no_rope_when_nothing_moves(machine):
    big = Splicer(machine.layouts, RopeTables([table(positions=4)], SIZE), chunk_tokens=TOKENS)
    assert big.splice([good(old_start=8, cur_start=8)], [0, 1, 2, 3]).tokens == TOKENS


def test_a_plan_runs_as_often_as_it_is_asked_to(machine):
    chunk = good(old_start=0)
    plan = machine.splicer.plan([chunk], TABLE)
    np.testing.assert_array_equal(np.array(machine.caches), machine.before)
    assert machine.splicer.run(plan).tokens == TOKENS
    first = np.array(machine.caches)
    chunk.source[...] = 2
    machine.splicer.run(plan)
    np.testing.assert_array_equal(np.array(machine.caches), np.where(first == 1, 2, first))


def test_a_plan_belongs_to_its_splicer(machine):
    plan = Machine().splicer.plan([good()], TABLE)
    with pytest.raises(ValueError, match=r"plan: it was made by another splicer"):
        machine.splicer.run(plan)
    np.testing.assert_array_equal(np.array(machine.caches), machine.before)


def test_options_of_a_run(machine):
    for options, message in (({"path": "fast"}, r"path: 'fast' is none of auto"), ({"stream": 0}, "stream: the CPU")):
        with pytest.raises(ValueError, match=message):
            machine.splicer.splice([good()], TABLE, **options)
    np.testing.assert_array_equal(np.array(machine.caches), machine.before)


def test_a_closed_cpu_splicer_can_be_closed_again(machine):
    machine.splicer.close()
    machine.splicer.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"layouts": []}, ValueError, "layouts: no group"),
        ({"layouts": [None]}, TypeError, r"layouts\[0\]: expected a PagedLayout, not NoneType"),
        ({"rope": table()}, TypeError, "rope: expected RopeTables or None, not ndarray"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens: 0 is not positive"),
        ({"chunk_tokens": "8"}, TypeError, "chunk_tokens: expected an integer, not str"),
        ({"backend": "tpu"}, ValueError, "backend: 'tpu' is neither 'cpu' nor 'cuda'"),
        ({"backend": "cuda"}, ValueError, r"layouts\[0\] is on cpu; the CUDA backend"),
        ({"rope": RopeTables([table(width=4)], 4)}, ValueError, r"head_size: 4, but layouts\[0\] has heads of 8"),
        ({"rope": RopeTables([table()], SIZE, group_to_cache=[0, 0])}, ValueError, "group_to_cache: 2 entries for 1"),
        (
            {"rope": RopeTables([table()], SIZE, group_windows=[(4, 8)])},
            ValueError,
            "group_windows: elements 4 to 12 do not lie",
        ),
        ({"rope": RopeTables([table(width=16)], SIZE)}, ValueError, "group_windows: elements 0 to 16 do not lie"),
    ],
)
def test_a_bad_registration(machine, arguments, error, message):
    with pytest.raises(error, match=message):
        Splicer(**({"layouts": machine.layouts, "rope": None} | arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 8), ValueError, "pointer: 0 is not positive"),
        ((None, 8), TypeError, "pointer: expected an integer, not NoneType"),
        ((8, 0), ValueError, "nbytes: 0 is not positive"),
        ((8, 1.5), TypeError, "nbytes: expected an integer, not float"),
        ((8, 8, (9,)), ValueError, r"breaks: \[9\] do not ascend inside an object of 8 bytes"),
        ((8, 8, (0,)), ValueError, "breaks"),
        ((8, 8, (4, 4)), ValueError, "breaks"),
        ((8, 8, ("x",)), TypeError, "breaks: expected an integer"),
        ((8, 8, (), "host"), ValueError, "location: 'host' is none of device, pinned, pageable"),
    ],
)
def test_bad_staged_memory(arguments, error, message):
    with pytest.raises(error, match=message):
        StagedMemory(*arguments)


class TestWithoutCuda:
    """A user without CuPy gets everything but CUDA, and is told so only when asking for it."""

    @pytest.fixture(autouse=True)
    def without_cupy(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cupy", None)
        monkeypatch.setitem(sys.modules, "torch", None)

    def test_the_cpu_splicer_works(self, machine):
        machine.accepts([good()], TABLE)

    def test_cuda_options_alone_ask_for_nothing(self, machine):
        assert Splicer(machine.layouts, None, cuda=CudaOptions()).backend == "cpu"

    def test_a_layout_on_a_gpu_asks_for_cuda(self):
        layout = PagedLayout.from_pointers(2, [4096], (4, 2, 4, 2, 8), dtype="bfloat16", device="cuda:0")
        with pytest.raises(RuntimeError, match=r"needs CuPy: pip install 'kvsplice\[cuda13\]'"):
            Splicer(layout, None)
        with pytest.raises(ValueError, match="the CPU backend writes to host memory"):
            Splicer(layout, None, backend="cpu")

    def test_an_unknown_array_on_a_gpu_asks_for_cuda(self):
        array = SimpleNamespace(
            __cuda_array_interface__={"shape": (4, 2, 4, 2, 8), "typestr": "<f4", "data": (4096, False), "version": 3}
        )
        with pytest.raises(RuntimeError, match="needs CuPy"):
            PagedLayout.from_format(2, [array])


def test_bfloat16_given_as_bytes(machine):
    """A store that keeps bytes needs no dtype of its own."""
    caches = [np.zeros((BLOCKS, 2, BLOCK_SIZE, HEADS, SIZE), ml_dtypes.bfloat16) for _ in range(LAYERS)]
    splicer = Splicer(PagedLayout.from_format(2, caches), None, chunk_tokens=TOKENS)
    splicer.splice([good(source=np.ones(SHAPE, ml_dtypes.bfloat16).reshape(-1).view(np.uint8))], TABLE)
    assert (np.array(caches)[:, [5, 0]] == 1).all()
