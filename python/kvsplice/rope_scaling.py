"""Builds cos/sin tables from a model's Hugging Face configuration.

For the ropes whose angle is linear in the position, which are those that a fixed factor can move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.dtypes import DTYPES, TABLE_DTYPES, dtype_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SWITCHES = "it switches its frequencies with the length of the request, so no fixed factor moves a key"
_REFUSED = {
    "dynamic": "its frequencies change with the length of the request, so no fixed factor moves a key",
    "longrope": _SWITCHES,
    "su": _SWITCHES,
    "mrope": "a token has three positions, and those of images are unequal; a chunk of text alone has equal ones: "
    "remove mrope_section from the configuration to build its table",
}


def cos_sin_cache(
    config: object,
    max_position: int | None = None,
    dtype: object = "float32",
    *,
    layer_type: str | None = None,
) -> NDArray[Any]:
    """The table of cosines and sines of a model.

    Knows ``default``, ``linear``, ``llama3``, ``yarn`` and ``proportional``, with partial rotary and MLA's
    ``qk_rope_head_dim``.
    Frequencies and magnitudes are those of the papers (RoPE: arXiv 2104.09864; YaRN: arXiv 2309.00071) and of Llama
    3.1's release; angles are computed in float32 as engines do. An engine's own table is always the better source.

    Parameters
    ----------
    config : mapping or transformers configuration
        Read are ``head_dim`` (or ``hidden_size`` and ``num_attention_heads``), ``qk_rope_head_dim``, ``rope_theta``,
        ``partial_rotary_factor``, ``max_position_embeddings``, ``rope_scaling``; or ``rope_parameters``, as
        transformers 5 has it.
    max_position : int, optional
        Rows; ``max_position_embeddings`` if left out.
    dtype : optional
        float32, bfloat16 or float16.
    layer_type : str, optional
        Which entry of ``rope_parameters`` to take where it has one per type of layer.

    Returns
    -------
    array ``[max_position, rot_dim]``
        Cosines, then sines, both times the magnitude that YaRN bakes in.

    Raises
    ------
    ValueError
        If the rope is not linear in the position (dynamic NTK, LongRoPE, mRoPE), is unknown, or something it needs is
        missing.
    """
    values = _as_mapping(config)
    rope = _rope_parameters(values, layer_type)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if "mrope_section" in rope:
        kind = "mrope"
    if kind in _REFUSED:
        raise ValueError(f"config: rope type {kind!r} cannot be spliced: {_REFUSED[kind]}")
    width = _rotated_width(values, rope, kind)
    base = float(_need(rope, "rope_theta"))
    frequencies = np.float32(1) / (np.float32(base) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width)))
    magnitude = 1.0
    if kind == "linear":
        frequencies = frequencies / np.float32(_need(rope, "factor"))
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope, values)
    elif kind == "yarn":
        frequencies, magnitude = _yarn(frequencies, rope, values, width, base)
    elif kind == "proportional":
        # Gemma 4's: the width is the whole head's, but only the first frequencies turn.
        turning = int(rope.get("partial_rotary_factor", 1.0) * width // 2)
        frequencies = np.where(np.arange(width // 2) < turning, frequencies / np.float32(rope.get("factor", 1)), 0)
    elif kind != "default":
        raise ValueError(f"config: rope type {kind!r} is unknown; one of default, linear, llama3, yarn, proportional")
    name = dtype_name(dtype)
    if name not in TABLE_DTYPES:
        raise ValueError(f"dtype: {name} is none of {', '.join(TABLE_DTYPES)}")
    rows = int(_need(values, "max_position_embeddings") if max_position is None else max_position)
    if rows < 1:
        raise ValueError(f"max_position: {rows} is not positive")
    angles = np.arange(rows, dtype=np.float32)[:, None] * frequencies[None, :].astype(np.float32)
    scale = np.float32(magnitude)
    return np.concatenate([np.cos(angles) * scale, np.sin(angles) * scale], axis=1).astype(DTYPES[name])


def _as_mapping(config: object) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        values: Mapping[str, Any] = config.to_dict()
        return values
    raise TypeError(f"config: expected a mapping or a transformers configuration, not {type(config).__name__}")


def _rope_parameters(values: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    per_layer = [name for name, entry in rope.items() if isinstance(entry, Mapping)]
    if per_layer:
        if layer_type not in per_layer:
            raise ValueError(f"layer_type: {layer_type!r} is none of {', '.join(per_layer)}")
        rope = rope[layer_type]
    elif layer_type is not None:
        raise ValueError(f"layer_type: the configuration has one rope for all layers, not one for {layer_type!r}")
    outer = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if values.get(key) is not None}
    return {**outer, **{key: value for key, value in rope.items() if value is not None}}


def _need(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise ValueError(f"config: {key} is missing")
    return values[key]


def _rotated_width(values: Mapping[str, Any], rope: Mapping[str, Any], kind: str) -> int:
    if values.get("qk_rope_head_dim"):
        return int(values["qk_rope_head_dim"])
    head = values.get("head_dim") or _need(values, "hidden_size") // _need(values, "num_attention_heads")
    width = int(head if kind == "proportional" else head * rope.get("partial_rotary_factor", 1.0))
    if width < 2 or width % 2:
        raise ValueError(f"config: {width} rotated elements per head are not an even number")
    return width


def _original_length(rope: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    return float(rope.get("original_max_position_embeddings") or _need(values, "max_position_embeddings"))


def _llama3(
    frequencies: NDArray[np.float32], rope: Mapping[str, Any], values: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Long wavelengths are stretched by the factor, short ones are kept, those between are blended."""
    factor, low, high = (float(_need(rope, key)) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = _original_length(rope, values) * frequencies.astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (frequencies * (kept + (1 - kept) / factor)).astype(np.float32)


def _yarn(
    frequencies: NDArray[np.float32], rope: Mapping[str, Any], values: Mapping[str, Any], width: int, base: float
) -> tuple[NDArray[np.float32], float]:
    """Blends by how often a frequency turns within the original length (YaRN, section 3.2), and the magnitude (3.3)."""
    original = _original_length(rope, values)
    factor = float(rope.get("factor") or _need(values, "max_position_embeddings") / original)

    def dimension(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0, 1)
    blended = (frequencies * ((1 - ramp) + ramp / factor)).astype(np.float32)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given = rope.get("attention_factor")
    if given is not None:
        return blended, float(given)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return blended, magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
