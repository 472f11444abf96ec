"""A chunk store in one process: host memory, and a disk behind it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from kvsplice.ports import Fetched, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvsplice.embedded.disk import DiskTier
    from kvsplice.ports import Key, Request

__all__ = ["MemoryStore", "ObjectKey"]

logger = logging.getLogger(__name__)

Arrays = tuple["NDArray[Any]", ...]


class ObjectKey(NamedTuple):
    """A chunk, as one rank of a scope holds it."""

    scope: bytes
    chunk_hash: bytes
    rank: int

    def identity(self) -> bytes:
        """The same as bytes; different keys have different ones."""
        return b"%d:%b%d:%b%d" % (len(self.scope), self.scope, len(self.chunk_hash), self.chunk_hash, self.rank)


@dataclass
class _Object:
    arrays: Arrays
    nbytes: int
    locks: int = 0
    writing: bool = False


class _Ticket:
    """A prefetch: what is known of each key, and how many are still being loaded."""

    def __init__(self, keys: Sequence[ObjectKey], policy: Policy, locks: int) -> None:
        self.keys = keys
        self.policy = policy
        self.locks = locks
        self.loaded = np.zeros(len(keys), bool)
        self.present = np.zeros(len(keys), bool)
        self.pending = 0
        self.loading = 0


class MemoryStore:
    """Objects in host memory up to a number of bytes, with an optional disk tier.

    Whatever is put goes to the disk too, unless half of the memory waits to be written already: a disk that cannot keep
    up does not get everything. The object in memory that went unused for longest makes room for another one, unless it
    is locked or being written. Loads from the disk run on threads of their own.

    Parameters
    ----------
    capacity : int
        Bytes of host memory.
    disk : DiskTier, optional
    threads : int
        For reading from the disk, and as many for writing to it.
    """

    def __init__(self, capacity: int, disk: DiskTier | None = None, threads: int = 2) -> None:
        if capacity < 0:
            raise ValueError(f"capacity: {capacity} is negative")
        self.capacity = capacity
        self.disk = disk
        self.evictions = self.skipped_writes = 0
        self._objects: OrderedDict[ObjectKey, _Object] = OrderedDict()
        self._bytes = self._unwritten = 0
        self._loading: dict[ObjectKey, list[tuple[_Ticket, int]]] = {}
        self._mutex = threading.Lock()
        self._writes: set[Future[None]] = set()
        # Apart: a lookup would wait for all that is to be written.
        self._readers, self._writers = (
            ThreadPoolExecutor(threads, thread_name_prefix=f"kvsplice-disk-{what}") for what in ("read", "write")
        )

    # -- the port -----------------------------------------------------------------------------------------------------

    def keys(self, request: Request, chunk_hashes: Sequence[bytes]) -> list[list[ObjectKey]]:
        """See `kvsplice.ports.ChunkStore`."""
        scope, ranks = request.scope, range(request.world_size)
        return [[ObjectKey(scope, chunk_hash, rank) for rank in ranks] for chunk_hash in chunk_hashes]

    def submit(self, keys: Sequence[Key], policy: Policy, locks: int, request: Request) -> _Ticket:
        """See `kvsplice.ports.ChunkStore`."""
        ticket = _Ticket(cast("Sequence[ObjectKey]", keys), policy, locks)
        to_load = []
        with self._mutex:
            for index, key in enumerate(ticket.keys):
                held = self._objects.get(key)
                if held is not None:
                    held.locks += locks
                    self._objects.move_to_end(key)
                    ticket.loaded[index] = ticket.present[index] = True
                elif self.disk is not None and key.identity() in self.disk:
                    waiting = self._loading.setdefault(key, [])
                    if not waiting:
                        to_load.append(key)
                    waiting.append((ticket, index))
                    ticket.present[index] = True
                    ticket.pending += 1
                elif policy is Policy.PREFIX:
                    break
            ticket.loading = ticket.pending
        for key in to_load:
            self._readers.submit(self._load, key)
        return ticket

    def poll(self, ticket: _Ticket) -> Fetched | None:
        """See `kvsplice.ports.ChunkStore`."""
        with self._mutex:
            if ticket.pending:
                return None
            if ticket.policy is Policy.PREFIX and not ticket.loaded.all():
                first = int(np.argmin(ticket.loaded))
                for index in (np.flatnonzero(ticket.loaded[first:]) + first).tolist():
                    self._objects[ticket.keys[index]].locks -= ticket.locks
                    ticket.loaded[index] = False
            return Fetched(ticket.loaded, ticket.present)

    def read(self, keys: Sequence[Key]) -> list[Arrays] | None:
        """See `kvsplice.ports.ChunkStore`: an object is a tuple of arrays, one per group of layers."""
        with self._mutex:
            found = [self._objects.get(cast("ObjectKey", key)) for key in keys]
            for key, held in zip(keys, found, strict=True):
                if held is not None and held.locks < 1:
                    raise ValueError(f"keys: {key} is read without a read lock")
            return None if None in found else [held.arrays for held in found if held is not None]

    def release(self, keys: Sequence[Key], locks: int) -> None:
        """See `kvsplice.ports.ChunkStore`."""
        with self._mutex:
            objects = [self._objects.get(cast("ObjectKey", key)) for key in keys]
            for key, held in zip(keys, objects, strict=True):
                if held is None or held.locks < locks:
                    raise ValueError(f"keys: {key} has fewer than {locks} read locks")
            for held in objects:
                assert held is not None
                held.locks -= locks

    # -- what fills it ------------------------------------------------------------------------------------------------

    def put(self, key: ObjectKey, arrays: Iterable[NDArray[Any]]) -> bool:
        """Keep an object, whose arrays must not change after; whether it is held now.

        It is not if it is larger than the store, or everything else is locked.
        """
        kept = tuple(arrays)
        with self._mutex:
            if key in self._objects:
                self._objects.move_to_end(key)
                return True
            held = self._insert(key, kept)
            if held is None:
                return False
            if self.disk is None:
                return True
            if self._unwritten and self._unwritten + held.nbytes > self.capacity // 2:
                self.skipped_writes += 1
                return True
            held.writing = True
            self._unwritten += held.nbytes
        write = self._writers.submit(self._write, key, held)
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return True

    def drop(self, keys: Iterable[ObjectKey]) -> int:
        """Forget objects that nobody has locked, on the disk too; how many were in memory."""
        dropped = 0
        for key in keys:
            with self._mutex:
                held = self._objects.get(key)
                if held is not None and (held.locks or held.writing):
                    continue
                if held is not None:
                    self._remove(key)
                    dropped += 1
            if self.disk is not None:
                self.disk.remove(key.identity())
        return dropped

    def flush(self) -> None:
        """Wait until all that was put is on the disk."""
        wait(list(self._writes))

    def close(self) -> None:
        """Finish what is being written. Safe to call twice."""
        self._writers.shutdown(wait=True)
        self._readers.shutdown(wait=True)

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: ObjectKey) -> bool:
        with self._mutex:
            return key in self._objects

    @property
    def read_locks(self) -> int:
        """Read locks on all objects."""
        with self._mutex:
            return sum(held.locks for held in self._objects.values())

    def stats(self) -> dict[str, int]:
        """Objects, bytes and what became of them."""
        with self._mutex:
            numbers = {
                "objects": len(self._objects),
                "bytes": self._bytes,
                "capacity": self.capacity,
                "evictions": self.evictions,
                "read_locks": sum(held.locks for held in self._objects.values()),
                "loading": len(self._loading),
            }
        if self.disk is not None:
            numbers |= {
                "disk_objects": len(self.disk),
                "disk_bytes": self.disk.nbytes,
                "disk_set_aside": self.disk.set_aside,
                "disk_failed_writes": self.disk.failed_writes,
                "disk_skipped_writes": self.skipped_writes,
            }
        return numbers

    # -- inside -------------------------------------------------------------------------------------------------------

    def _insert(self, key: ObjectKey, arrays: Arrays) -> _Object | None:
        nbytes = sum(array.nbytes for array in arrays)
        if nbytes > self.capacity or not self._make_room(nbytes):
            return None
        held = self._objects[key] = _Object(arrays, nbytes)
        self._bytes += nbytes
        return held

    def _make_room(self, wanted: int) -> bool:
        if self._bytes + wanted <= self.capacity:
            return True
        free, victims = self.capacity - self._bytes, []
        for key, held in self._objects.items():
            if held.locks == 0 and not held.writing:
                victims.append(key)
                free += held.nbytes
                if free >= wanted:
                    break
        if free < wanted:
            return False
        for key in victims:
            self._remove(key)
            self.evictions += 1
        return True

    def _remove(self, key: ObjectKey) -> None:
        self._bytes -= self._objects.pop(key).nbytes

    def _write(self, key: ObjectKey, held: _Object) -> None:
        assert self.disk is not None
        try:
            self.disk.write(key.identity(), held.arrays)
        except Exception:
            logger.exception("an object was not written to the disk")
        finally:
            with self._mutex:
                held.writing = False
                self._unwritten -= held.nbytes

    def _load(self, key: ObjectKey) -> None:
        assert self.disk is not None
        arrays = None
        try:
            arrays = self.disk.read(key.identity())
        except Exception:
            logger.exception("an object was not read from the disk")
        with self._mutex:
            held = self._objects.get(key)
            if held is None and arrays is not None:
                held = self._insert(key, arrays)
            for ticket, index in self._loading.pop(key):
                ticket.pending -= 1
                ticket.present[index] = arrays is not None or held is not None
                if held is not None:
                    held.locks += ticket.locks
                    ticket.loaded[index] = True
