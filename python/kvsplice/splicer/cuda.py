"""Splices on an NVIDIA GPU, with the prebuilt kernels through CuPy."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsplice.arrays import Device, host_view
from kvsplice.dtypes import DTYPES
from kvsplice.splicer import modules
from kvsplice.splicer.launches import Batch, Rows
from kvsplice.splicer.lowering import CHUNK, MAX_SEGMENTS, DeviceTable, lower
from kvsplice.splicer.staging import Event, Ring, Table, Tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvsplice.rope import RopeTables
    from kvsplice.splicer.plan import Plan, Planner, Reading, Source

PATHS = ("auto", "staged", "direct")


@dataclass(frozen=True)
class CudaOptions:
    """How the CUDA backend uses the machine.

    Attributes
    ----------
    staging_chunks : int
        Slots of the staging ring; each takes a chunk's objects of all groups in device memory.
    device_blocks, staged_blocks, direct_blocks : int or None
        Most thread blocks that a launch may have, and so what share of the GPU it takes: a multiprocessor holds two of
        these blocks of 256 threads. For chunks in device memory, for staged chunks, and for kernels that read host
        memory. The latter two wait for the host link, which few blocks keep up with. None means no bound.
    direct_bytes : int
        Up to this size, pinned chunks are read by the kernel itself instead of being staged.
    """

    staging_chunks: int = 4
    device_blocks: int | None = None
    staged_blocks: int | None = 32
    direct_blocks: int | None = 32
    direct_bytes: int = 8 << 20


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


class CudaPlan:
    """A plan whose sources were located and whose tables are on their way to the device.

    Chunks that lie in device memory come first in ``order``.
    """

    def __init__(self, plan: Plan, order: list[int], on_device: int, pinned: bool) -> None:
        self.plan = plan
        self.order = order
        self.on_device = on_device
        self.pinned = pinned
        self.table: Table | None = None
        self.chunk_tables: list[int] = []
        self.block_tables: list[int] = []


@dataclass(frozen=True)
class HeadStart:
    """A chunk whose copy into the ring began before the rest was checked: its slot, and an event behind each piece."""

    index: int
    slot: int
    free: Event
    pieces: list[Event]


class CudaBackend:
    """Writes plans into paged caches on one GPU. Calls only enqueue; no call waits for the device."""

    def __init__(self, planner: Planner, options: CudaOptions) -> None:
        for group, layout in enumerate(planner.layouts):
            if layout.device.kind != "cuda":
                raise ValueError(f"layouts[{group}] is on {layout.device}; the CUDA backend writes to a GPU")
        self.cupy = require_cupy()
        self._runtime = self.cupy.cuda.runtime
        self._planner = planner
        self._options = options
        self.device: Device = planner.layouts[0].device
        self._lock = threading.RLock()
        self._held: list[Any] = []
        self._offsets = _offsets(planner.nbytes)
        self._groups = range(len(planner.layouts))
        self._pieces = [self._cut(group) for group in self._groups]
        with self.cupy.cuda.Device(self.device.index):
            tables = self._upload_tables(planner.rope)
            self._batches = {
                aligned: [[*self._lower_group(group, tables, aligned)] for group in self._groups]
                for aligned in (True, False)
            }
            self._copy_stream = self.cupy.cuda.Stream(non_blocking=True)
            self._table_stream = self.cupy.cuda.Stream(non_blocking=True)
            self._piece = Event(self.cupy)
            self._head_pieces = [[Event(self.cupy) for _ in pieces] for pieces in self._pieces]
            self._tables = Tables(self.cupy)
            self._ring: Ring | None = Ring(self.cupy, self._offsets[-1], options.staging_chunks)

    def splice(self, reading: Reading, block_tables: Any, path: str, stream: int) -> tuple[int, str, Any]:
        """Check the rest, and enqueue everything.

        The first copy runs meanwhile: until a kernel reads it, the ring is all it touches.

        Returns
        -------
        tokens : int
        path, event
            As from `run`.
        """
        with self.cupy.cuda.Device(self.device.index), self._lock:
            self._check_open()
            places = self._locate_all(reading.sources)
            head = self._begin(reading, places, path)
            plan = self._planner.place(reading, block_tables)
            if not plan.tokens:
                return 0, "none", None
            prepared = self._prepare(plan, places)
            return (plan.tokens, *self._run(prepared, path, stream, head))

    def _begin(self, reading: Reading, places: list[list[tuple[str, int]]], path: str) -> HeadStart | None:
        """Begin to copy the first chunk that is to be staged."""
        hosted = [
            index for index, own in enumerate(zip(*places, strict=True)) if any(kind != "device" for kind, _ in own)
        ]
        if not hosted or path == "direct":
            return None
        tokens = sum(reading.rows[index][3] for index in hosted)
        pinned = all(own[index][0] == "pinned" for index in hosted for own in places)
        if path == "auto" and pinned and self._nbytes(tokens) <= self._options.direct_bytes:
            return None
        assert self._ring is not None
        index, stream = hosted[0], self._copy_stream.ptr
        slot, free = self._ring.take()
        free.hold(stream)
        group = self._groups[0]
        only = len(hosted) == 1 and len(self._groups) == 1
        pieces = self._pieces[group] if only else [None]
        _, _, offset, count = reading.rows[index]
        for rows, event in zip(pieces, self._head_pieces[group], strict=False):
            self._copy(reading.sources[group][index], (offset, count), group, slot + self._offsets[group], rows, stream)
            event.record(stream)
        return HeadStart(index, slot, free, self._head_pieces[group][: len(pieces)])

    def prepare(self, plan: Plan) -> CudaPlan:
        """Locate the sources and send the plan's tables.

        Raises
        ------
        ValueError
            If a source is on another GPU.
        RuntimeError
            If the backend is closed.
        """
        with self.cupy.cuda.Device(self.device.index), self._lock:
            self._check_open()
            return self._prepare(plan, self._locate_all(plan.sources))

    def _locate_all(self, sources: list[list[Source]]) -> list[list[tuple[str, int]]]:
        return [
            [self._locate(source, nbytes, index) for index, source in enumerate(own)]
            for own, nbytes in zip(sources, self._planner.nbytes, strict=True)
        ]

    def _prepare(self, plan: Plan, places: list[list[tuple[str, int]]]) -> CudaPlan:
        kinds = [{kind for kind, _ in own} for own in zip(*places, strict=True)]
        near = [index for index, own in enumerate(kinds) if own == {"device"}]
        hosted = [index for index, own in enumerate(kinds) if own != {"device"}]
        prepared = CudaPlan(plan, near + hosted, len(near), all("pageable" not in kinds[index] for index in hosted))
        if plan.tokens:
            self._send_tables(prepared, [[own[index][1] for index in prepared.order] for own in places])
        return prepared

    def run(self, prepared: CudaPlan, path: str, stream: int) -> tuple[str, Any]:
        """Enqueue all copies and kernels of a plan.

        Returns
        -------
        path : str
            ``device``, ``direct``, ``staged`` or, where sources are of several kinds, a combination with ``+``.
        event : cupy.cuda.Event
            Recorded on the stream behind the last write.
        """
        with self.cupy.cuda.Device(self.device.index), self._lock:
            self._check_open()
            return self._run(prepared, path, stream, None)

    def _run(self, prepared: CudaPlan, path: str, stream: int, head: HeadStart | None) -> tuple[str, Any]:
        count, near = len(prepared.order), prepared.on_device
        if path == "direct" and near < count and not prepared.pinned:
            raise ValueError("path: 'direct' needs pinned host memory")
        table = prepared.table
        assert table is not None
        table.sent.hold(stream)
        taken = []
        if near:
            self._run_in_place(prepared, 0, near, self._options.device_blocks, stream)
            taken.append("device")
        if near < count:
            tokens = int(prepared.plan.count[prepared.order[near:]].sum())
            small = prepared.pinned and self._nbytes(tokens) <= self._options.direct_bytes
            if path == "direct" or (path == "auto" and small):
                self._run_in_place(prepared, near, count, self._options.direct_blocks, stream)
                taken.append("direct")
            else:
                self._run_staged(prepared, near, count, stream, head)
                taken.append("staged")
        # A plan may run on one stream after another; the last mark must not be reached before the earlier ones.
        table.done.hold(stream)
        table.done.record(stream)
        event = self.cupy.cuda.Event(disable_timing=True)
        self._runtime.eventRecord(event.ptr, stream)
        return "+".join(taken), event

    def close(self) -> None:
        """Wait for copies in flight, and free the device memory. Safe to call twice."""
        with self.cupy.cuda.Device(self.device.index), self._lock:
            if self._ring is None:
                return
            self._copy_stream.synchronize()
            self._table_stream.synchronize()
            self._tables.wait()
            self._ring.wait()
            self._ring = None
            self._tables = Tables(self.cupy)
            self._held.clear()

    def __del__(self) -> None:
        # Pinned memory must not go to another user while a copy reads it.
        if getattr(self, "_ring", None) is not None:
            self.close()

    def _check_open(self) -> None:
        if self._ring is None:
            raise RuntimeError("the splicer is closed")

    # -- preparing ----------------------------------------------------------------------------------------------------

    def _locate(self, source: Source, nbytes: int, index: int) -> tuple[str, int]:
        """Whether the source is in device memory, pinned, or pageable; and its address for the device."""
        if source.location is not None:
            return source.location, source.pointer
        first = self._runtime.pointerGetAttributes(source.pointer)
        if first.type in {_DEVICE, _MANAGED}:
            if first.type == _DEVICE and first.device != self.device.index:
                raise ValueError(f"chunks[{index}].source is on cuda:{first.device}, the paged cache on {self.device}")
            return "device", source.pointer
        if first.type == _HOST and self._runtime.pointerGetAttributes(source.pointer + nbytes - 1).type == _HOST:
            return "pinned", int(first.devicePointer)
        return "pageable", source.pointer

    def _send_tables(self, prepared: CudaPlan, pointers: list[list[int]]) -> None:
        """Bring the chunk and block tables to the device in one copy."""
        plan, order = prepared.plan, prepared.order
        chunks = np.empty((len(self._groups), len(order)), dtype=CHUNK)
        chunks["source"] = pointers
        for name in ("old_start", "cur_start", "offset", "count"):
            chunks[name] = getattr(plan, name)[order]
        starts = [chunks.nbytes]
        for block_table in plan.block_tables:
            starts.append(starts[-1] + -(-block_table.nbytes // 8) * 8)
        table = self._tables.take(starts[-1])
        table.host[: chunks.nbytes] = chunks.reshape(-1).view(np.uint8)
        for start, block_table in zip(starts, plan.block_tables, strict=False):
            table.host[start : start + block_table.nbytes] = block_table.view(np.uint8)
        stream = self._table_stream.ptr
        self._runtime.memcpyAsync(
            table.pointer, table.host_pointer, starts[-1], self._runtime.memcpyHostToDevice, stream
        )
        table.sent.record(stream)
        table.lend(prepared, plan.sources)
        prepared.table = table
        row = len(order) * CHUNK.itemsize
        prepared.chunk_tables = [table.pointer + group * row for group in self._groups]
        prepared.block_tables = [table.pointer + start for start in starts[:-1]]

    def _nbytes(self, tokens: int) -> int:
        return sum(self._planner.nbytes) * tokens // self._planner.chunk_tokens

    # -- paths --------------------------------------------------------------------------------------------------------

    def _run_in_place(self, prepared: CudaPlan, first: int, end: int, max_blocks: int | None, stream: int) -> None:
        """One launch per batch over chunks that the device can read where they are."""
        sources = prepared.plan.sources
        aligned = all(
            sources[group][index].pointer % 16 == 0 for index in prepared.order[first:end] for group in self._groups
        )
        for group in self._groups:
            table = prepared.chunk_tables[group] + first * CHUNK.itemsize
            for batch in self._batches[aligned][group]:
                batch.launch(table, prepared.block_tables[group], end - first, max_blocks=max_blocks, stream=stream)

    def _run_staged(self, prepared: CudaPlan, first: int, end: int, stream: int, head: HeadStart | None) -> None:
        """Bring each chunk through a slot of the ring.

        The last goes in pieces, so that little is left to do when its last byte arrives.
        """
        assert self._ring is not None
        copy_stream, plan = self._copy_stream.ptr, prepared.plan
        for position in range(first, end):
            index = prepared.order[position]
            if head is not None and head.index == index:
                slot, free = head.slot, head.free
                begun = list(head.pieces)
            else:
                slot, free = self._ring.take()
                free.hold(copy_stream)
                begun = []
            taken = int(plan.offset[index]), int(plan.count[index])
            for group in self._groups:
                last = position == end - 1 and group == self._groups[-1]
                base = slot + self._offsets[group]
                table = prepared.chunk_tables[group] + position * CHUNK.itemsize
                for rows in self._pieces[group] if last else (None,):
                    if begun:
                        piece = begun.pop(0)
                    else:
                        piece = self._piece
                        self._copy(plan.sources[group][index], taken, group, base, rows, copy_stream)
                        piece.record(copy_stream)
                    piece.hold(stream)
                    for batch in self._batches[True][group]:
                        batch.launch(
                            table,
                            prepared.block_tables[group],
                            1,
                            source=base,
                            rows=rows,
                            max_blocks=self._options.staged_blocks,
                            stream=stream,
                        )
            free.record(stream)

    def _cut(self, group: int) -> list[Rows]:
        """Cut an object's rows in ranges, each half as long as the one before, down to what a copy is still worth."""
        planes, layers, tokens, hidden = self._planner.shapes[group]
        row_bytes = tokens * hidden * self._planner.layouts[group].itemsize
        rows, start = planes * layers, 0
        pieces = []
        while rows - start > 1 and (rows - start) * row_bytes > 2 * _SMALLEST_PIECE:
            length = (rows - start) // 2
            pieces.append((start, start + length))
            start += length
        pieces.append((start, rows))
        return pieces

    def _copy(
        self, source: Source, taken: tuple[int, int], group: int, base: int, rows: Rows | None, stream: int
    ) -> None:
        """Copy rows of an object to where it is staged; of a chunk that is taken in part, that part of each row."""
        planes, layers, tokens, hidden = self._planner.shapes[group]
        token_bytes = hidden * self._planner.layouts[group].itemsize
        row_bytes = tokens * token_bytes
        first, end = rows or (0, planes * layers)
        # Where unified addressing tells what an address is, the default direction follows it.
        kind = self._runtime.memcpyDefault
        offset, count = taken
        start, stop = first * row_bytes, end * row_bytes
        if count < tokens and not source.breaks:
            start += offset * token_bytes
            self._runtime.memcpy2DAsync(
                base + start,
                row_bytes,
                source.pointer + start,
                row_bytes,
                count * token_bytes,
                end - first,
                kind,
                stream,
            )
            return
        bounds = [start, *(at for at in sorted(source.breaks) if start < at < stop), stop]
        for begin, finish in pairwise(bounds):
            self._runtime.memcpyAsync(base + begin, source.pointer + begin, finish - begin, kind, stream)

    # -- registration -------------------------------------------------------------------------------------------------

    def _upload(self, content: NDArray[np.uint8]) -> int:
        """Bytes on the device, for as long as the backend is open."""
        memory = self.cupy.cuda.Memory(content.nbytes)
        self._held.append(memory)
        self._runtime.memcpy(memory.ptr, content.ctypes.data, content.nbytes, self._runtime.memcpyHostToDevice)
        return int(memory.ptr)

    def _upload_tables(self, rope: RopeTables | None) -> list[DeviceTable]:
        tables = []
        for index, buffer in enumerate(rope.tables if rope is not None else ()):
            width = buffer.shape[1]
            if buffer.device.kind == "cuda":
                if buffer.device != self.device:
                    raise ValueError(f"cos_sin_caches[{index}] is on {buffer.device}, the paged cache on {self.device}")
                stride = buffer.strides[0] // DTYPES[buffer.dtype].itemsize
                tables.append(DeviceTable(buffer.pointer, stride, width, buffer.dtype))
            else:
                content = np.ascontiguousarray(host_view(buffer))
                tables.append(DeviceTable(self._upload(content.view(np.uint8).reshape(-1)), width, width, buffer.dtype))
        return tables

    def _lower_group(self, group: int, tables: list[DeviceTable], aligned: bool) -> list[Batch]:
        layout, tokens = self._planner.layouts[group], self._planner.chunk_tokens
        multiprocessors = int(self._runtime.getDeviceProperties(self.device.index)["multiProcessorCount"])
        segments = lower(layout, self._planner.segments[group], tokens, tables, elements=not aligned)
        batches = []
        for vectors, kernel in zip((True, False), modules.load(self.cupy, layout.dtype), strict=True):
            own = [segment for segment in segments if segment.vectors == vectors]
            for start in range(0, len(own), MAX_SEGMENTS):
                part = own[start : start + MAX_SEGMENTS]
                slabs = [self._upload(segment.slabs.view(np.uint8)) for segment in part]
                batches.append(Batch(self.cupy, kernel, group, layout.block_size, tokens, part, slabs, multiprocessors))
        return batches


_SMALLEST_PIECE = 1 << 20


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each group's object begins in a slot, and the slot's size; aligned like allocations are."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // 256) * 256)
    return offsets
