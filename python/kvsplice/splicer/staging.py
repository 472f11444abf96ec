"""Device memory that host chunks pass through, and the small tables of each call."""

from __future__ import annotations

from typing import Any

import numpy as np
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


class Table:
    """A piece of pinned host memory and its twin on the device."""

    def __init__(self, cupy: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pinned = cupy.cuda.alloc_pinned_memory(nbytes)
        self.host: NDArray[np.uint8] = np.frombuffer(self._pinned, dtype=np.uint8, count=nbytes)
        self._device = cupy.cuda.Memory(nbytes)
        self.pointer: int = self._device.ptr
        self.host_pointer: int = self._pinned.ptr
        self.done = Event(cupy)
        self.held: object = None


class Tables:
    """Tables that calls in flight read, handed out again when they are done. It keeps what a call's copies read alive."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._tables: list[Table] = []

    def take(self, nbytes: int) -> Table:
        """A table of at least so many bytes that no call uses."""
        chosen = None
        for table in self._tables:
            if table.done.passed:
                table.held = None
                if chosen is None and table.nbytes >= nbytes:
                    chosen = table
        if chosen is None:
            # Never given back: freeing device memory would wait for the whole device.
            chosen = Table(self._cupy, max(_SMALLEST_TABLE, 1 << (nbytes - 1).bit_length()))
            self._tables.append(chosen)
        return chosen
