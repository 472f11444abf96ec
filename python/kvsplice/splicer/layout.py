"""A paged KV cache as planes of strided cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsplice.arrays import CPU, Buffer, Device, contiguous_strides, describe
from kvsplice.dtypes import DTYPES, dtype_name
from kvsplice.integers import as_integer
from kvsplice.splicer import formats
from kvsplice.splicer.formats import COMPONENTS, INDEXER, INDEXER_SCALES, INDEXER_VALUES, Format

Nested = Any
"""Arrays or addresses, nested in lists as the format's name says."""

Leaf = tuple[int, int, Buffer]
"""Layer, K/V or plane, memory."""

Axes = dict[str, tuple[int, int]]
"""Axis -> length, byte stride."""


@dataclass(frozen=True)
class Plane:
    """The cells of one kind (K, V, a latent's slice) in all layers that have them.

    The element ``e`` of head ``h`` of the token at ``offset`` in ``block`` of layer ``layers[i]`` lies at
    ``pointers[i] + block * block_stride + offset * token_stride + h * head_stride + e * element_stride``,
    and in the staged object in plane ``source_plane`` of that layer, column ``source_column + h * source_head_stride +
    e``.

    Attributes
    ----------
    keys : bool
        Whether these are K, and so carry rope.
    pointers, layers : tuple of int
        Addresses, and which staged layer each belongs to.
    block_stride, token_stride, head_stride, element_stride : int
        In bytes.
    heads, width : int
        Heads, and elements of each.
    source_plane, source_column, source_head_stride : int
        In the staged object, in elements.
    """

    keys: bool
    pointers: tuple[int, ...]
    layers: tuple[int, ...]
    block_stride: int
    token_stride: int
    head_stride: int
    element_stride: int
    heads: int
    width: int
    source_plane: int
    source_column: int
    source_head_stride: int


@dataclass(frozen=True)
class PagedLayout:
    """One group of layers of a paged KV cache that shares a block table, an element type and a shape.

    Make one with `from_format`, `from_pointers` or `vllm`.

    Attributes
    ----------
    format : str
        The name, see `kvsplice.splicer.formats`.
    planes : tuple of Plane
    num_layers, num_blocks, block_size : int
        ``block_size`` is tokens per block.
    kv_size, hidden : int
        Planes and row width of a staged object, which is ``[kv_size, num_layers, tokens, hidden]``.
    dtype : str
        See `kvsplice.dtypes.DTYPES`.
    device : Device
    latent : bool
        Whether a token has one row for all heads (MLA).
    unrotatable : str or None
        Why K of this layout cannot be rotated, if it cannot.
    owners : tuple
        The arrays that were given; they are kept alive.
    """

    format: str
    planes: tuple[Plane, ...]
    num_layers: int
    num_blocks: int
    block_size: int
    kv_size: int
    hidden: int
    dtype: str
    device: Device
    latent: bool
    unrotatable: str | None
    owners: tuple[object, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def object_shape(self, tokens: int) -> tuple[int, int, int, int]:
        """The shape of a staged object of so many tokens: ``[kv_size, num_layers, tokens, hidden]``."""
        return (self.kv_size, self.num_layers, tokens, self.hidden)

    def object_bytes(self, tokens: int) -> int:
        """The size of such an object."""
        return self.kv_size * self.num_layers * tokens * self.hidden * self.itemsize

    @classmethod
    def from_format(
        cls,
        format: object,
        caches: Nested,
        *,
        dtype: object = None,
        block_size: int | None = None,
        key_layers: Sequence[bool] | None = None,
        slots_per_block: int | None = None,
    ) -> PagedLayout:
        """Describe arrays that lie in a known format.

        Parameters
        ----------
        format : str or int
            A name or number of `kvsplice.splicer.formats.FORMATS`, or LMCache's ``EngineKVFormat`` member.
        caches : array or nested sequences of arrays
            As the format says. Numpy, torch (CPU or CUDA) and CuPy; strides are read off the arrays, so permuted views
            and padded blocks are fine.
        dtype : optional
            Element type where the arrays cannot say it: fp8 in ``uint8``, bfloat16 in ``uint16``.
        block_size : int, optional
            Tokens per block; needed, and only accepted, for formats with blocks and tokens in one axis (``NBBS``).
        key_layers : sequence of bool, optional
            For ``NL_X_NB_BS_NH_HS``, where each entry is a K or a V: which are K.
        slots_per_block : int, optional
            Slots that the engine keeps per block. Compressed caches, where it is not the tokens per block, are refused.

        Raises
        ------
        ValueError
            If the format is unknown, or the arrays do not have its shape, differ in shape, element type or device, or
            overlap.
        TypeError
            If something is no array.
        """
        parsed = formats.parse(format)
        leaves = [
            (layer, part, describe(array, label, dtype, writable=True))
            for layer, part, array, label in _leaves(caches, parsed.lists, "caches")
        ]
        return _build(parsed, leaves, block_size, key_layers, slots_per_block)

    @classmethod
    def from_pointers(
        cls,
        format: object,
        pointers: Nested,
        shape: Sequence[int],
        *,
        dtype: object,
        device: str | Device = CPU,
        strides: Sequence[int] | None = None,
        block_size: int | None = None,
        key_layers: Sequence[bool] | None = None,
        slots_per_block: int | None = None,
    ) -> PagedLayout:
        """Describe memory by addresses. The caller keeps it alive and vouches for its extent.

        Parameters
        ----------
        format, block_size, key_layers, slots_per_block
            As in `from_format`.
        pointers : int or nested sequences of int
            Address of each tensor, nested as the format says.
        shape : sequence of int
            Shape of each tensor.
        dtype
            Element type.
        device : str
            ``cpu``, or ``cuda:N``.
        strides : sequence of int, optional
            In bytes; C order if left out. Blocks that are padded show in the block axis.

        Raises
        ------
        ValueError, TypeError
            As in `from_format`.
        """
        parsed = formats.parse(format)
        name = dtype_name(dtype)
        shape = tuple(as_integer(extent, "shape") for extent in shape)
        steps = (
            contiguous_strides(shape, DTYPES[name].itemsize)
            if strides is None
            else tuple(as_integer(step, "strides") for step in strides)
        )
        if len(steps) != len(shape):
            raise ValueError(f"strides: {len(steps)} for {len(shape)} axes")
        if any(step < 0 for step in steps):
            raise ValueError("strides: negative strides")
        where = parse_device(device)
        leaves = []
        for layer, part, pointer, label in _leaves(pointers, parsed.lists, "pointers"):
            address = as_integer(pointer, label)
            if address <= 0:
                raise ValueError(f"{label}: {address} is no address")
            leaves.append((layer, part, Buffer(address, shape, steps, name, where, None)))
        return _build(parsed, leaves, block_size, key_layers, slots_per_block)

    @classmethod
    def vllm(cls, kv_caches: Mapping[str, Any] | Sequence[Any], *, dtype: object = None) -> PagedLayout:
        """Describe vLLM's ``kv_caches``: a dict or list of one tensor per layer.

        Three axes are MLA, five with the 2 in front FlashAttention's, five with the 2 behind FlashInfer's; four are
        fused K and V, which is NHD or HND and cannot be told from the shape: use `from_format` for those.

        Raises
        ------
        ValueError
            If the shape says nothing, or two things.
        """
        tensors = list(kv_caches.values()) if isinstance(kv_caches, Mapping) else list(kv_caches)
        if not tensors:
            raise ValueError("kv_caches: no layer is given")
        shape = describe(tensors[0], "kv_caches[0]", dtype).shape
        if len(shape) == 3:
            return cls.from_format("NL_X_NB_BS_HS", tensors, dtype=dtype)
        if len(shape) == 5 and (shape[0] == 2) != (shape[1] == 2):
            return cls.from_format(
                "NL_X_TWO_NB_BS_NH_HS" if shape[0] == 2 else "NL_X_NB_TWO_BS_NH_HS", tensors, dtype=dtype
            )
        raise ValueError(f"kv_caches: the format cannot be told from the shape {list(shape)}; use from_format")


def parse_device(device: str | Device) -> Device:
    """``cpu``, ``cuda`` (device 0) or ``cuda:N``."""
    if isinstance(device, Device):
        return device
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        return CPU
    if kind == "cuda" and (not index or index.isdecimal()):
        return Device("cuda", int(index or 0))
    raise ValueError(f"device: {device!r} is neither 'cpu' nor 'cuda:N'")


def _leaves(
    nested: Nested, lists: Sequence[str], label: str, layer: int = 0, part: int = 0
) -> Iterator[tuple[int, int, Any, str]]:
    """Yield (layer, K/V or plane, leaf, what to call it)."""
    if not lists:
        yield layer, part, nested, label
        return
    if isinstance(nested, (str, bytes, Mapping)) or not isinstance(nested, Iterable):
        raise TypeError(f"{label}: expected a list, not {type(nested).__name__}")
    level, *rest = lists
    entries = list(nested)
    if not entries:
        raise ValueError(f"{label}: the list is empty")
    if level == "TWO" and len(entries) != 2:
        raise ValueError(f"{label}: expected K and V, got {len(entries)} entries")
    for i, entry in enumerate(entries):
        position = (i, part) if level == "NL" else (layer, i)
        yield from _leaves(entry, rest, f"{label}[{i}]", *position)


def _build(
    parsed: Format,
    leaves: Sequence[Leaf],
    block_size: int | None,
    key_layers: Sequence[bool] | None,
    slots_per_block: int | None,
) -> PagedLayout:
    first = leaves[0][2]
    axes = _axes(parsed, leaves)
    cells = _cells(parsed, axes, leaves, block_size)
    if slots_per_block is not None and slots_per_block != cells.block_size:
        raise ValueError(
            f"slots_per_block: {slots_per_block} slots for {cells.block_size} tokens; compressed caches cannot be "
            "spliced, since their slots are not the KV of single tokens"
        )
    if key_layers is not None and parsed.name != COMPONENTS:
        raise ValueError(f"key_layers: {parsed.name} says it itself")
    unrotatable = None
    kv_size = 2 if parsed.split else 1
    if parsed.name == INDEXER:
        planes, hidden = _indexer_planes(cells, axes, first)
        unrotatable = "its keys are quantized with a scale per token, which a rotation would change"
    elif "NP" in parsed.lists:
        planes, hidden = _tuple_planes(cells, parsed, leaves)
        if len(planes) > 2:
            unrotatable = "its third plane holds an indexer's keys, which carry a rope of their own"
    elif parsed.fused:
        planes, hidden = _fused_planes(cells, axes)
    elif parsed.split:
        planes, hidden = _split_planes(cells, axes)
    else:
        planes, hidden = _single_planes(cells, axes, parsed, key_layers)
        if parsed.name == COMPONENTS and key_layers is None:
            unrotatable = "key_layers does not say which entries are K"
    if first.dtype == "uint8" and unrotatable is None:
        unrotatable = "uint8 does not say what its bits mean; give dtype"
    _check_pointers(planes, DTYPES[first.dtype].itemsize)
    return PagedLayout(
        format=parsed.name,
        planes=tuple(planes),
        num_layers=cells.num_layers,
        num_blocks=cells.num_blocks,
        block_size=cells.block_size,
        kv_size=kv_size,
        hidden=hidden,
        dtype=first.dtype,
        device=first.device,
        latent=parsed.latent,
        unrotatable=unrotatable,
        owners=tuple(buffer.owner for _, _, buffer in leaves if buffer.owner is not None),
    )


@dataclass(frozen=True)
class _Cells:
    """What all planes of a layout share.

    ``starts`` maps (layer, K/V or plane) to the address of its tensor's first element.
    """

    num_blocks: int
    block_size: int
    num_layers: int
    heads: int
    block_stride: int
    token_stride: int
    head_stride: int
    starts: dict[tuple[int, int], int]

    def pointers(self, part: int = 0) -> tuple[int, ...]:
        """The addresses of one part in all layers."""
        return tuple(self.starts[layer, part] for layer in range(self.num_layers))

    def plane(
        self,
        keys: bool,
        pointers: Sequence[int],
        width: int,
        element_stride: int,
        source: tuple[int, int, int],
        layers: Sequence[int] | None = None,
        strides: tuple[int, int] | None = None,
    ) -> Plane:
        """A plane.

        ``source`` is its plane, column and head stride in a staged object; ``strides`` those of blocks and tokens.
        """
        block_stride, token_stride = strides or (self.block_stride, self.token_stride)
        return Plane(
            keys=keys,
            pointers=tuple(pointers),
            layers=tuple(range(self.num_layers) if layers is None else layers),
            block_stride=block_stride,
            token_stride=token_stride,
            head_stride=self.head_stride,
            element_stride=element_stride,
            heads=self.heads,
            width=width,
            source_plane=source[0],
            source_column=source[1],
            source_head_stride=source[2],
        )


def _cells(parsed: Format, axes: Axes, leaves: Sequence[Leaf], block_size: int | None) -> _Cells:
    if "NBBS" in axes:
        slots, token_stride = axes["NBBS"]
        if block_size is None:
            raise ValueError(f"block_size: {parsed.name} does not say how many tokens a block has")
        if block_size < 1 or slots % block_size:
            raise ValueError(f"block_size: {slots} slots are not a multiple of {block_size}")
        num_blocks, block_stride = slots // block_size, token_stride * block_size
    elif block_size is not None:
        raise ValueError(f"block_size: {parsed.name} says it itself")
    else:
        num_blocks, block_stride = axes["NB"]
        block_size, token_stride = axes["BSV" if "BSV" in axes else "BS"]
    heads, head_stride = axes.get("NH", (1, 0))
    inner_layers, layer_stride = axes.get("NL", (1, 0))
    starts = {
        (layer + inner, part): buffer.pointer + inner * layer_stride
        for layer, part, buffer in leaves
        for inner in range(inner_layers)
    }
    num_layers = 1 + max(layer for layer, _ in starts)
    return _Cells(num_blocks, block_size, num_layers, heads, block_stride, token_stride, head_stride, starts)


def _split_planes(cells: _Cells, axes: Axes) -> tuple[list[Plane], int]:
    """K and V by themselves, in an axis or in a level of lists."""
    width, element = axes["HS"]
    keys = cells.pointers()
    values = tuple(pointer + axes["TWO"][1] for pointer in keys) if "TWO" in axes else cells.pointers(1)
    planes = [
        cells.plane(True, keys, width, element, (0, 0, width)),
        cells.plane(False, values, width, element, (1, 0, width)),
    ]
    return planes, cells.heads * width


def _fused_planes(cells: _Cells, axes: Axes) -> tuple[list[Plane], int]:
    """A head's K, then its V."""
    width, element = axes["CS"] if "CS" in axes else axes["HS"]
    if "CS" in axes:
        if width % 2:
            raise ValueError(f"caches: {width} elements per head are not a K and a V of equal size")
        width //= 2
    value_step = width * element if "CS" in axes else axes["TWO"][1]
    keys = cells.pointers()
    values = [pointer + value_step for pointer in keys]
    planes = [
        cells.plane(True, keys, width, element, (0, 0, 2 * width)),
        cells.plane(False, values, width, element, (0, width, 2 * width)),
    ]
    return planes, cells.heads * 2 * width


def _tuple_planes(cells: _Cells, parsed: Format, leaves: Sequence[Leaf]) -> tuple[list[Plane], int]:
    """Planes of one token that follow each other in the staged row."""
    planes: list[Plane] = []
    column = 0
    for _, part, buffer in (leaf for leaf in leaves if leaf[0] == 0):
        axes = dict(zip(parsed.axes, zip(buffer.shape, buffer.strides, strict=True), strict=True))
        width, element = axes["HS"]
        strides = axes["NB"][1], axes["BS"][1]
        planes.append(cells.plane(True, cells.pointers(part), width, element, (0, column, 0), strides=strides))
        column += width
    return planes, column


def _single_planes(
    cells: _Cells, axes: Axes, parsed: Format, key_layers: Sequence[bool] | None
) -> tuple[list[Plane], int]:
    """One row per token and layer: a latent, or a K or a V."""
    width, element = axes["HS"]
    source, hidden, pointers = (0, 0, width), cells.heads * width, cells.pointers()
    if parsed.latent or key_layers is None:
        return [cells.plane(True, pointers, width, element, source)], hidden
    if len(key_layers) != cells.num_layers:
        raise ValueError(f"key_layers: {len(key_layers)} entries for {cells.num_layers} arrays")
    planes = []
    for keys in (True, False):
        layers = [layer for layer in range(cells.num_layers) if bool(key_layers[layer]) == keys]
        if layers:
            planes.append(cells.plane(keys, [pointers[layer] for layer in layers], width, element, source, layers))
    return planes, hidden


def _indexer_planes(cells: _Cells, axes: Axes, first: Buffer) -> tuple[list[Plane], int]:
    """The values of all tokens of a block, then their scales."""
    width, element = axes["BSS"]
    if (first.dtype, width, element) != ("uint8", INDEXER_VALUES + INDEXER_SCALES, 1) or cells.token_stride != width:
        raise ValueError(
            f"caches: {INDEXER} is uint8 with {INDEXER_VALUES + INDEXER_SCALES} bytes for each token of a block"
        )
    values = cells.pointers()
    scales = [pointer + cells.block_size * INDEXER_VALUES for pointer in values]
    strides = cells.block_stride, INDEXER_VALUES
    planes = [
        cells.plane(True, values, INDEXER_VALUES, 1, (0, 0, 0), strides=strides),
        cells.plane(
            True, scales, INDEXER_SCALES, 1, (0, INDEXER_VALUES, 0), strides=(cells.block_stride, INDEXER_SCALES)
        ),
    ]
    return planes, width


def _axes(parsed: Format, leaves: Sequence[Leaf]) -> Axes:
    """Check every leaf against the format and against the first, whose axes these are."""
    first = leaves[0][2]
    for layer, part, buffer in leaves:
        where = f"caches: layer {layer}" + (f", part {part}" if part else "")
        _check_shape(parsed, buffer, where)
        if buffer.dtype != first.dtype:
            raise ValueError(f"{where} is {buffer.dtype}, the first is {first.dtype}")
        if buffer.device != first.device:
            raise ValueError(f"{where} is on {buffer.device}, the first is on {first.device}")
        # Planes of one token may differ in width, and so in strides, but not from layer to layer.
        free = "NP" in parsed.lists
        peer = next(other for _, other_part, other in leaves if other_part == part) if free else first
        if (buffer.shape, buffer.strides) != (peer.shape, peer.strides) or (
            free and buffer.shape[:-1] != first.shape[:-1]
        ):
            raise ValueError(f"{where} has another shape or other strides than the first")
        _check_overlap(buffer, where)
    return dict(zip(parsed.axes, zip(first.shape, first.strides, strict=True), strict=True))


def _check_shape(parsed: Format, buffer: Buffer, where: str) -> None:
    if len(buffer.shape) != len(parsed.axes):
        raise ValueError(f"{where} has {len(buffer.shape)} axes, {parsed.name} has {len(parsed.axes)}")
    for name, extent in zip(parsed.axes, buffer.shape, strict=True):
        if extent != {"TWO": 2, "ONE": 1}.get(name, extent):
            raise ValueError(f"{where}: the axis {name} of {parsed.name} has length {extent}")
        if extent < 1:
            raise ValueError(f"{where}: the axis {name} is empty")


def _check_overlap(buffer: Buffer, where: str) -> None:
    reach = DTYPES[buffer.dtype].itemsize
    for extent, step in sorted(zip(buffer.shape, buffer.strides, strict=True), key=lambda axis: axis[1]):
        if extent > 1:
            if step < reach:
                raise ValueError(
                    f"{where}: its elements overlap (shape {list(buffer.shape)}, strides {list(buffer.strides)})"
                )
            reach += step * (extent - 1)


def _check_pointers(planes: Sequence[Plane], itemsize: int) -> None:
    seen: set[int] = set()
    for plane in planes:
        for pointer in plane.pointers:
            if pointer % itemsize:
                raise ValueError(f"caches: address {pointer:#x} is not a multiple of the element size, {itemsize}")
            if pointer in seen:
                raise ValueError("caches: the same memory is given twice")
            seen.add(pointer)
        steps = (plane.block_stride, plane.token_stride, plane.head_stride, plane.element_stride)
        if any(step % itemsize for step in steps):
            raise ValueError(f"caches: strides {list(steps)} are not multiples of the element size, {itemsize}")
