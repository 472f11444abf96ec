"""The paged caches that workers registered with LMCache's server, as the engine sees them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from lmcache import torch_dev
from lmcache.v1.multiprocess.native_completion import submit_callback_to_stream

from kvsplice.splicer import PagedLayout
from kvsplice.splicer.formats import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvsplice.lmcache.module.callbacks import Callbacks

__all__ = ["LMCacheContexts", "WorkerCache"]

FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""LMCache's names of what the bits of a ``uint8`` cache mean, and ours."""


class WorkerCache:
    """The `kvsplice.ports.PagedContext` of one worker.

    Parameters
    ----------
    instance_id : int
    entry : lmcache.v1.multiprocess.modules.lmcache_driven_transfer.ContextEntry
    chunk_size : int
    fp8 : str or None
        What the bits of ``uint8`` caches mean: one of ours.
    callbacks : Callbacks

    Raises
    ------
    ValueError
        If its caches lie in a way that cannot be spliced.
    """

    def __init__(self, instance_id: int, entry: Any, chunk_size: int, fp8: str | None, callbacks: Callbacks) -> None:
        self.cache = entry.cache_context
        self.model_name: str = entry.model_name
        self.world_size: int = entry.world_size
        self._instance_id = instance_id
        self._events = entry.event_backend
        self._callbacks = callbacks
        manager = self.cache.kv_layer_groups_manager
        if manager.num_object_groups != 1:
            raise ValueError(
                f"instance_id: {instance_id} stores {manager.num_object_groups} objects per chunk; mode 'module' "
                "knows one: start the server without --separate-object-groups, or use mode 'matcher'"
            )
        groups = manager.kernel_groups
        self.layouts: Sequence[PagedLayout] = [self._layout(index, chunk_size, fp8) for index in range(len(groups))]
        self.block_table_of: Sequence[int] = [group.engine_group_idx for group in groups]
        self._torch_stream = self.cache.stream
        self._callback_stream = self.cache.cupy_stream
        self.stream: Any = None
        if self.cache.device.type == "cuda":
            import cupy

            # Of its own: on LMCache's it would wait behind copies of stores.
            self._torch_stream = torch_dev.Stream(device=self.cache.device)
            self.stream = cupy.cuda.ExternalStream(self._torch_stream.cuda_stream, self.cache.device.index)
            self._callback_stream = self.stream

    def _layout(self, index: int, chunk_size: int, fp8: str | None) -> PagedLayout:
        group = self.cache.kv_layer_groups_manager.kernel_groups[index]
        where = f"instance_id: {self._instance_id}, group {index} of layers"
        if group.recurrent_state:
            raise ValueError(f"{where}: recurrent state, which stands at no position that could be changed")
        if group.tokens_per_block != group.slots_per_block:
            raise ValueError(
                f"{where}: {group.slots_per_block} slots for {group.tokens_per_block} tokens of a block; compressed "
                "caches cannot be spliced"
            )
        form = parse(int(self.cache.get_engine_kv_format(index)))
        tensors = self.cache.kv_tensors
        if form.lists[:1] == ("NL",):
            caches: Any = [tensors[layer] for layer in group.layer_indices]
        elif form.lists[:2] == ("TWO", "NL"):
            caches = [[of_part[layer] for layer in group.layer_indices] for of_part in tensors]
        else:
            caches = tensors
        layout = PagedLayout.from_format(
            form.name,
            caches,
            dtype=fp8 if group.dtype == torch.uint8 else None,
            block_size=group.tokens_per_block if "NBBS" in form.axes else None,
        )
        shape, _ = self.cache.get_kernel_group_shape_dtype(chunk_size, index)
        if tuple(shape) != layout.object_shape(chunk_size):
            raise ValueError(
                f"{where}: a chunk is stored as {list(shape)}, and not as {list(layout.object_shape(chunk_size))}; "
                "sliding windows are stored whole with --engine-type blend only"
            )
        return layout

    def wait(self, event: Any) -> None:
        """Let the stream wait for a worker's event, which is its handle."""
        imported = self._events.import_event(event, self.cache.device)
        self._events.wait_event(imported, self._torch_stream)
        token = self.cache.hold_imported_event(imported)
        submit_callback_to_stream(self._callback_stream, "release_imported_event", (self._instance_id, token))

    def record(self) -> bytes:
        """The handle of an event behind all that is on the stream."""
        device = self.cache.device
        with torch_dev.device(device):
            event = self._events.create_event(device)
            self._events.record_event(event, self._torch_stream)
            handle: bytes = self._events.export_event(event, device)
        return handle

    def after(self, action: Callable[[], None]) -> None:
        """Call this when all that is on the stream now is done; at once in host memory."""
        if self.stream is None:
            action()
        else:
            self._callbacks.after(self.stream, action)


class LMCacheContexts:
    """The `kvsplice.ports.Contexts` of a server: instances whose rope is known.

    Parameters
    ----------
    context : lmcache.v1.multiprocess.engine_context.MPCacheServerContext
    transfer : lmcache.v1.multiprocess.modules.lmcache_driven_transfer.LMCacheDrivenTransferModule
    callbacks : Callbacks
    """

    def __init__(self, context: Any, transfer: Any, callbacks: Callbacks) -> None:
        self._chunk_size: int = context.chunk_size
        self._descriptions = context.layout_desc_registry
        self._transfer = transfer
        self._callbacks = callbacks
        self._caches: dict[int, WorkerCache] = {}
        self._mutex = threading.Lock()

    def add(self, instance_id: int, kv_quant: str) -> WorkerCache:
        """Describe what a worker registered.

        Raises
        ------
        ValueError
            If it registered nothing, or what cannot be spliced.
        """
        entry = self._transfer.get_and_touch_context_entry(instance_id)
        if entry is None:
            raise ValueError(f"instance_id: {instance_id} has no paged cache: it has to be registered before its rope")
        if kv_quant and kv_quant not in FP8:
            raise ValueError(f"kv_quant: {kv_quant!r} is none of {', '.join(FP8)}, nor empty")
        cache = WorkerCache(instance_id, entry, self._chunk_size, FP8.get(kv_quant), self._callbacks)
        with self._mutex:
            self._caches[instance_id] = cache
        return cache

    def remove(self, instance_id: int) -> None:
        """Forget a worker, if it is known."""
        with self._mutex:
            self._caches.pop(instance_id, None)

    def get(self, instance_id: int) -> WorkerCache | None:
        """A worker's paged cache, if it is the one that was described."""
        entry = self._transfer.get_and_touch_context_entry(instance_id)
        with self._mutex:
            cache = self._caches.get(instance_id)
        return cache if cache is not None and entry is not None and cache.cache is entry.cache_context else None

    def covers(self, model_name: str, world_size: int) -> bool:
        """Whether some worker of this model and world has registered one."""
        return bool(self._descriptions.find_group_layout_descs(model_name, world_size))

    def describe(self, model_name: str, world_size: int) -> list[tuple[str, Sequence[int]]]:
        """The dtype and shape of a stored object of each group of layers."""
        layout = self._descriptions.find(model_name, world_size)
        if layout is None:
            return []
        return [(str(dtype), list(shape)) for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)]
