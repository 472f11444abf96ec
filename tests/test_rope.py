"""Rope tables: their inverse, their validation, and the tables of the common scalings."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsplice import RopeTables
from kvsplice.rope_scaling import cos_sin_cache

BASE = {"hidden_size": 64, "num_attention_heads": 8, "rope_theta": 100.0, "max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def table(rows=32, width=8, dtype=np.float32, magnitude=1.0):
    angles = np.arange(rows)[:, None] * 10.0 ** -np.arange(width // 2)
    return (magnitude * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(dtype)


class TestFactors:
    """A factor undoes what the table did at the old position and does what it does at the new one."""

    @pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
    @given(old=st.integers(0, 31), new=st.integers(0, 31), magnitude=st.sampled_from([0.5, 1.0, 1.37]))
    def test_it_is_the_exact_quotient_of_the_rows(self, dtype, old, new, magnitude):
        rows = table(dtype=dtype, magnitude=magnitude)
        re, im = RopeTables([rows], 8).factors(0, np.array([old]), np.array([new]))
        complex_rows = rows[:, :4].astype(np.float64) + 1j * rows[:, 4:].astype(np.float64)
        np.testing.assert_allclose(re + 1j * im, complex_rows[[new]] / complex_rows[[old]], rtol=1e-5, atol=1e-6)

    def test_keys_that_were_never_rotated_get_the_row_itself(self):
        rows = table(magnitude=1.37)
        re, im = RopeTables([rows], 8).factors(0, None, np.array([5]))
        np.testing.assert_array_equal(np.concatenate([re, im], axis=1), rows[[5]])

    def test_there_and_back(self):
        rope = RopeTables([table(dtype=ml_dtypes.bfloat16)], 8)
        old, new = np.arange(10), np.arange(20, 30)
        there, back = (re + 1j * im for re, im in (rope.factors(0, old, new), rope.factors(0, new, old)))
        np.testing.assert_allclose(there * back, 1, atol=1e-6)


class TestValidation:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (([], 8), ValueError, "cos_sin_caches: no table"),
            (([table().tolist()], 8), TypeError, r"cos_sin_caches\[0\]: expected an array"),
            (([table()[0]], 8), ValueError, r"cos_sin_caches\[0\]: expected \[max_position, rot_dim\], got 1 axes"),
            (([table()[:, :7]], 8), ValueError, r"cos_sin_caches\[0\]: shape \[32, 7\] is not"),
            (([table()[:0]], 8), ValueError, r"cos_sin_caches\[0\]: shape \[0, 8\] is not"),
            (([table(), table(dtype=np.uint8)], 8), ValueError, r"cos_sin_caches\[1\]: uint8 is none of float32"),
            (([table(dtype=np.float64)], 8), ValueError, r"cos_sin_caches\[0\]: float64 is no element type"),
            (([table(width=16)[:, ::2]], 8), ValueError, r"cos_sin_caches\[0\]: the elements of a row"),
            (([table()], 0), ValueError, "head_size: 0 is not positive"),
            (([table()], "8"), TypeError, "head_size: expected an integer, not str"),
            (([table()], 8, True, [1]), ValueError, r"group_to_cache\[0\]: there is no table 1, only 1"),
            (([table()], 8, True, [0, -2]), ValueError, r"group_to_cache\[1\]: there is no table -2"),
            (([table()], 8, True, [0.0]), TypeError, r"group_to_cache\[0\]: expected an integer, not float"),
        ],
    )
    def test_arguments(self, arguments, error, message):
        with pytest.raises(error, match=message):
            RopeTables(*arguments)

    @pytest.mark.parametrize(
        ("windows", "error", "message"),
        [
            ([(0, 6)], ValueError, r"group_windows\[0\]: width 6, but the table has rot_dim 8"),
            ([(-2, 8)], ValueError, r"group_windows\[0\]: \(-2, 8\) is not an offset and an even width"),
            ([(0, 7)], ValueError, r"group_windows\[0\]: \(0, 7\) is not"),
            ([8], TypeError, r"group_windows\[0\]: expected an offset and a width, not 8"),
            ([(0, 8, 1)], TypeError, r"group_windows\[0\]: expected an offset and a width"),
            ([(0.0, 8)], TypeError, r"group_windows\[0\]: expected an integer, not float"),
        ],
    )
    def test_windows(self, windows, error, message):
        with pytest.raises(error, match=message):
            RopeTables([table()], 8, group_windows=windows)

    def test_maps_of_unequal_length(self):
        with pytest.raises(ValueError, match="group_windows: 1 entries, group_to_cache has 2"):
            RopeTables([table()], 8, True, [0, 0], group_windows=[(0, 8)])

    @pytest.mark.parametrize("value", [np.nan, np.inf, 0.0])
    def test_a_row_that_cannot_be_inverted(self, value):
        rows = table()
        rows[17, [2, 6]] = value
        with pytest.raises(ValueError, match=r"cos_sin_caches\[0\]: position 17, frequency 2 .* cannot be inverted"):
            RopeTables([rows], 8)

    def test_it_keeps_the_engines_array(self):
        rows = table()
        assert np.shares_memory(RopeTables([rows], 8).host_rows(0), rows)

    def test_rows_may_be_padded(self):
        padded = np.zeros((32, 12), np.float32)
        padded[:, :8] = table()
        re, im = RopeTables([padded[:, :8]], 8).factors(0, np.array([3]), np.array([9]))
        expected = RopeTables([table()], 8).factors(0, np.array([3]), np.array([9]))
        np.testing.assert_array_equal((re, im), expected)


class TestScalings:
    """What can be said without the peer; tests/peers compares with transformers."""

    def test_default_is_the_angle_of_the_paper(self):
        rows = cos_sin_cache(BASE).astype(np.float64)
        angles = np.arange(128)[:, None] * 100.0 ** (-2 * np.arange(4) / 8)
        np.testing.assert_allclose(rows, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=2e-5)

    def test_linear_reaches_a_position_later(self):
        plain = cos_sin_cache(BASE)
        slow = cos_sin_cache(BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}})
        np.testing.assert_allclose(slow[::2], plain[:64], atol=1e-5)

    def test_llama3_keeps_the_short_waves_and_stretches_the_long(self):
        plain, scaled = (
            np.arctan2(rows[1, 4:], rows[1, :4])
            for rows in (cos_sin_cache(BASE), cos_sin_cache(BASE | {"rope_scaling": LLAMA3}))
        )
        assert scaled[0] == plain[0]
        assert scaled[-1] == pytest.approx(plain[-1] / 8, rel=1e-5)

    def test_yarn_carries_its_magnitude(self):
        rows = cos_sin_cache(BASE | {"rope_scaling": YARN})
        np.testing.assert_allclose(np.hypot(rows[:, :4], rows[:, 4:]), 0.1 * np.log(4) + 1, rtol=1e-5)
        given = cos_sin_cache(BASE | {"rope_scaling": YARN | {"attention_factor": 0.7}})
        np.testing.assert_allclose(np.hypot(given[:, :4], given[:, 4:]), 0.7, rtol=1e-5)

    def test_widths(self):
        assert cos_sin_cache(BASE).shape == (128, 8)
        assert cos_sin_cache(BASE, 5).shape == (5, 8)
        assert cos_sin_cache(BASE | {"head_dim": 16}).shape[1] == 16
        assert cos_sin_cache(BASE | {"partial_rotary_factor": 0.5}).shape[1] == 4
        assert cos_sin_cache(BASE | {"qk_rope_head_dim": 6}).shape[1] == 6

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_dtypes(self, dtype):
        rows = cos_sin_cache(BASE, dtype=dtype)
        assert rows.dtype.name == dtype
        np.testing.assert_array_equal(rows, cos_sin_cache(BASE).astype(rows.dtype))

    def test_a_rope_per_type_of_layer(self):
        config = {key: value for key, value in BASE.items() if key != "rope_theta"} | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            }
        }
        np.testing.assert_array_equal(cos_sin_cache(config, layer_type="full_attention"), cos_sin_cache(BASE))
        assert not np.array_equal(cos_sin_cache(config, layer_type="sliding_attention"), cos_sin_cache(BASE))
        with pytest.raises(ValueError, match=r"layer_type: None is none of full_attention, sliding_attention"):
            cos_sin_cache(config)
        with pytest.raises(ValueError, match=r"layer_type: the configuration has one rope"):
            cos_sin_cache(BASE, layer_type="full_attention")

    @pytest.mark.parametrize(
        ("scaling", "message"),
        [
            ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' cannot be spliced: its frequencies change"),
            ({"rope_type": "longrope"}, "'longrope' cannot be spliced: it switches"),
            ({"type": "su"}, "'su' cannot be spliced: it switches"),
            ({"type": "mrope", "mrope_section": [1, 1, 2]}, "'mrope' cannot be spliced: a token has three positions"),
            ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "'mrope' cannot be spliced"),
            ({"rope_type": "spiral"}, "'spiral' is unknown; one of default, linear, llama3, yarn, proportional"),
            ({"rope_type": "linear"}, "factor is missing"),
            ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor is missing"),
        ],
    )
    def test_what_is_refused(self, scaling, message):
        with pytest.raises(ValueError, match=f"config: .*{message}"):
            cos_sin_cache(BASE | {"rope_scaling": scaling})

    @pytest.mark.parametrize(
        ("config", "options", "message"),
        [
            ({}, {}, "config: (hidden_size|rope_theta) is missing"),
            ({"head_dim": 8}, {}, "config: rope_theta is missing"),
            ({"head_dim": 8, "rope_theta": 1e4}, {}, "config: max_position_embeddings is missing"),
            (BASE | {"head_dim": 7}, {}, "config: 7 rotated elements per head are not an even number"),
            (BASE, {"max_position": 0}, "max_position: 0 is not positive"),
            (BASE, {"dtype": "uint8"}, "dtype: uint8 is none of float32"),
            (BASE, {"dtype": "float8_e5m2"}, "dtype: float8_e5m2 is none of float32"),
        ],
    )
    def test_what_is_missing(self, config, options, message):
        with pytest.raises(ValueError, match=message):
            cos_sin_cache(config, **options)

    def test_no_configuration(self):
        with pytest.raises(TypeError, match="config: expected a mapping or a transformers configuration, not str"):
            cos_sin_cache("llama")
