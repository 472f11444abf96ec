"""The splicer: checks, then writes, on the CPU or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvsplice.splicer import streams
from kvsplice.splicer.cpu import CpuBackend
from kvsplice.splicer.cuda import PATHS, CudaBackend, CudaOptions, CudaPlan
from kvsplice.splicer.layout import PagedLayout
from kvsplice.splicer.plan import Plan, Planner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvsplice.rope import RopeTables
    from kvsplice.splicer.chunk import Chunk


@dataclass(frozen=True)
class SpliceResult:
    """What a splice did.

    Attributes
    ----------
    tokens : int
        Tokens written, or enqueued to be.
    nbytes : int
        Bytes of KV written for them.
    path : str
        ``cpu``; or on a GPU ``device`` (the chunks lay there), ``direct`` (the kernel read pinned host memory),
        ``staged`` (copied to the device in pieces first), a combination with ``+``; ``none`` if there was nothing to
        do.
    event : cupy.cuda.Event or None
        On a GPU, recorded behind the last write. Sources must stay as they are until it is reached.
    """

    tokens: int
    nbytes: int
    path: str
    event: Any = None


@dataclass(frozen=True)
class SplicePlan:
    """A splice that was checked, ready to run. Sources must stay as they are until it ran."""

    splicer: Splicer
    columns: Plan
    prepared: CudaPlan | None = None


class Splicer:
    """Writes chunks of stored KV into a paged cache, with K rotated to its new position.

    Parameters
    ----------
    layouts : PagedLayout or sequence of PagedLayout
        The paged cache, by groups of layers.
    rope : RopeTables or None
        The model's rope; None only for models without one.
    chunk_tokens : int
        Tokens of a stored object.
    backend : str, optional
        ``cpu`` or ``cuda``; by where the layouts are if left out.
    cuda : CudaOptions, optional

    Raises
    ------
    ValueError, TypeError
        If layouts and rope do not fit each other.
    RuntimeError
        If CUDA is asked for and CuPy, a GPU or a driver that loads the kernels is missing.
    """

    def __init__(
        self,
        layouts: PagedLayout | Sequence[PagedLayout],
        rope: RopeTables | None,
        *,
        chunk_tokens: int = 256,
        backend: str | None = None,
        cuda: CudaOptions | None = None,
    ) -> None:
        groups = [layouts] if isinstance(layouts, PagedLayout) else list(layouts)
        self._planner = Planner(groups, rope, chunk_tokens)
        self._owners = [owner for layout in groups for owner in layout.owners]
        self.backend = backend or groups[0].device.kind
        if self.backend not in {"cpu", "cuda"}:
            raise ValueError(f"backend: {backend!r} is neither 'cpu' nor 'cuda'")
        self._cpu = CpuBackend(self._planner) if self.backend == "cpu" else None
        self._cuda = CudaBackend(self._planner, cuda or CudaOptions()) if self.backend == "cuda" else None

    @property
    def layouts(self) -> tuple[PagedLayout, ...]:
        """The paged cache, by groups of layers."""
        return self._planner.layouts

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a stored object."""
        return self._planner.chunk_tokens

    def object_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """The shape of a stored object of each group: ``[kv_size, layers, tokens, hidden]``."""
        return self._planner.shapes

    def plan(self, chunks: Sequence[Chunk], block_tables: Any) -> SplicePlan:
        """Check a splice, and prepare it; nothing is written yet.

        The token at position ``p`` is to go to slot ``p % block_size`` of block ``block_tables[group][p //
        block_size]``.

        Parameters
        ----------
        chunks : sequence of Chunk
        block_tables : sequence of integer arrays
            The request's block numbers for each group, in host memory; a single array where there is one group.

        Raises
        ------
        ValueError, TypeError
            Naming the argument that is wrong.
        """
        plan = self._planner.plan(chunks, block_tables)
        if self._cpu is not None:
            self._cpu.check(plan)
            return SplicePlan(self, plan)
        assert self._cuda is not None
        return SplicePlan(self, plan, self._cuda.prepare(plan))

    def run(self, plan: SplicePlan, *, stream: object = None, path: str = "auto") -> SpliceResult:
        """Write what was planned.

        Bytes of other tokens are not touched. V, and K of chunks that did not move, are copied bit by bit.

        On a GPU the call enqueues and returns; calls from several threads and on several streams may overlap, as long
        as they write to different blocks or are ordered by the caller.

        Parameters
        ----------
        plan : SplicePlan
            From `plan` of this splicer. It may be run again.
        stream : optional
            CUDA stream of torch, CuPy, or a handle; the current one of the framework that the layouts' arrays belong to
            if left out.
        path : str
            ``auto``, or for chunks in pinned host memory ``staged`` or ``direct``.

        Raises
        ------
        ValueError, TypeError
            If the plan is another splicer's, or the stream or the path is wrong. Nothing was written then.
        """
        if plan.splicer is not self:
            raise ValueError("plan: it was made by another splicer")
        _check_path(path)
        tokens = plan.columns.tokens
        if self._cpu is not None:
            if stream is not None:
                raise ValueError("stream: the CPU backend has no streams")
            self._cpu.write(plan.columns)
            return SpliceResult(tokens, self._nbytes(tokens), "cpu" if tokens else "none")
        assert self._cuda is not None
        assert plan.prepared is not None
        where = streams.handle(stream, self._cuda.device.index, self._owners)
        if not tokens:
            return SpliceResult(0, 0, "none")
        taken, event = self._cuda.run(plan.prepared, path, where)
        return SpliceResult(tokens, self._nbytes(tokens), taken, event)

    def splice(
        self, chunks: Sequence[Chunk], block_tables: Any, *, stream: object = None, path: str = "auto"
    ) -> SpliceResult:
        """Plan and run in one call.

        See `plan` and `run`; all checks come first, and after an error nothing was written.
        """
        if self._cuda is None:
            return self.run(self.plan(chunks, block_tables), stream=stream, path=path)
        _check_path(path)
        reading = self._planner.read(chunks)
        where = streams.handle(stream, self._cuda.device.index, self._owners)
        tokens, taken, event = self._cuda.splice(reading, block_tables, path, where)
        return SpliceResult(tokens, self._nbytes(tokens), taken, event)

    def _nbytes(self, tokens: int) -> int:
        return sum(self._planner.nbytes) * tokens // self.chunk_tokens

    def close(self) -> None:
        """Free device memory; waits for copies in flight. Safe to call twice."""
        if self._cuda is not None:
            self._cuda.close()


def _check_path(path: str) -> None:
    if path not in PATHS:
        raise ValueError(f"path: {path!r} is none of {', '.join(PATHS)}")
