"""Device memory that host chunks pass through, and the small tables of each call."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST_TABLE = 1 << 14


class Event:
    """A CUDA event without timing, that can be recorded again and again."""

    def __init__(self, cupy: Any) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._runtime = cupy.cuda.runtime
        self.recorded = False

    def record(self, stream: int) -> None:
        """Mark this point of a stream."""
        self._runtime.eventRecord(self._event.ptr, stream)
        self.recorded = True

    def hold(self, stream: int) -> None:
        """Let a stream wait for the last mark, if there is one."""
        if self.recorded:
            self._runtime.streamWaitEvent(stream, self._event.ptr)

    def wait(self) -> None:
        """Block the host until the last mark is reached."""
        if self.recorded:
            self._event.synchronize()

    @property
    def passed(self) -> bool:
        """Whether the last mark was reached."""
        return not self.recorded or bool(self._event.done)


class Ring:
    """Slots of device memory, each as large as a chunk's objects, used in turn.

    A slot is free again when the kernel that read it is through; the copy stream waits for that, the host never does.
    """

    def __init__(self, cupy: Any, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = -(-slot_bytes // 256) * 256
        self._memory = cupy.cuda.Memory(self.slot_bytes * slots)
        self._free = [Event(cupy) for _ in range(slots)]
        self._next = 0

    def take(self) -> tuple[int, Event]:
        """The next slot's address, and the event to hold for before writing to it and to record after reading it."""
        index = self._next
        self._next = (index + 1) % len(self._free)
        return self._memory.ptr + index * self.slot_bytes, self._free[index]

    def wait(self) -> None:
        """Block the host until nothing reads the slots."""
        for free in self._free:
            free.wait()


class Table:
    """A piece of pinned host memory and its twin on the device, lent to one plan at a time.

    ``sent`` is recorded behind its copy, ``done`` behind each use.
    """

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        self.host: NDArray[np.uint8] = np.frombuffer(self._pinned, dtype=np.uint8, count=nbytes)
        self._device = cupy.cuda.Memory(nbytes)
        self.pointer: int = self._device.ptr
        self.host_pointer: int = self._pinned.ptr
        self.sent, self.done = Event(cupy), Event(cupy)
        self._borrower: weakref.ref[object] | None = None
        self._kept: object = None

    def lend(self, borrower: object, kept: object) -> None:
        """Lend it until the borrower is gone and its last use is done; so long, what its copies read is kept alive."""
        self._borrower, self._kept = weakref.ref(borrower), kept
        self.done.recorded = False

    def returned(self) -> bool:
        """Whether it can be lent again."""
        if self._borrower is not None and (
            self._borrower() is not None or not self.done.passed or not self.sent.passed
        ):
            return False
        self._borrower = self._kept = None
        return True


class Tables:
    """The tables that were ever needed at a time."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._tables: list[Table] = []

    def take(self, nbytes: int) -> Table:
        """A table of at least so many bytes that is not lent."""
        free = [table for table in self._tables if table.returned() and table.nbytes >= nbytes]
        if free:
            return free[0]
        # Never given back: freeing device memory would wait for the whole device.
        table = Table(self._cupy, max(_SMALLEST_TABLE, 1 << (nbytes - 1).bit_length()))
        self._tables.append(table)
        return table

    def wait(self) -> None:
        """Block the host until nothing uses them."""
        for table in self._tables:
            table.sent.wait()
            table.done.wait()
