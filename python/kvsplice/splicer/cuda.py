"""Splices on an NVIDIA GPU, with the prebuilt kernels through CuPy."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsplice.arrays import Device, host_view
from kvsplice.dtypes import DTYPES
from kvsplice.rope import RopeTables
from kvsplice.splicer import modules
from kvsplice.splicer.lowering import CHUNK, LAUNCH, LAYERS_IN_FLIGHT, MAX_SEGMENTS, SLAB, DeviceTable, LoweredSegment, lower, vector_bytes
from kvsplice.splicer.plan import Plan, Planner, Source
from kvsplice.splicer.staging import Event, Ring, Tables

PATHS = ("auto", "staged", "direct")


@dataclass(frozen=True)
class CudaOptions:
    """How the CUDA backend uses the machine.

    Attributes
    ----------
    staging_chunks : int
        Slots of the staging ring; each takes a chunk's objects of all groups in device memory.
    max_blocks : int or None
        Most thread blocks of 256 that a launch may have, and so what share of the GPU it can take: a multiprocessor holds two.
        None means no bound.
    direct_blocks : int
        The same bound for kernels that read host memory, which a few blocks saturate.
    direct_bytes : int
        Up to this size, pinned chunks are read by the kernel itself instead of being staged.
    """

    staging_chunks: int = 4
    max_blocks: int | None = None
    direct_blocks: int = 32
    direct_bytes: int = 1 << 19


def require_cupy() -> Any:
    """CuPy, or a RuntimeError that says what to install."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(
            "the CUDA backend needs CuPy: pip install 'kvsplice[cuda13]' (driver 580 or newer) or 'kvsplice[cuda12]'"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"the CUDA backend needs an NVIDIA GPU and its driver: {error}") from error
    if count < 1:
        raise RuntimeError("the CUDA backend needs an NVIDIA GPU; the driver shows none")
    return cupy


def device_of_pointer(pointer: int, argument: str) -> int:
    """The number of the GPU that an address belongs to."""
    attributes = require_cupy().cuda.runtime.pointerGetAttributes(pointer)
    if attributes.type not in {_DEVICE, _MANAGED}:
        raise ValueError(f"{argument}: {pointer:#x} is no address of a GPU")
    return int(attributes.device)


# cudaMemoryType
_UNREGISTERED, _HOST, _DEVICE, _MANAGED = 0, 1, 2, 3


@dataclass(frozen=True)
class Place:
    """Where a source turned out to be: in device memory, pinned, or pageable; and its address for the device."""

    kind: str
    pointer: int


@dataclass
class _Batch:
    """The segments of a group that one launch moves, and a launch that is filled in over and over."""

    group: int
    kernel: Any
    segments: list[LoweredSegment]
    launch: NDArray[Any]


class CudaBackend:
    """Writes plans into paged caches on one GPU. Calls only enqueue; no call waits for the device."""

    def __init__(self, planner: Planner, options: CudaOptions) -> None:
        for group, layout in enumerate(planner.layouts):
            if layout.device.kind != "cuda":
                raise ValueError(f"layouts[{group}] is on {layout.device}; the CUDA backend writes to a GPU")
        self.cupy = require_cupy()
        self.planner = planner
        self.options = options
        self.device: Device = planner.layouts[0].device
        self._lock = threading.Lock()
        self._held: list[Any] = []
        self._offsets = _offsets(planner.nbytes)
        with self.cupy.cuda.Device(self.device.index):
            properties = self.cupy.cuda.runtime.getDeviceProperties(self.device.index)
            self._multiprocessors = int(properties["multiProcessorCount"])
            tables = self._upload_tables(planner.rope)
            self._batches = {
                aligned: [batch for group in range(len(planner.layouts)) for batch in self._lower_group(group, tables, aligned)]
                for aligned in (True, False)
            }
            self._copy_stream = self.cupy.cuda.Stream(non_blocking=True)
            self._piece = Event(self.cupy)
            self._calls = Tables(self.cupy)
            self._ring: Ring | None = Ring(self.cupy, self._offsets[-1], options.staging_chunks)

    def locate(self, plan: Plan) -> list[list[Place]]:
        """Where each source lies, by group and chunk.

        Raises
        ------
        ValueError
            If a source is on another GPU.
        """
        with self.cupy.cuda.Device(self.device.index):
            return [
                [self._locate(source, nbytes, index) for index, source in enumerate(sources)]
                for sources, nbytes in zip(plan.sources, self.planner.nbytes, strict=True)
            ]

    def _locate(self, source: Source, nbytes: int, index: int) -> Place:
        attributes = self.cupy.cuda.runtime.pointerGetAttributes
        first = attributes(source.pointer)
        if first.type in {_DEVICE, _MANAGED}:
            if first.type == _DEVICE and first.device != self.device.index:
                raise ValueError(f"chunks[{index}].source is on cuda:{first.device}, the paged cache on {self.device}")
            return Place("device", source.pointer)
        if first.type == _HOST and attributes(source.pointer + nbytes - 1).type == _HOST:
            return Place("pinned", int(first.devicePointer))
        return Place("pageable", source.pointer)

    def enqueue(self, plan: Plan, places: list[list[Place]], path: str, stream: int) -> tuple[str, Any]:
        """Enqueue all copies and kernels of a plan.

        Returns
        -------
        path : str
            ``device``, ``direct``, ``staged`` or, where sources are of several kinds, a combination with ``+``.
        event : cupy.cuda.Event
            Recorded on the stream behind the last write.
        """
        count = len(plan.count)
        kinds = [{places[group][index].kind for group in range(len(places))} for index in range(count)]
        on_device = [index for index in range(count) if kinds[index] == {"device"}]
        hosted = [index for index in range(count) if kinds[index] != {"device"}]
        readable = all(places[group][index].kind != "pageable" for index in hosted for group in range(len(places)))
        if path == "direct" and not readable:
            raise ValueError("path: 'direct' needs pinned host memory")
        size = sum(self._bytes(plan, index) for index in hosted)
        direct = path == "direct" or (path == "auto" and readable and size <= self.options.direct_bytes)
        with self._lock, self.cupy.cuda.Device(self.device.index):
            if self._ring is None:
                raise RuntimeError("the splicer is closed")
            taken = []
            if on_device:
                self._run(plan, places, on_device, None, stream)
                taken.append("device")
            if hosted and direct:
                self._run(plan, places, hosted, self.options.direct_blocks, stream)
                taken.append("direct")
            elif hosted:
                self._run_staged(plan, places, hosted, stream)
                taken.append("staged")
            event = self.cupy.cuda.Event(disable_timing=True)
            self.cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return "+".join(taken), event

    def close(self) -> None:
        """Wait for what was enqueued through the staging ring, and free the device memory. Safe to call twice."""
        with self._lock, self.cupy.cuda.Device(self.device.index):
            self._copy_stream.synchronize()
            self._ring = None
            self._calls = Tables(self.cupy)

    # -- paths --------------------------------------------------------------------------------------------------------

    def _run(self, plan: Plan, places: list[list[Place]], chunks: Sequence[int], max_blocks: int | None, stream: int) -> None:
        """One launch per batch over chunks that the device can read where they are."""
        pointers = [[group_places[index].pointer for index in chunks] for group_places in places]
        chunk_tables, block_tables, done = self._tables(plan, chunks, pointers, stream)
        aligned = all(pointer % 16 == 0 for group in pointers for pointer in group)
        with self.cupy.cuda.ExternalStream(stream):
            for batch in self._batches[aligned]:
                self._launch(batch, chunk_tables[batch.group], block_tables[batch.group], len(chunks), None, max_blocks)
        done.record(stream)

    def _run_staged(self, plan: Plan, places: list[list[Place]], chunks: Sequence[int], stream: int) -> None:
        """Each chunk through a slot of the ring; the last in pieces, so that little is left to do when its last byte arrives."""
        assert self._ring is not None
        copy_stream = self._copy_stream.ptr
        groups = range(len(self.planner.layouts))
        slots = [self._ring.take() for _ in chunks]
        pointers = [[slot + self._offsets[group] for slot, _ in slots] for group in groups]
        # Chunks that share a slot within one call are kept apart by its event, like those of different calls.
        chunk_tables, block_tables, done = self._tables(plan, chunks, pointers, copy_stream)
        with self.cupy.cuda.ExternalStream(stream):
            for position, index in enumerate(chunks):
                slot, free = slots[position]
                free.hold(copy_stream)
                last_chunk = position == len(chunks) - 1
                for group in groups:
                    last = last_chunk and group == groups[-1]
                    base = slot + self._offsets[group]
                    table = chunk_tables[group] + position * CHUNK.itemsize
                    for rows in self._pieces(group) if last else (None,):
                        self._copy(plan, index, group, places[group][index], base, rows, copy_stream)
                        self._piece.record(copy_stream)
                        self._piece.hold(stream)
                        for batch in self._batches[True]:
                            if batch.group == group:
                                self._launch(batch, table, block_tables[group], 1, rows, self.options.max_blocks)
                free.record(stream)
        done.record(stream)

    def _pieces(self, group: int) -> list[tuple[int, int]]:
        """Ranges of rows of an object, each half as long as the one before, down to a size that a copy is still worth."""
        planes, layers, tokens, hidden = self.planner.shapes[group]
        row_bytes = tokens * hidden * self.planner.layouts[group].itemsize
        rows, start = planes * layers, 0
        pieces = []
        while rows - start > 1 and (rows - start) * row_bytes > 2 * _SMALLEST_PIECE:
            length = (rows - start) // 2
            pieces.append((start, start + length))
            start += length
        pieces.append((start, rows))
        return pieces

    def _copy(
        self, plan: Plan, index: int, group: int, place: Place, base: int, rows: tuple[int, int] | None, stream: int
    ) -> None:
        runtime = self.cupy.cuda.runtime
        source = plan.sources[group][index]
        planes, layers, tokens, hidden = self.planner.shapes[group]
        token_bytes = hidden * self.planner.layouts[group].itemsize
        row_bytes = tokens * token_bytes
        first, end = rows or (0, planes * layers)
        if place.kind == "device":
            kind = runtime.memcpyDeviceToDevice
        else:
            kind = runtime.memcpyHostToDevice
        count = int(plan.count[index])
        if count < tokens and not source.breaks:
            start = first * row_bytes + int(plan.offset[index]) * token_bytes
            runtime.memcpy2DAsync(
                base + start, row_bytes, source.pointer + start, row_bytes, count * token_bytes, end - first, kind, stream
            )
            return
        start, stop = first * row_bytes, end * row_bytes
        bounds = [start, *(at for at in sorted(source.breaks) if start < at < stop), stop]
        for begin, finish in zip(bounds[:-1], bounds[1:], strict=True):
            runtime.memcpyAsync(base + begin, source.pointer + begin, finish - begin, kind, stream)

    # -- launches -----------------------------------------------------------------------------------------------------

    def _launch(
        self, batch: _Batch, chunks: int, blocks: int, count: int, rows: tuple[int, int] | None, max_blocks: int | None
    ) -> None:
        tokens = self.planner.chunk_tokens
        ranges = [segment.slab_range(*rows) if rows else (0, len(segment.rows)) for segment in batch.segments]
        tiles = [segment.tiles(tokens) for segment in batch.segments]
        most = max(length for _, length in ranges)
        if most == 0:
            return
        # Few tiles: share the layers out too, so that every multiprocessor has work.
        wanted = _BLOCKS_PER_MULTIPROCESSOR * self._multiprocessors
        splits = max(1, min(-(-wanted // (sum(tiles) * count)), -(-most // LAYERS_IN_FLIGHT)))
        per_unit = -(-most // splits)
        per_unit = -(-per_unit // LAYERS_IN_FLIGHT) * LAYERS_IN_FLIGHT
        launch = batch.launch[0]
        units = 0
        for index, ((first, length), segment_tiles) in enumerate(zip(ranges, tiles, strict=True)):
            launch["part"][index] = (units, segment_tiles, first, length)
            units += segment_tiles * -(-length // per_unit)
        launch["chunks"] = chunks
        launch["blocks"] = blocks
        launch["units"] = units * count
        launch["units_per_chunk"] = units
        launch["slabs_per_unit"] = per_unit
        grid = units * count if max_blocks is None else min(units * count, max_blocks)
        batch.kernel((grid,), (_THREADS,), (batch.launch,))

    def _tables(
        self, plan: Plan, chunks: Sequence[int], pointers: list[list[int]], stream: int
    ) -> tuple[list[int], list[int], Event]:
        """Bring the chunk and block tables to the device in one copy. Returns their addresses by group, and when they are done with."""
        picked = np.asarray(chunks, dtype=np.intp)
        parts: list[NDArray[np.uint8]] = []
        for group_pointers in pointers:
            entries = np.empty(len(chunks), dtype=CHUNK)
            entries["source"] = group_pointers
            for name in ("old_start", "cur_start", "offset", "count"):
                entries[name] = getattr(plan, name)[picked]
            parts.append(entries.view(np.uint8))
        ends = plan.cur_start + plan.count
        for layout, table in zip(self.planner.layouts, plan.block_tables, strict=True):
            needed = -(-int(ends.max()) // layout.block_size)
            parts.append(np.ascontiguousarray(table[:needed]).view(np.uint8))
        starts, total = [], 0
        for part in parts:
            starts.append(total)
            total += -(-part.nbytes // 16) * 16
        table = self._calls.take(total)
        for start, part in zip(starts, parts, strict=True):
            table.host[start : start + part.nbytes] = part
        table.held = plan
        runtime = self.cupy.cuda.runtime
        runtime.memcpyAsync(table.pointer, table.host_pointer, total, runtime.memcpyHostToDevice, stream)
        groups = len(pointers)
        addresses = [table.pointer + start for start in starts]
        return addresses[:groups], addresses[groups:], table.done

    def _bytes(self, plan: Plan, index: int) -> int:
        return sum(self.planner.nbytes) * int(plan.count[index]) // self.planner.chunk_tokens

    # -- registration -------------------------------------------------------------------------------------------------

    def _upload(self, content: NDArray[np.uint8]) -> int:
        """Bytes on the device, for as long as the backend lives."""
        memory = self.cupy.cuda.Memory(content.nbytes)
        self._held.append(memory)
        self.cupy.cuda.runtime.memcpy(memory.ptr, content.ctypes.data, content.nbytes, self.cupy.cuda.runtime.memcpyHostToDevice)
        return int(memory.ptr)

    def _upload_tables(self, rope: RopeTables | None) -> list[DeviceTable]:
        tables = []
        for index, buffer in enumerate(rope.tables if rope is not None else ()):
            rows, width = buffer.shape
            if buffer.device.kind == "cuda":
                if buffer.device != self.device:
                    raise ValueError(f"cos_sin_caches[{index}] is on {buffer.device}, the paged cache on {self.device}")
                stride = buffer.strides[0] // DTYPES[buffer.dtype].itemsize
                tables.append(DeviceTable(buffer.pointer, stride, width, buffer.dtype))
            else:
                content = np.ascontiguousarray(host_view(buffer))
                pointer = self._upload(content.view(np.uint8).reshape(-1))
                tables.append(DeviceTable(pointer, width, width, buffer.dtype))
        return tables

    def _lower_group(self, group: int, tables: list[DeviceTable], aligned: bool) -> list[_Batch]:
        layout = self.planner.layouts[group]
        segments = lower(layout, self.planner.segments[group], self.planner.chunk_tokens, tables, elements=not aligned)
        kernels = modules.load(self.cupy, layout.dtype)
        batches = []
        for vectors, kernel in zip((True, False), kernels, strict=True):
            own = [segment for segment in segments if segment.vectors == vectors]
            for start in range(0, len(own), MAX_SEGMENTS):
                batches.append(self._batch(group, kernel, own[start : start + MAX_SEGMENTS]))
        return batches

    def _batch(self, group: int, kernel: Any, segments: list[LoweredSegment]) -> _Batch:
        launch = np.zeros(1, dtype=LAUNCH)
        launch[0]["block_size"] = self.planner.layouts[group].block_size
        launch[0]["segments"] = len(segments)
        for index, segment in enumerate(segments):
            entry = launch[0]["segment"][index]
            for name, value in segment.fields.items():
                entry[name] = value
            entry["slabs"] = self._upload(segment.slabs.view(np.uint8).reshape(-1))
        return _Batch(group, kernel, segments, launch)


_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 4
_SMALLEST_PIECE = 1 << 20


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each group's object begins in a slot, and the slot's size; aligned like allocations are."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 256) * 256)
    return offsets
