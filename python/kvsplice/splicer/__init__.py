"""Splices stored KV into paged caches."""

from kvsplice.splicer.chunk import Chunk, StagedMemory
from kvsplice.splicer.cuda import CudaOptions
from kvsplice.splicer.layout import PagedLayout
from kvsplice.splicer.splicer import SplicePlan, Splicer, SpliceResult

__all__ = ["Chunk", "CudaOptions", "PagedLayout", "SplicePlan", "SpliceResult", "Splicer", "StagedMemory"]
