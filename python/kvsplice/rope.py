"""The rotary embeddings of a model, as the engine's own tables of cosines and sines.

A table has a row per position: cosines in the first half, sines in the second (vLLM's ``cos_sin_cache``). A key that
was stored at position ``old`` moves to ``new`` by the factor ``row(new) * conj(row(old)) / |row(old)|**2`` per
frequency, which undoes exactly what the engine did, whatever magnitude the table carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.arrays import Buffer, describe, host_view, to_host
from kvsplice.dtypes import DTYPES, TABLE_DTYPES
from kvsplice.integers import as_integer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

UNROTATED = -1
"""As a chunk's ``old_start``: its K was stored before the rotation."""


@dataclass(frozen=True)
class GroupRope:
    """What rope does to one group of layers.

    Attributes
    ----------
    table : int
        Which table.
    offset, width : int
        The rotated elements of each head (of each row, for latents).
    is_neox : bool
        Whether element ``i`` pairs with ``i + width // 2`` (NeoX), or ``2 * i`` with ``2 * i + 1`` (GPT-J).
    """

    table: int
    offset: int
    width: int
    is_neox: bool


class RopeTables:
    """One table per distinct rope of a model, and which layers use which.

    Parameters
    ----------
    cos_sin_caches : sequence of arrays, each ``[max_position, rot_dim]``
        float32, bfloat16 or float16; numpy, torch or CuPy. The engine's own arrays: they are kept, not copied.
    head_size : int
        Elements of a head. Latent layouts (MLA) have rows instead of heads and ignore it.
    is_neox : bool
        The pairing: NeoX's halves, or GPT-J's neighbours.
    group_to_cache : sequence of int, optional
        Table of each group of layers; -1 for groups without rope. Empty means that table 0 serves all.
    group_windows : sequence of (offset, width) or None, optional
        Which elements of a head each group rotates. Empty, or None for a group, means the first ``rot_dim``; latent
        layouts must say it, as in ``(512, 64)``.

    Raises
    ------
    ValueError
        If there is no table, one is not of this shape or element type, holds a value that is not finite or a row that
        cannot be inverted; or if a map names a table or a window that does not exist.
    TypeError
        If a table is no array, or something is no integer.
    """

    def __init__(
        self,
        cos_sin_caches: Sequence[Any],
        head_size: int,
        is_neox: bool = True,
        group_to_cache: Sequence[int] = (),
        *,
        group_windows: Sequence[tuple[int, int] | None] = (),
    ) -> None:
        caches = list(cos_sin_caches)
        if not caches:
            raise ValueError("cos_sin_caches: no table is given")
        self.head_size = as_integer(head_size, "head_size")
        if self.head_size < 1:
            raise ValueError(f"head_size: {head_size} is not positive")
        self.is_neox = bool(is_neox)
        self.tables = tuple(_table(cache, f"cos_sin_caches[{i}]") for i, cache in enumerate(caches))
        self.group_to_cache = tuple(
            as_integer(index, f"group_to_cache[{group}]") for group, index in enumerate(group_to_cache)
        )
        for group, index in enumerate(self.group_to_cache):
            if not -1 <= index < len(caches):
                raise ValueError(f"group_to_cache[{group}]: there is no table {index}, only {len(caches)}")
        self.group_windows = tuple(
            None if window is None else _window(window, g) for g, window in enumerate(group_windows)
        )
        if self.group_windows and self.group_to_cache and len(self.group_windows) != len(self.group_to_cache):
            raise ValueError(
                f"group_windows: {len(self.group_windows)} entries, group_to_cache has {len(self.group_to_cache)}"
            )
        for group in range(len(self.group_windows)):
            index = self.group_to_cache[group] if self.group_to_cache else 0
            window = self.group_windows[group]
            if window is not None and index >= 0 and window[1] != self.tables[index].shape[1]:
                raise ValueError(
                    f"group_windows[{group}]: width {window[1]}, but the table has rot_dim "
                    f"{self.tables[index].shape[1]}"
                )

    def check_groups(self, groups: int) -> None:
        """Raise ValueError unless the maps cover so many groups."""
        for name, entries in (("group_to_cache", self.group_to_cache), ("group_windows", self.group_windows)):
            if entries and len(entries) != groups:
                raise ValueError(f"{name}: {len(entries)} entries for {groups} groups of layers")

    def for_group(self, group: int) -> GroupRope | None:
        """The rope of a group of layers, or None where it has none."""
        index = self.group_to_cache[group] if self.group_to_cache else 0
        if index < 0:
            return None
        window = self.group_windows[group] if self.group_windows else None
        offset, width = window or (0, self.tables[index].shape[1])
        return GroupRope(index, offset, width, self.is_neox)

    def has_window(self, group: int) -> bool:
        """Whether the elements that a group rotates were given."""
        return bool(self.group_windows) and self.group_windows[group] is not None

    def max_position(self, table: int) -> int:
        """How many positions a table has."""
        return self.tables[table].shape[0]

    def factors(
        self, table: int, old: NDArray[np.int64] | None, new: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Real and imaginary parts of the factors that move keys from old to new positions.

        Parameters
        ----------
        table : int
        old : int64 array ``[n]``, or None
            None if the keys were stored before the rotation.
        new : int64 array ``[n]``

        Returns
        -------
        re, im : float32 arrays ``[n, rot_dim // 2]``
        """
        rows = self.host_rows(table)
        half = rows.shape[1] // 2
        new_rows: NDArray[np.float32] = rows[new].astype(np.float32)
        cos_new, sin_new = new_rows[:, :half], new_rows[:, half:]
        if old is None:
            return cos_new, sin_new
        old_rows: NDArray[np.float32] = rows[old].astype(np.float32)
        cos_old, sin_old = old_rows[:, :half], old_rows[:, half:]
        magnitude = cos_old * cos_old + sin_old * sin_old
        re, im = cos_new * cos_old + sin_new * sin_old, sin_new * cos_old - cos_new * sin_old
        return (re / magnitude).astype(np.float32), (im / magnitude).astype(np.float32)

    def host_rows(self, table: int) -> NDArray[Any]:
        """A table as a numpy array ``[max_position, rot_dim]`` of its own element type; copied if it is on a GPU."""
        buffer = self.tables[table]
        return host_view(buffer) if buffer.device.kind == "cpu" else to_host(buffer)


def _window(window: tuple[int, int], group: int) -> tuple[int, int]:
    argument = f"group_windows[{group}]"
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"{argument}: expected an offset and a width, not {window!r}")
    offset, width = (as_integer(value, argument) for value in window)
    if offset < 0 or width < 2 or width % 2:
        raise ValueError(f"{argument}: {tuple(window)} is not an offset and an even width")
    return offset, width


def _table(cache: Any, label: str) -> Buffer:
    buffer = describe(cache, label)
    if len(buffer.shape) != 2:
        raise ValueError(f"{label}: expected [max_position, rot_dim], got {len(buffer.shape)} axes")
    rows, width = buffer.shape
    if rows < 1 or width < 2 or width % 2:
        raise ValueError(f"{label}: shape {list(buffer.shape)} is not [max_position, rot_dim] with an even rot_dim")
    if buffer.dtype not in TABLE_DTYPES:
        raise ValueError(f"{label}: {buffer.dtype} is none of {', '.join(TABLE_DTYPES)}")
    itemsize = DTYPES[buffer.dtype].itemsize
    if buffer.strides[1] != itemsize or buffer.strides[0] % itemsize or buffer.pointer % itemsize:
        raise ValueError(f"{label}: the elements of a row must follow each other")
    host = host_view(buffer) if buffer.device.kind == "cpu" else to_host(buffer)
    half = width // 2
    # In slices, so that a table of a million positions takes no gigabyte of temporary memory.
    for start in range(0, rows, 1 << 15):
        values = host[start : start + (1 << 15)].astype(np.float32)
        magnitude = values[:, :half] ** 2 + values[:, half:] ** 2
        bad = ~(np.isfinite(magnitude) & (magnitude > np.finfo(np.float32).tiny))
        if bad.any():
            row, frequency = (int(index) for index in np.argwhere(bad)[0])
            raise ValueError(
                f"{label}: position {start + row}, frequency {frequency} has the cosine {values[row, frequency]} "
                f"and the sine "
                f"{values[row, half + frequency]}, which cannot be inverted"
            )
    return buffer
