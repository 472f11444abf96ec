"""What is spliced: chunks of stored KV."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvsplice.integers import as_integer

LOCATIONS = ("device", "pinned", "pageable")


@dataclass(frozen=True)
class StagedMemory:
    """A stored object by its address. The caller keeps it alive and vouches for its extent.

    Parameters
    ----------
    pointer : int
        Address; host memory, pinned or not, or memory of the layouts' GPU.
    nbytes : int
        Its size.
    breaks : tuple of int, optional
        Byte offsets in the object where one pinned registration ends and the next begins. CUDA copies no range that
        crosses one.
    location : str, optional
        ``device``, ``pinned`` or ``pageable``, where the caller knows it; the driver is asked otherwise.

    Raises
    ------
    ValueError
        If the address or the size is not positive, the breaks do not ascend inside the object, or the location is none
        of these.
    TypeError
        If one of the numbers is no integer.
    """

    pointer: int
    nbytes: int
    breaks: tuple[int, ...] = ()
    location: str | None = None

    def __post_init__(self) -> None:
        for name in ("pointer", "nbytes"):
            value = as_integer(getattr(self, name), name)
            if value < 1:
                raise ValueError(f"{name}: {value} is not positive")
            object.__setattr__(self, name, value)
        ends = (0, *(as_integer(end, "breaks") for end in self.breaks), self.nbytes)
        if any(end <= start for start, end in pairwise(ends)):
            raise ValueError(f"breaks: {list(self.breaks)} do not ascend inside an object of {self.nbytes} bytes")
        if self.location not in {None, *LOCATIONS}:
            raise ValueError(f"location: {self.location!r} is none of {', '.join(LOCATIONS)}")


@dataclass(frozen=True)
class Chunk:
    """Tokens whose KV was stored, and where they stand now.

    Parameters
    ----------
    source : array or StagedMemory, or a sequence of them
        The stored object of each group of layers, ``[kv_size, layers, tokens, hidden]`` in C order (LMCache's object
        layout); the sequence may be left out where there is one group.
    old_start : int or None
        Position of the object's token ``offset`` when it was stored; None if K was stored before the rotation.
    cur_start : int
        Position of that token in the request.
    offset : int
        First token of the object to take.
    count : int, optional
        How many to take; up to the object's end if left out.
    """

    source: object
    old_start: int | None
    cur_start: int
    offset: int = 0
    count: int | None = None
