"""LMCache's storage manager as the engine's store of chunks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.v1.distributed.api import PrefetchTaskSpec, ipc_key_to_grouped_object_keys, ipc_key_to_object_keys
from lmcache.v1.memory_allocators.lazy_memory_allocator import LazyMemoryAllocator

from kvsplice.ports import Fetched, Policy
from kvsplice.splicer import StagedMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["LMCacheStore"]

_OBJECT_GROUP = 0
"""Instances with more than one are refused, see `kvsplice.lmcache.module.contexts`."""

_FETCHING = {Policy.PREFIX: "prefix", Policy.SEGMENTED_PREFIX: "full", Policy.SPARSE: "full"}


@dataclass(frozen=True)
class _Ticket:
    """A prefetch task of the storage manager, whose rows hold each rank's keys.

    ``positions`` maps a row to the positions of its keys in what was submitted.
    """

    handle: Any
    positions: list[list[int]]
    loading: int


class LMCacheStore:
    """The `kvsplice.ports.ChunkStore` of a server.

    Parameters
    ----------
    context : lmcache.v1.multiprocess.engine_context.MPCacheServerContext
    """

    def __init__(self, context: Any) -> None:
        self._storage = context.storage_manager
        self._layouts = context.layout_desc_registry

    def keys(self, request: Any, chunk_hashes: Sequence[bytes]) -> list[list[Any]]:
        """An ``ObjectKey`` per chunk and rank."""
        flat = ipc_key_to_object_keys(request.key.no_worker_id_version(), list(chunk_hashes), [_OBJECT_GROUP])[0]
        ranks = request.world_size
        return [flat[first : first + ranks] for first in range(0, len(flat), ranks)]

    def submit(self, keys: Sequence[Any], policy: Policy, locks: int, request: Any) -> _Ticket:
        """One task of the storage manager, a row per rank."""
        positions: defaultdict[int, list[int]] = defaultdict(list)
        for position, key in enumerate(keys):
            positions[key.kv_rank].append(position)
        row = self._row(request)
        rows = [type(row)([keys[i] for i in of_rank], _OBJECT_GROUP, row.layout_desc) for of_rank in positions.values()]
        handle = self._storage.submit_prefetch_task(
            PrefetchTaskSpec(rows, num_kv_readers=locks, fetching_policy=_FETCHING[policy]),
            external_request_id=request.request_id,
        )
        # What is in memory already is not known before the task is done; without a second tier all that is found is.
        loading = len(keys) if self._storage.l2_adapters() else 0
        return _Ticket(handle, list(positions.values()), loading)

    def _row(self, request: Any) -> Any:
        """A row without keys, for its layout."""
        model, world = request.model_name, request.world_size
        layouts = self._layouts.find_group_layout_descs(model, world)
        if not layouts:
            raise LookupError(f"no paged cache of model {model!r}, world size {world}, is registered")
        windows = self._layouts.find_attn_desc(model, world)
        return ipc_key_to_grouped_object_keys(request.key, [], [_OBJECT_GROUP], layouts, windows)[0]

    def poll(self, ticket: _Ticket) -> Fetched | None:
        """What was found; None while it loads."""
        result = self._storage.query_prefetch_status(ticket.handle)
        if result is None:
            return None
        loaded = _positions(result.hit_cells, ticket)
        return Fetched(loaded, loaded if result.found_cells is None else _positions(result.found_cells, ticket))

    def read(self, keys: Sequence[Any]) -> list[tuple[StagedMemory, ...]] | None:
        """Each object's memory, a part per group of layers; None if an object is gone."""
        wanted = list(keys)
        found, objects = self._storage.unsafe_read(wanted)
        return [_parts(each) for each in objects] if found == wanted else None

    def release(self, keys: Sequence[Any], locks: int) -> None:
        """Drop so many read locks of each key."""
        self._storage.finish_read_prefetched(list(keys), read_locks=locks)


def _positions(rows: Sequence[Any], ticket: _Ticket) -> NDArray[np.bool_]:
    """The storage manager's bitmaps by position in what was submitted."""
    flags = np.zeros(sum(map(len, ticket.positions)), np.bool_)
    for row, positions in zip(rows, ticket.positions, strict=False):
        flags[np.asarray(positions)[row.get_indices_list()]] = True
    return flags


def _parts(memory: Any) -> tuple[StagedMemory, ...]:
    """A memory object by address: the groups of layers lie in it one behind the other."""
    pointer, begin = memory.data_ptr, memory.meta.address
    lazy = isinstance(memory.parent(), LazyMemoryAllocator)
    parts = []
    for shape, dtype in zip(memory.get_shapes(), memory.get_dtypes(), strict=True):
        nbytes = shape.numel() * dtype.itemsize
        breaks: range | tuple[int, ...] = ()
        if lazy:
            # Its memory is pinned piece by piece.
            piece = LazyMemoryAllocator.PIN_CHUNK_SIZE
            breaks = range(piece - begin % piece, nbytes, piece)
        parts.append(StagedMemory(pointer, nbytes, tuple(breaks), "pinned" if lazy else None))
        pointer, begin = pointer + nbytes, begin + nbytes
    return tuple(parts)
