"""The paged KV formats by name: nested lists of tensors with named axes, and how they reduce to strides.

A name reads from the outside in. What stands before ``_X_`` is a level of lists, the rest are the axes of a tensor:
``NL_X_TWO_NB_BS_NH_HS`` is a list over layers of ``[2, blocks, block size, heads, head size]``.

==== =====================================================================
NL   layers
NB   blocks
BS   tokens of a block
NBBS blocks times tokens of a block, in one axis
NH   heads
HS   elements of a head
CS   elements of a head's K and then its V
TWO  K and V
ONE  an axis of length 1
NP   planes of one token, each with its own head size
BSV  a block's values, for all its tokens; then (BSS) its scales
==== =====================================================================

The names and numbers are those of ``EngineKVFormat`` in LMCache 0.5.6.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMATS: dict[int, str] = {
    0: "NB_NL_TWO_BS_NH_HS",
    1: "NL_X_TWO_NB_BS_NH_HS",
    2: "NL_X_NB_TWO_BS_NH_HS",
    3: "NL_X_NB_BS_HS",
    4: "TWO_X_NL_X_NBBS_NH_HS",
    5: "NL_X_NBBS_ONE_HS",
    6: "NL_X_TWO_NB_NH_BS_HS",
    7: "NL_X_NB_TWO_NH_BS_HS",
    8: "NB_NL_TWO_NH_BS_HS",
    9: "TWO_X_NL_X_NB_BS_NH_HS",
    10: "NL_X_NB_NH_BS_TWO_HS",
    11: "NL_X_NB_BS_NH_TWO_HS",
    12: "NL_X_NB_NH_BS_CS",
    13: "NL_X_NB_BS_NH_CS",
    14: "NL_X_NB_BSV_BSS",
    15: "NL_X_TWO_NB_NH_ONE_BS_HS",
    16: "NL_X_TWO_X_NB_BS_NH_HS",
    17: "NL_X_NP_X_NB_BS_ONE_HS",
    18: "NL_X_NB_BS_NH_HS",
}

COMPONENTS = FORMATS[18]
"""Each entry is a K or a V by itself."""

INDEXER = FORMATS[14]
INDEXER_VALUES = 128
INDEXER_SCALES = 4
"""Bytes per token of format 14: fp8 values, then one fp32 scale
(vLLM's ``indexer_k_quant_and_cache``)."""


@dataclass(frozen=True)
class Format:
    """A format's name, taken apart.

    Attributes
    ----------
    name : str
    lists : tuple of str
        The levels of lists, from the outside in.
    axes : tuple of str
        The axes of each tensor.
    """

    name: str
    lists: tuple[str, ...]
    axes: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether a head's K and V lie side by side, and the staged rows hold them so."""
        return "CS" in self.axes or self.axes[-2:] == ("TWO", "HS")

    @property
    def split(self) -> bool:
        """Whether K and V are separate planes, in the cache and in staged objects."""
        return not self.fused and "TWO" in self.lists + self.axes

    @property
    def latent(self) -> bool:
        """Whether one row per token serves all heads, as in multi-head latent attention."""
        return "NH" not in self.axes


def parse(name: object) -> Format:
    """The format of a name, a number, or LMCache's enum member.

    Raises
    ------
    ValueError
        If there is no such format.
    """
    if not isinstance(name, str):
        try:
            name = FORMATS[int(name)]  # type: ignore[call-overload]
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"format: {name!r} is none of 0 to {max(FORMATS)}") from None
    if name not in FORMATS.values():
        raise ValueError(f"format: {name!r} is unknown; one of {', '.join(FORMATS.values())}")
    *lists, axes = name.split("_X_")
    return Format(name, tuple(lists), tuple(axes.split("_")))
