"""Arrays of numpy, torch and CuPy as a pointer, a shape and strides, without importing any of them but numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvsplice.dtypes import DTYPES, dtype_name

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Device:
    """Where memory lies: ``cpu``, or ``cuda`` and the device's number."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")


@dataclass(frozen=True)
class Buffer:
    """An array's memory.

    Attributes
    ----------
    pointer : int
        Address of the first element.
    shape : tuple of int
    strides : tuple of int
        In bytes.
    dtype : str
        A name of `kvsplice.dtypes.DTYPES`.
    device : Device
    owner : object
        Keeps the memory alive.
    """

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: Device
    owner: object

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        size = DTYPES[self.dtype].itemsize
        for extent in self.shape:
            size *= extent
        return size

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in C order."""
        return self.strides == contiguous_strides(self.shape, DTYPES[self.dtype].itemsize)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-ordered array."""
    strides = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def describe(array: object, argument: str, dtype: object = None, *, writable: bool = False) -> Buffer:
    """The memory of an array.

    Parameters
    ----------
    array : numpy.ndarray, torch.Tensor, cupy.ndarray or an object with ``__cuda_array_interface__``
    argument : str
        What to call it in an error.
    dtype : optional
        Element type, where the array's own cannot say it (bytes that hold fp8, or ``uint16`` that holds bfloat16).
        It must be as wide as the array's own.
    writable : bool
        Refuse arrays that cannot be written to.

    Raises
    ------
    TypeError
        If it is no such array.
    ValueError
        If its element type, its device or its strides are not supported.
    """
    if type(array).__module__.partition(".")[0] == "torch":
        memory = _from_torch(array, argument)
    elif hasattr(array, "__cuda_array_interface__"):
        memory = _from_cuda_interface(array, argument)
    elif isinstance(array, np.ndarray):
        if writable and not array.flags.writeable:
            raise ValueError(f"{argument}: the array is read-only")
        memory = _Memory(array.ctypes.data, array.shape, array.strides, CPU, array.dtype, array.itemsize)
    else:
        raise TypeError(f"{argument}: expected an array of numpy, torch or CuPy, not {type(array).__name__}")
    name = dtype_name(memory.dtype, argument) if dtype is None else dtype_name(dtype)
    if DTYPES[name].itemsize != memory.itemsize:
        raise ValueError(f"{argument}: elements of {memory.itemsize} bytes cannot be {name}")
    if any(stride < 0 for stride in memory.strides):
        raise ValueError(f"{argument}: negative strides")
    return Buffer(memory.pointer, memory.shape, memory.strides, name, memory.device, array)


class _Memory(NamedTuple):
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: Device
    dtype: object
    itemsize: int


def _from_torch(tensor: Any, argument: str) -> _Memory:
    itemsize = tensor.element_size()
    if tensor.device.type not in {"cpu", "cuda"}:
        raise ValueError(f"{argument}: device {tensor.device} is not supported; cpu or cuda")
    device = CPU if tensor.device.type == "cpu" else Device("cuda", tensor.device.index)
    strides = tuple(step * itemsize for step in tensor.stride())
    return _Memory(tensor.data_ptr(), tuple(tensor.shape), strides, device, tensor.dtype, itemsize)


def _from_cuda_interface(array: Any, argument: str) -> _Memory:
    # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    interface = array.__cuda_array_interface__
    shape = tuple(interface["shape"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides") or contiguous_strides(shape, itemsize)
    pointer = interface["data"][0]
    index = getattr(getattr(array, "device", None), "id", None)
    if index is None:
        from kvsplice.splicer.cuda import device_of_pointer

        index = device_of_pointer(pointer, argument)
    dtype = getattr(array, "dtype", interface["typestr"])
    return _Memory(pointer, shape, tuple(strides), Device("cuda", index), dtype, itemsize)


def view(pointer: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes at an address of this process.

    The caller vouches that they are there and stay; this is the only place that turns an address into memory.
    """
    memory = (ctypes.c_ubyte * nbytes).from_address(pointer)
    return np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)


def strided_view(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A numpy array over memory of this process, under the same condition as `view`."""
    extent = dtype.itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return np.ndarray(shape, dtype=dtype, buffer=view(pointer, extent).data, strides=strides)


def to_host(buffer: Buffer) -> NDArray[Any]:
    """A copy of an array in host memory, of the same shape, in C order."""
    owner: Any = buffer.owner
    host = owner.detach().cpu().contiguous() if hasattr(owner, "detach") else owner.get(order="C")
    return host_view(describe(host, "array", buffer.dtype)).copy()


def host_view(buffer: Buffer) -> NDArray[Any]:
    """A numpy array over an array in host memory."""
    return strided_view(buffer.pointer, buffer.shape, buffer.strides, DTYPES[buffer.dtype])
