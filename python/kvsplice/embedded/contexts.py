"""Paged caches by instance, in host memory or on a GPU."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvsplice.splicer import PagedLayout

__all__ = ["EmbeddedContext", "EmbeddedContexts"]


class EmbeddedContext:
    """One instance's paged cache. On a GPU everything runs on one stream.

    Parameters
    ----------
    layouts : sequence of PagedLayout
    block_table_of : sequence of int, optional
        Which block table each of them uses; its own, if left out.
    model_name, world_size
        Whose KV it is.
    stream : cupy.cuda.Stream, optional
        Made if left out and the layouts are on a GPU.
    """

    def __init__(
        self,
        layouts: Sequence[PagedLayout],
        block_table_of: Sequence[int] | None = None,
        *,
        model_name: str = "",
        world_size: int = 1,
        stream: Any = None,
    ) -> None:
        self.layouts = tuple(layouts)
        if not self.layouts:
            raise ValueError("layouts: none is given")
        self.block_table_of = tuple(range(len(self.layouts)) if block_table_of is None else block_table_of)
        if len(self.block_table_of) != len(self.layouts):
            raise ValueError(f"block_table_of: {len(self.block_table_of)} entries for {len(self.layouts)} layouts")
        self.model_name = model_name
        self.world_size = world_size
        self.stream = stream
        device = self.layouts[0].device
        if stream is None and device.kind == "cuda":
            import cupy

            with cupy.cuda.Device(device.index):
                self.stream = cupy.cuda.Stream(non_blocking=True)

    def wait(self, event: Any) -> None:
        """Let the stream wait for an event of CuPy's or torch's."""
        if event is None or self.stream is None:
            return
        if hasattr(event, "cuda_event"):
            import cupy

            cupy.cuda.runtime.streamWaitEvent(self.stream.ptr, event.cuda_event)
        else:
            self.stream.wait_event(event)

    def record(self) -> Any:
        """An event of CuPy's behind all that is on the stream; None in host memory."""
        return None if self.stream is None else self.stream.record()

    def after(self, action: Callable[[], None]) -> None:
        """Call this when all that is on the stream now is done; at once in host memory."""
        if self.stream is None:
            action()
        else:
            self.stream.launch_host_func(lambda _: action(), None)


class EmbeddedContexts:
    """The instances of this process."""

    def __init__(self) -> None:
        self._contexts: dict[int, EmbeddedContext] = {}
        self._mutex = threading.Lock()

    def register(self, instance_id: int, context: EmbeddedContext) -> None:
        """Add an instance, or replace it."""
        with self._mutex:
            self._contexts[instance_id] = context

    def unregister(self, instance_id: int) -> None:
        """Remove an instance, if it is there."""
        with self._mutex:
            self._contexts.pop(instance_id, None)

    def get(self, instance_id: int) -> EmbeddedContext | None:
        """An instance's paged cache, if it has one."""
        with self._mutex:
            return self._contexts.get(instance_id)

    def covers(self, model_name: str, world_size: int) -> bool:
        """Whether some instance of this model and world has one."""
        return self._find(model_name, world_size) is not None

    def describe(self, model_name: str, world_size: int) -> list[tuple[str, Sequence[int]]]:
        """The dtype, and the shape without tokens, of a stored object of each group of layers."""
        context = self._find(model_name, world_size)
        layouts = () if context is None else context.layouts
        return [(layout.dtype, (layout.kv_size, layout.num_layers, layout.hidden)) for layout in layouts]

    def _find(self, model_name: str, world_size: int) -> EmbeddedContext | None:
        with self._mutex:
            for context in self._contexts.values():
                if (context.model_name, context.world_size) == (model_name, world_size):
                    return context
        return None
