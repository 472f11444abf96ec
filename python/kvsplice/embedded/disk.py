"""Stored objects as safetensors files: written atomically, checked when read."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from kvsplice.dtypes import DTYPES, dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["DiskTier"]

logger = logging.getLogger(__name__)

_FORMAT = "kvsplice object 1"
_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")


class DiskTier:
    """Objects in a folder, up to a number of bytes; the one that went unused for longest goes first.

    A file is complete under its name or not there: it is written under another name, synced and renamed. What is torn
    or foreign nonetheless is a miss, and is set aside as ``*.bad``.

    Parameters
    ----------
    folder : path
        Made if it is not there; one process at a time.
    capacity : int
        Bytes.
    """

    def __init__(self, folder: str | Path, capacity: int) -> None:
        self.folder = Path(folder)
        self.capacity = capacity
        self.folder.mkdir(parents=True, exist_ok=True)
        self._mutex = threading.Lock()
        self._numbers = count()
        self.set_aside = 0
        self.failed_writes = 0
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        found = [(path.stat(), path.name) for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        found.sort(key=lambda entry: entry[0].st_mtime_ns)
        self._files: OrderedDict[str, int] = OrderedDict((name, stat.st_size) for stat, name in found)
        self._bytes = sum(self._files.values())
        self._make_room(0)

    @staticmethod
    def name(identity: bytes) -> str:
        """The file name of an object."""
        return f"{hashlib.sha256(identity).hexdigest()}.safetensors"

    def __contains__(self, identity: bytes) -> bool:
        with self._mutex:
            return self.name(identity) in self._files

    def __len__(self) -> int:
        with self._mutex:
            return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        with self._mutex:
            return self._bytes

    def write(self, identity: bytes, arrays: Sequence[NDArray[Any]]) -> bool:
        """Write an object; whether it is there now. A full disk is logged, and loses nothing else."""
        name = self.name(identity)
        if identity in self:
            return True
        content = _encode(identity, arrays)
        temporary = self.folder / f".{name}.{os.getpid()}.{next(self._numbers)}.tmp"
        try:
            with self._mutex:
                if not self._make_room(len(content)):
                    return False
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
            self._sync_folder()
        except OSError:
            self.failed_writes += 1
            logger.exception("an object of %d bytes was not written to %s", len(content), self.folder)
            temporary.unlink(missing_ok=True)
            return False
        with self._mutex:
            self._bytes += len(content) - self._files.get(name, 0)
            self._files[name] = len(content)
            # Others may have written meanwhile.
            self._make_room(0)
        return True

    def read(self, identity: bytes) -> tuple[NDArray[Any], ...] | None:
        """An object, or None if it is not there whole."""
        name = self.name(identity)
        with self._mutex:
            if name not in self._files:
                return None
            self._files.move_to_end(name)
        try:
            arrays = _decode(self.folder / name, identity)
            os.utime(self.folder / name)
        except FileNotFoundError:
            self._forget(name)
            return None
        except Exception as error:
            logger.warning("%s is not what was written, and is set aside: %s", name, error)
            self.set_aside += 1
            self._forget(name)
            (self.folder / name).replace((self.folder / name).with_suffix(".bad"))
            return None
        return arrays

    def remove(self, identity: bytes) -> None:
        """Delete an object, if it is there."""
        name = self.name(identity)
        self._forget(name)
        (self.folder / name).unlink(missing_ok=True)

    def _forget(self, name: str) -> None:
        with self._mutex:
            self._bytes -= self._files.pop(name, 0)

    def _make_room(self, wanted: int) -> bool:
        if wanted > self.capacity:
            return False
        while self._bytes + wanted > self.capacity:
            name, size = self._files.popitem(last=False)
            self._bytes -= size
            (self.folder / name).unlink(missing_ok=True)
        return True

    def _sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _encode(identity: bytes, arrays: Sequence[NDArray[Any]]) -> bytes:
    # Bytes with the types beside them: safetensors' own names do not cover all of them in numpy.
    flat = {str(index): _as_bytes(array) for index, array in enumerate(arrays)}
    shapes = [[dtype_name(array.dtype), list(array.shape)] for array in arrays]
    metadata = {
        "format": _FORMAT,
        "identity": identity.hex(),
        "arrays": json.dumps(shapes),
        "checksum": _checksum(list(flat.values())),
    }
    return save(flat, metadata)


def _decode(path: Path, identity: bytes) -> tuple[NDArray[Any], ...]:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}")
        if metadata["identity"] != identity.hex():
            raise ValueError("it is another object's")
        described = json.loads(metadata["arrays"])
        flat = [file.get_tensor(str(index)) for index in range(len(described))]
    if _checksum(flat) != metadata["checksum"]:
        raise ValueError("its checksum is wrong")
    return tuple(
        content.view(DTYPES[dtype]).reshape(shape) for content, (dtype, shape) in zip(flat, described, strict=True)
    )


def _as_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _checksum(flat: Sequence[NDArray[np.uint8]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for content in flat:
        digest.update(content.size.to_bytes(8, "little"))
        digest.update(content.data)
    return digest.hexdigest()
