"""Descriptions of paged caches: what they accept, what they say, what they refuse by name."""

from __future__ import annotations

from enum import IntEnum

import ml_dtypes
import numpy as np
import pytest

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from kvsplice.splicer.formats import FORMATS

NB, BS, NH, HS, TOKENS = 5, 4, 2, 8, 4


def arrays(*shape, count=2, dtype=np.float32):
    return [np.zeros(shape, dtype) for _ in range(count)]


def splice_ones(layout, block, tokens=TOKENS):
    """Write ones to the tokens of a block."""
    splicer = Splicer(layout, None, chunk_tokens=tokens)
    splicer.splice([Chunk(np.ones(*splicer.object_shapes(), layout_dtype(layout)), None, 0)], [block])


def layout_dtype(layout):
    return {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[layout.dtype]


class TestNames:
    def test_names_numbers_and_enum_members_are_the_same(self):
        class EngineKVFormat(IntEnum):
            NL_X_NB_TWO_BS_NH_HS = 2

        caches = arrays(NB, 2, BS, NH, HS)
        formats = {
            PagedLayout.from_format(name, caches).format
            for name in (2, np.int64(2), "NL_X_NB_TWO_BS_NH_HS", EngineKVFormat.NL_X_NB_TWO_BS_NH_HS)
        }
        assert formats == {"NL_X_NB_TWO_BS_NH_HS"}

    @pytest.mark.parametrize("name", [19, -1, "NL", "", None, 2.5j, object()])
    def test_others_are_unknown(self, name):
        with pytest.raises(ValueError, match="format: "):
            PagedLayout.from_format(name, arrays(NB, 2, BS, NH, HS))


@pytest.mark.parametrize(
    ("format", "caches", "message"),
    [
        (2, [], "caches: the list is empty"),
        (2, arrays(NB, 2, BS, NH), "caches: layer 0 has 4 axes, NL_X_NB_TWO_BS_NH_HS has 5"),
        (2, arrays(NB, 3, BS, NH, HS), "caches: layer 0: the axis TWO of NL_X_NB_TWO_BS_NH_HS has length 3"),
        (5, arrays(NB * BS, 2, HS), "caches: layer 0: the axis ONE of NL_X_NBBS_ONE_HS has length 2"),
        (2, arrays(0, 2, BS, NH, HS), "caches: layer 0: the axis NB is empty"),
        (2, arrays(NB, 2, BS, NH, HS, count=1) + arrays(NB, 2, BS, NH, 4), "caches: layer 1 has another shape"),
        (
            2,
            arrays(NB, 2, BS, NH, HS, count=1) + arrays(NB, 2, BS, NH, HS, dtype=np.float16),
            "caches: layer 1 is float16, the first is float32",
        ),
        (2, [np.zeros((NB, 2, BS, NH, HS))], r"caches\[0\]: float64 is no element type"),
        (2, arrays(NB, 2, BS, NH, HS, count=1) * 2, "caches: the same memory is given twice"),
        (2, [np.broadcast_to(np.zeros((2, BS, NH, HS), np.float32), (NB, 2, BS, NH, HS))], r"caches\[0\]: .*read-only"),
        (2, [np.zeros((NB, 2, BS, NH, HS), np.float32)[::-1]], r"caches\[0\]: negative strides"),
        (9, [arrays(NB, BS, NH, HS)] * 3, "caches: expected K and V, got 3 entries"),
        (16, [arrays(NB, BS, NH, HS, count=1)], r"caches\[0\]: expected K and V, got 1 entries"),
        (12, arrays(NB, NH, BS, 7), "caches: 7 elements per head are not a K and a V"),
        (14, arrays(NB, BS, 132), "caches: NL_X_NB_BSV_BSS is uint8 with 132 bytes"),
        (14, arrays(NB, BS, 128, dtype=np.uint8), "caches: NL_X_NB_BSV_BSS is uint8 with 132 bytes"),
        (4, [arrays(NB * BS, NH, HS)] * 2, "block_size: TWO_X_NL_X_NBBS_NH_HS does not say"),
    ],
)
def test_wrong_arrays(format, caches, message):
    with pytest.raises(ValueError, match=message):
        PagedLayout.from_format(format, caches)


@pytest.mark.parametrize(
    ("format", "caches", "message"),
    [
        (2, np.zeros((2, NB, 2, BS, NH, HS)).tolist(), r"caches\[0\]: expected an array"),
        (2, None, "caches: expected a list, not NoneType"),
        (2, {"a": 1}, "caches: expected a list, not dict"),
        (9, [1, 2], r"caches\[0\]: expected a list, not int"),
        (0, "x", "caches: expected an array of numpy, torch or CuPy, not str"),
    ],
)
def test_no_arrays(format, caches, message):
    with pytest.raises(TypeError, match=message):
        PagedLayout.from_format(format, caches)


@pytest.mark.parametrize(
    ("format", "caches", "options", "message"),
    [
        (2, arrays(NB, 2, BS, NH, HS), {"block_size": 4}, "block_size: NL_X_NB_TWO_BS_NH_HS says it itself"),
        (5, arrays(NB * BS, 1, HS), {"block_size": 3}, "block_size: 20 slots are not a multiple of 3"),
        (5, arrays(NB * BS, 1, HS), {"block_size": 0}, "block_size: 20 slots are not a multiple of 0"),
        (
            2,
            arrays(NB, 2, BS, NH, HS),
            {"key_layers": [True, False]},
            "key_layers: NL_X_NB_TWO_BS_NH_HS says",
        ),
        (18, arrays(NB, BS, NH, HS), {"key_layers": [True]}, "key_layers: 1 entries for 2 arrays"),
        (3, arrays(NB, BS, HS), {"slots_per_block": 1}, "slots_per_block: 1 slots for 4 tokens; compressed caches"),
        (2, arrays(NB, 2, BS, NH, HS), {"dtype": "bfloat16"}, r"caches\[0\]: elements of 4 bytes cannot be bfloat16"),
        (2, arrays(NB, 2, BS, NH, HS), {"dtype": "int4"}, "dtype: int4 is no element type"),
    ],
)
def test_wrong_options(format, caches, options, message):
    with pytest.raises(ValueError, match=message):
        PagedLayout.from_format(format, caches, **options)


class TestWhatCannotBeRotated:
    """Copied where nothing moves; with a rope it is refused, with the reason."""

    @pytest.mark.parametrize(
        ("layout", "reason"),
        [
            (lambda: PagedLayout.from_format(14, arrays(NB, BS, 132, dtype=np.uint8)), "quantized with a scale"),
            (lambda: PagedLayout.from_format(18, arrays(NB, BS, NH, HS)), "key_layers does not say"),
            (lambda: PagedLayout.from_format(2, arrays(NB, 2, BS, NH, HS, dtype=np.uint8)), "uint8 does not say"),
            (
                lambda: PagedLayout.from_format(17, [[*arrays(NB, BS, 1, HS, count=3)] for _ in range(2)]),
                "third plane holds an indexer's keys",
            ),
        ],
    )
    def test_reason(self, layout, reason):
        described = layout()
        Splicer(described, None)
        rope = RopeTables([np.ones((8, HS), np.float32)], HS, group_windows=[(0, HS)])
        with pytest.raises(ValueError, match=rf"layouts\[0\]: {described.format} cannot be rotated: .*{reason}"):
            Splicer(described, rope)
        Splicer(described, RopeTables([np.ones((8, HS), np.float32)], HS, group_to_cache=[-1]))

    def test_latents_must_say_which_elements_carry_rope(self):
        layout = PagedLayout.from_format(3, arrays(NB, BS, 12))
        tables = [np.ones((8, HS), np.float32)]
        with pytest.raises(ValueError, match=r"group_windows: layouts\[0\] has one row of 12 elements .* say which"):
            Splicer(layout, RopeTables(tables, 1))
        with pytest.raises(ValueError, match=r"group_windows: elements 5 to 13 do not lie"):
            Splicer(layout, RopeTables(tables, 1, group_windows=[(5, HS)]))
        Splicer(layout, RopeTables(tables, 1, group_windows=[(4, HS)]))

    def test_dtype_says_what_bytes_mean(self):
        caches = arrays(NB, 2, BS, NH, HS, dtype=np.uint8)
        layout = PagedLayout.from_format(2, caches, dtype="fp8_e4m3")
        assert layout.dtype == "float8_e4m3fn"
        Splicer(layout, RopeTables([np.ones((8, HS), np.float32)], HS))


class TestStrides:
    def test_padded_blocks(self):
        base = np.zeros((NB, 3, BS, NH, HS), np.float32)
        splice_ones(PagedLayout.from_format(2, [base[:, :2]]), block=3)
        expected = np.zeros_like(base)
        expected[3, :2] = 1
        np.testing.assert_array_equal(base, expected)

    def test_a_permuted_view(self):
        """vLLM with VLLM_KV_CACHE_LAYOUT=HND shows NHD views of HND memory."""
        base = np.zeros((NB, 2, NH, BS, HS), np.float32)
        splice_ones(PagedLayout.from_format(2, [base.transpose(0, 1, 3, 2, 4)]), block=1)
        expected = np.zeros_like(base)
        expected[1] = 1
        np.testing.assert_array_equal(base, expected)

    def test_overlapping_elements(self):
        base = np.zeros(1000, np.float32)
        view = np.lib.stride_tricks.as_strided(base, (NB, 2, BS, NH, HS), (256, 128, 32, 16, 4))
        with pytest.raises(ValueError, match="caches: layer 0: its elements overlap"):
            PagedLayout.from_format(2, [view])

    def test_unaligned_memory(self):
        base = np.zeros(NB * 2 * BS * NH * HS * 4 + 1, np.uint8)[1:].view(np.float32).reshape(NB, 2, BS, NH, HS)
        with pytest.raises(ValueError, match=r"caches: address 0x\w+ is not a multiple of the element size, 4"):
            PagedLayout.from_format(2, [base])


class TestPointers:
    SHAPE = (NB, 2, BS, NH, HS)

    def describe(self, **changes):
        arguments = {"format": 2, "pointers": [4096], "shape": self.SHAPE, "dtype": "float32"} | changes
        return PagedLayout.from_pointers(**arguments)

    def test_equals_the_description_of_the_arrays(self):
        caches = arrays(*self.SHAPE)
        by_address = self.describe(pointers=[np.int64(cache.ctypes.data) for cache in caches])
        assert by_address.planes == PagedLayout.from_format(2, caches).planes
        splice_ones(by_address, block=2)
        assert all((cache[2] == 1).all() and cache.sum() == 2 * BS * NH * HS for cache in caches)

    def test_strides(self):
        base = np.zeros((NB, 3, BS, NH, HS), np.float32)
        described = self.describe(pointers=[base.ctypes.data], strides=base.strides)
        assert described.planes == PagedLayout.from_format(2, [base[:, :2]]).planes

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"pointers": [0]}, ValueError, r"pointers\[0\]: 0 is no address"),
            ({"pointers": [-8]}, ValueError, r"pointers\[0\]: -8 is no address"),
            ({"pointers": ["a"]}, TypeError, r"pointers\[0\]: expected an integer, not str"),
            ({"pointers": 4096}, TypeError, "pointers: expected a list, not int"),
            ({"pointers": []}, ValueError, "pointers: the list is empty"),
            ({"pointers": [4098]}, ValueError, "address 0x1002 is not a multiple of the element size"),
            ({"pointers": [4096, 4096]}, ValueError, "the same memory is given twice"),
            ({"shape": (NB, 2, BS, NH)}, ValueError, "4 axes, NL_X_NB_TWO_BS_NH_HS has 5"),
            ({"shape": (NB, 2, BS, NH, 0)}, ValueError, "the axis HS is empty"),
            ({"shape": (NB, 2, BS, NH, 1.5)}, TypeError, "shape: expected an integer, not float"),
            ({"strides": (4,)}, ValueError, "strides: 1 for 5 axes"),
            ({"strides": (512, 256, 64, 32, -4)}, ValueError, "strides: negative"),
            ({"strides": (514, 256, 64, 32, 4)}, ValueError, "strides .* are not multiples of the element size"),
            ({"strides": (512, 256, 64, 32, "4")}, TypeError, "strides: expected an integer"),
            ({"dtype": "int8"}, ValueError, "dtype: int8 is no element type"),
            ({"device": "tpu"}, ValueError, "device: 'tpu' is neither"),
            ({"device": "cuda:x"}, ValueError, "device: 'cuda:x' is neither"),
        ],
    )
    def test_wrong(self, changes, error, message):
        with pytest.raises(error, match=message):
            self.describe(**changes)


class TestVllm:
    @pytest.mark.parametrize(
        ("shape", "format"),
        [((2, NB, BS, NH, HS), 1), ((NB, 2, BS, NH, HS), 2), ((NB, BS, HS), 3)],
    )
    def test_shapes(self, shape, format):
        tensors = {f"model.layers.{layer}.attn": array for layer, array in enumerate(arrays(*shape))}
        by_dict = PagedLayout.vllm(tensors)
        assert by_dict.format == FORMATS[format]
        assert by_dict == PagedLayout.from_format(format, list(tensors.values()))
        assert PagedLayout.vllm(list(tensors.values())).planes == by_dict.planes

    @pytest.mark.parametrize("shape", [(2, 2, BS, NH, HS), (NB, BS, NH, 2 * HS), (NB, 3, BS, NH, HS), (NB, HS)])
    def test_what_the_shape_does_not_say(self, shape):
        with pytest.raises(ValueError, match=r"kv_caches: the format cannot be told from the shape \["):
            PagedLayout.vllm(arrays(*shape))

    def test_no_layers(self):
        with pytest.raises(ValueError, match="kv_caches: no layer is given"):
            PagedLayout.vllm({})
