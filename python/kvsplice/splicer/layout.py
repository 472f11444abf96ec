"""A paged KV cache as planes of strided cells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsplice.arrays import CPU, Buffer, Device, contiguous_strides, describe
from kvsplice.dtypes import DTYPES, dtype_name
from kvsplice.splicer import formats
from kvsplice.splicer.formats import INDEXER_SCALES, INDEXER_VALUES, Format

Nested = Any
"""Arrays or addresses, nested in lists as the format's name says."""


@dataclass(frozen=True)
class Plane:
    """The cells of one kind (K, V, a latent's slice) in all layers that have them.

    The element ``e`` of head ``h`` of the token at ``offset`` in ``block`` of layer ``layers[i]`` lies at
    ``pointers[i] + block * block_stride + offset * token_stride + h * head_stride + e * element_stride``,
    and in the staged object in plane ``source_plane`` of that layer, column ``source_column + h * source_head_stride + e``.

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
        shape = tuple(int(extent) for extent in shape)
        steps = (
            contiguous_strides(shape, DTYPES[name].itemsize)
            if strides is None
            else tuple(int(step) for step in strides)
        )
        if len(steps) != len(shape):
            raise ValueError(f"strides: {len(steps)} for {len(shape)} axes")
        if any(step < 0 for step in steps):
            raise ValueError("strides: negative strides")
        where = parse_device(device)
        leaves = []
        for layer, part, pointer, label in _leaves(pointers, parsed.lists, "pointers"):
            if not isinstance(pointer, int) or isinstance(pointer, bool):
                raise TypeError(f"{label}: expected an address, not {type(pointer).__name__}")
            if pointer <= 0:
                raise ValueError(f"{label}: {pointer} is no address")
            leaves.append((layer, part, Buffer(pointer, shape, steps, name, where, None)))
        return _build(parsed, leaves, block_size, key_layers, slots_per_block)

    @classmethod
    def vllm(cls, kv_caches: Mapping[str, Any] | Sequence[Any], *, dtype: object = None) -> PagedLayout:
        """Describe vLLM's ``kv_caches``: a dict or list of one tensor per layer.

        Three axes are MLA, five with the 2 in front FlashAttention's, five with the 2 behind FlashInfer's; four are fused
        K and V, which is NHD or HND and cannot be told from the shape: use `from_format` for those.

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
    leaves: Sequence[tuple[int, int, Buffer]],
    block_size: int | None,
    key_layers: Sequence[bool] | None,
    slots_per_block: int | None,
) -> PagedLayout:
    first = leaves[0][2]
    axes = _axes(parsed, first, leaves)
    planes_in_lists = "NP" in parsed.lists
    itemsize = DTYPES[first.dtype].itemsize

    if "NBBS" in axes:
        slots, step = axes["NBBS"]
        if block_size is None:
            raise ValueError(f"block_size: {parsed.name} does not say how many tokens a block has")
        if block_size < 1 or slots % block_size:
            raise ValueError(f"block_size: {slots} slots are not a multiple of {block_size}")
        blocks, block_stride, token_stride = slots // block_size, step * block_size, step
    elif block_size is not None:
        raise ValueError(f"block_size: {parsed.name} says it itself")
    else:
        blocks, block_stride = axes["NB"]
        block_size, token_stride = axes["BSV" if "BSV" in axes else "BS"]
    if slots_per_block is not None and slots_per_block != block_size:
        raise ValueError(
            f"slots_per_block: {slots_per_block} slots for {block_size} tokens; compressed caches cannot be spliced, since their slots are "
            "not the KV of single tokens"
        )
    heads, head_stride = axes.get("NH", (1, 0))
    strides = (block_stride, token_stride, head_stride)

    # Which leaf, and which byte of it, begins each layer's part.
    starts: dict[tuple[int, int], int] = {}
    for layer, part, buffer in leaves:
        for inner_layer in range(axes["NL"][0] if "NL" in axes else 1):
            start = buffer.pointer + (inner_layer * axes["NL"][1] if "NL" in axes else 0)
            starts[layer + inner_layer, part] = start
    num_layers = 1 + max(layer for layer, _ in starts)
    layers = tuple(range(num_layers))

    def plane(
        keys: bool, pointers: Sequence[int], width: int, element: int, source: tuple[int, int, int], **changes: Any
    ) -> Plane:
        fields: dict[str, Any] = {
            "keys": keys,
            "pointers": tuple(pointers),
            "layers": layers,
            "block_stride": strides[0],
            "token_stride": strides[1],
            "head_stride": strides[2],
            "element_stride": element,
            "heads": heads,
            "width": width,
            "source_plane": source[0],
            "source_column": source[1],
            "source_head_stride": source[2],
        }
        return Plane(**(fields | changes))

    unrotatable = None
    kv_size, hidden = 1, 0
    if parsed.name == "NL_X_NB_BSV_BSS":
        width, element = axes["BSS"]
        if (first.dtype, width, element) != ("uint8", INDEXER_VALUES + INDEXER_SCALES, 1) or token_stride != width:
            raise ValueError(
                f"caches: {parsed.name} is uint8 with {INDEXER_VALUES + INDEXER_SCALES} bytes for each token of a block"
            )
        unrotatable = "its keys are quantized with a scale per token, which a rotation would change"
        values = [starts[layer, 0] for layer in layers]
        scales = [pointer + block_size * INDEXER_VALUES for pointer in values]
        hidden = width
        planes = [
            plane(True, values, INDEXER_VALUES, 1, (0, 0, 0), token_stride=INDEXER_VALUES),
            plane(True, scales, INDEXER_SCALES, 1, (0, INDEXER_VALUES, 0), token_stride=INDEXER_SCALES),
        ]
    elif planes_in_lists:
        planes = []
        for part in range(1 + max(part for _, part in starts)):
            own = next(buffer for layer, own_part, buffer in leaves if (layer, own_part) == (0, part))
            own_axes = dict(zip(parsed.axes, zip(own.shape, own.strides, strict=True), strict=True))
            width, element = own_axes["HS"]
            steps = {"block_stride": own_axes["NB"][1], "token_stride": own_axes["BS"][1]}
            planes.append(
                plane(True, [starts[layer, part] for layer in layers], width, element, (0, hidden, 0), **steps)
            )
            hidden += width
    elif parsed.fused:
        width, element = axes["CS"] if "CS" in axes else axes["HS"]
        if "CS" in axes:
            if width % 2:
                raise ValueError(f"caches: {width} elements per head are not a K and a V of equal size")
            width, value_step = width // 2, element * (width // 2)
        else:
            value_step = axes["TWO"][1]
        hidden = heads * 2 * width
        pointers = [starts[layer, 0] for layer in layers]
        planes = [
            plane(True, pointers, width, element, (0, 0, 2 * width)),
            plane(False, [pointer + value_step for pointer in pointers], width, element, (0, width, 2 * width)),
        ]
    elif parsed.split:
        width, element = axes["HS"]
        kv_size, hidden = 2, heads * width
        if "TWO" in axes:
            keys = [starts[layer, 0] for layer in layers]
            values = [pointer + axes["TWO"][1] for pointer in keys]
        else:
            keys, values = ([starts[layer, part] for layer in layers] for part in (0, 1))
        planes = [plane(True, keys, width, element, (0, 0, width)), plane(False, values, width, element, (1, 0, width))]
    else:
        width, element = axes["HS"]
        hidden = heads * width
        pointers = [starts[layer, 0] for layer in layers]
        if parsed.latent or key_layers is None:
            planes = [plane(True, pointers, width, element, (0, 0, width))]
            if not parsed.latent:
                unrotatable = "key_layers does not say which entries are K"
        else:
            if len(key_layers) != num_layers:
                raise ValueError(f"key_layers: {len(key_layers)} entries for {num_layers} arrays")
            planes = []
            for keys_wanted in (True, False):
                chosen = tuple(layer for layer in layers if bool(key_layers[layer]) == keys_wanted)
                if chosen:
                    own_pointers = [pointers[layer] for layer in chosen]
                    planes.append(plane(keys_wanted, own_pointers, width, element, (0, 0, width), layers=chosen))
    if key_layers is not None and parsed.name != "NL_X_NB_BS_NH_HS":
        raise ValueError(f"key_layers: {parsed.name} says it itself")
    if first.dtype == "uint8" and unrotatable is None:
        unrotatable = "uint8 does not say what its bits mean; give dtype"

    _check_pointers(planes, itemsize)
    return PagedLayout(
        format=parsed.name,
        planes=tuple(planes),
        num_layers=num_layers,
        num_blocks=blocks,
        block_size=block_size,
        kv_size=kv_size,
        hidden=hidden,
        dtype=first.dtype,
        device=first.device,
        latent=parsed.latent,
        unrotatable=unrotatable,
        owners=tuple(buffer.owner for _, _, buffer in leaves if buffer.owner is not None),
    )


def _axes(parsed: Format, first: Buffer, leaves: Sequence[tuple[int, int, Buffer]]) -> dict[str, tuple[int, int]]:
    """Axis -> (length, byte stride), after checking every leaf against the format and against the first."""
    names = tuple(name for name in parsed.axes if name not in {"BSV", "BSS"}) + (
        ("BSV", "BSS") if "BSV" in parsed.axes else ()
    )
    free = "NP" in parsed.lists
    for layer, part, buffer in leaves:
        where = f"caches: layer {layer}" + (f", part {part}" if part else "")
        if len(buffer.shape) != len(names):
            raise ValueError(f"{where} has {len(buffer.shape)} axes, {parsed.name} has {len(names)}")
        for name, extent in zip(names, buffer.shape, strict=True):
            expected = {"TWO": 2, "ONE": 1}.get(name)
            if expected is not None and extent != expected:
                raise ValueError(f"{where}: the axis {name} of {parsed.name} has length {extent}")
            if extent < 1:
                raise ValueError(f"{where}: the axis {name} is empty")
        if buffer.dtype != first.dtype:
            raise ValueError(f"{where} is {buffer.dtype}, the first is {first.dtype}")
        if buffer.device != first.device:
            raise ValueError(f"{where} is on {buffer.device}, the first is on {first.device}")
        # Planes of one token may differ in width, and so in strides, but not from layer to layer.
        peer = next(other for _, other_part, other in leaves if other_part == part) if free else first
        if (
            buffer.shape != peer.shape
            or buffer.strides != peer.strides
            or (free and buffer.shape[:-1] != first.shape[:-1])
        ):
            raise ValueError(f"{where} has another shape or other strides than the first")
        reach = DTYPES[buffer.dtype].itemsize
        for extent, step in sorted(zip(buffer.shape, buffer.strides, strict=True), key=lambda axis: axis[1]):
            if extent > 1 and step < reach:
                raise ValueError(
                    f"{where}: its elements overlap (shape {list(buffer.shape)}, strides {list(buffer.strides)})"
                )
            if extent > 1:
                reach = step * (extent - 1) + reach
    return dict(zip(names, zip(first.shape, first.strides, strict=True), strict=True))


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
