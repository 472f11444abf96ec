"""What is spliced: chunks of stored KV."""

from __future__ import annotations

from dataclasses import dataclass

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
        If the location is none of these.
    """

    pointer: int
    nbytes: int
    breaks: tuple[int, ...] = ()
    location: str | None = None

    def __post_init__(self) -> None:
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
