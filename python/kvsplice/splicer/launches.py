"""Launches of the kernel, prepared once per shape of work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.splicer.lowering import LAUNCH, LAYERS_IN_FLIGHT, MAX_SEGMENTS, THREADS, LoweredSegment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Rows = tuple[int, int]
"""Rows of a staged object, counted over planes and layers: the first, and the end."""

# The fields of LAUNCH that change from call to call, as 64-bit words of it.
_CHUNKS, _BLOCKS, _SOURCE = (LAUNCH.fields[name][1] // 8 for name in ("chunks", "blocks", "source"))  # type: ignore[index]

_BLOCKS_PER_MULTIPROCESSOR = 4
"""How many blocks a launch should have at least, if there is work for them: twice what runs at a time."""


@dataclass
class Launch:
    """Arguments and grid of a launch. ``parameters`` is the address of the list of arguments' addresses."""

    arguments: NDArray[Any]
    words: NDArray[np.uint64]
    addresses: NDArray[np.uintp]
    parameters: int
    blocks: int


class Batch:
    """The segments of one group of layers that one kernel moves in one launch."""

    def __init__(
        self,
        cupy: Any,
        kernel: Any,
        group: int,
        block_size: int,
        tokens: int,
        segments: Sequence[LoweredSegment],
        slabs: Sequence[int],
        multiprocessors: int,
    ) -> None:
        if len(segments) > MAX_SEGMENTS:
            raise ValueError(f"{len(segments)} segments in one launch, at most {MAX_SEGMENTS}")
        self._launch_kernel = cupy.cuda.driver.launchKernel
        self._kernel = kernel
        self._function: int = kernel.kernel.ptr
        self.group = group
        self._segments = segments
        self._tiles = [segment.tiles(tokens) for segment in segments]
        self._wanted = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        self._template = np.zeros(1, dtype=LAUNCH)
        self._template[0]["block_size"] = block_size
        self._template[0]["segments"] = len(segments)
        for index, (segment, pointer) in enumerate(zip(segments, slabs, strict=True)):
            entry = self._template[0]["segment"][index]
            for name, value in segment.fields.items():
                entry[name] = value
            entry["slabs"] = pointer
        self._prepared: dict[tuple[int, Rows | None, int | None], Launch | None] = {}

    def launch(
        self,
        chunks: int,
        blocks: int,
        count: int,
        *,
        source: int = 0,
        rows: Rows | None = None,
        max_blocks: int | None,
        stream: int,
    ) -> None:
        """Enqueue the kernel. Not to be called by two threads at a time.

        Parameters
        ----------
        chunks, blocks : int
            Device addresses of ``count`` entries of the chunk table, and of the block table.
        source : int
            Device address of the staged object, where it is not the chunk's own.
        rows : tuple of int, optional
            Rows of the object to move; all if left out.
        """
        key = (count, rows, max_blocks)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(*key)
        prepared = self._prepared[key]
        if prepared is None:
            return
        words = prepared.words
        words[_CHUNKS], words[_BLOCKS], words[_SOURCE] = chunks, blocks, source
        # The driver copies the arguments before it returns.
        self._launch_kernel(self._function, prepared.blocks, 1, 1, THREADS, 1, 1, 0, stream, prepared.parameters, 0)

    def _prepare(self, count: int, rows: Rows | None, max_blocks: int | None) -> Launch | None:
        ranges = [segment.slab_range(*rows) if rows else (0, len(segment.rows)) for segment in self._segments]
        most = max(length for _, length in ranges)
        if most == 0:
            return None
        # Few tiles: share the layers out too, so that every multiprocessor has work.
        splits = max(1, min(-(-self._wanted // (sum(self._tiles) * count)), -(-most // LAYERS_IN_FLIGHT)))
        rounds = math.ceil(math.ceil(most / splits) / LAYERS_IN_FLIGHT)
        per_unit = rounds * LAYERS_IN_FLIGHT
        arguments = self._template.copy()
        launch = arguments[0]
        units = 0
        for index, ((first, length), tiles) in enumerate(zip(ranges, self._tiles, strict=True)):
            launch["part"][index] = (units, tiles, first, length)
            units += tiles * -(-length // per_unit)
        launch["units"] = units * count
        launch["units_per_chunk"] = units
        launch["slabs_per_unit"] = per_unit
        addresses = np.array([arguments.ctypes.data], dtype=np.uintp)
        blocks = units * count if max_blocks is None else min(units * count, max_blocks)
        return Launch(arguments, arguments.view(np.uint64), addresses, addresses.ctypes.data, blocks)
