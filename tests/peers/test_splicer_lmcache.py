"""The splicer against LMCache's own operations on the CPU: where KV goes, how K turns, what the formats are called."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache.v1.platform.torch_ops.mp_mem_kernels import multi_layer_block_kv_transfer
from lmcache.v1.platform.torch_ops.pos_kernels import rotary_embedding_k_fused

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from kvsplice.splicer.formats import FORMATS
from splice_cases import map_nested
from splice_reference import LATENT, SPLIT, Geometry

CPU_FORMATS = sorted(set(FORMATS) - {14, 15})
"""What LMCache moves without an accelerator; 14 and 15 are only known to its GPU and RBLN code."""

BLOCKS, BLOCK_SIZE, TOKENS, SIZE = 16, 4, 8, 12


def test_the_formats_have_lmcaches_names_and_numbers():
    members = EngineKVFormat.__members__
    assert {int(member): name for name, member in members.items()} == FORMATS
    for member in members.values():
        with pytest.raises((TypeError, ValueError), match="caches"):
            PagedLayout.from_format(member, [])


def geometry_of(number: int) -> Geometry:
    planes = (16, 8) if number == 17 else ()
    heads = 1 if number in LATENT else 2
    return Geometry(number, "float32", 3, BLOCKS, BLOCK_SIZE, heads, SIZE, planes, (True, False, True) * (number == 18))


def shape_of(geometry: Geometry) -> PageBufferShapeDesc:
    shape = PageBufferShapeDesc()
    shape.nl, shape.nb, shape.bs = geometry.layers, geometry.blocks, geometry.block_size
    shape.nh, shape.hs = geometry.heads, geometry.hidden // geometry.heads
    shape.kv_size, shape.element_size = geometry.kv_size, 4
    shape.block_stride_elems = 0
    return shape


@pytest.mark.parametrize("number", CPU_FORMATS)
def test_every_element_goes_where_lmcache_puts_it(number):
    rng = np.random.default_rng(number)
    geometry = geometry_of(number)
    own = map_nested(lambda shape: torch.from_numpy(rng.normal(size=shape).astype(np.float32)), geometry.shapes())
    peers = map_nested(torch.clone, own)
    objects = [rng.normal(size=geometry.object_shape(TOKENS)).astype(np.float32) for _ in range(3)]
    table = [6, 2, 0, 5, 1, 3]

    layout = PagedLayout.from_format(number, own, block_size=BLOCK_SIZE if number in {4, 5} else None)
    chunks = [Chunk(torch.from_numpy(obj), None, TOKENS * index) for index, obj in enumerate(objects)]
    Splicer(layout, None, chunk_tokens=TOKENS).splice(chunks, [table])

    given_objects = [torch.from_numpy(obj if number in SPLIT else obj[0]) for obj in objects]
    arguments = (table, "cpu", TransferDirection.H2D, shape_of(geometry), TOKENS, EngineKVFormat(number), 0)
    multi_layer_block_kv_transfer(peers, given_objects, *arguments)

    for mine, other in zip(leaves(own), leaves(peers), strict=True):
        assert torch.equal(mine, other)


def leaves(nested):
    return [leaf for entry in nested for leaf in leaves(entry)] if isinstance(nested, list) else [nested]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("number", [1, 6, 10, 13])
@settings(deadline=None, max_examples=20)
@given(old=st.integers(0, 14), new=st.integers(0, 14), width=st.sampled_from([8, SIZE]))
def test_keys_turn_as_lmcache_turns_them(number, is_neox, old, new, width):
    """In float32, where both round alike to within their last digits. Positions are multiples of the block size."""
    old, new = old * BLOCK_SIZE, new * BLOCK_SIZE
    geometry = geometry_of(number)
    angles = torch.arange(64)[:, None] * 100.0 ** -(torch.arange(width // 2) / (width // 2))
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)
    stored = torch.randn(geometry.object_shape(TOKENS), generator=torch.Generator().manual_seed(old * 64 + new))
    caches = map_nested(torch.zeros, geometry.shapes())
    splicer = Splicer(PagedLayout.from_format(number, caches), RopeTables([rope], SIZE, is_neox), chunk_tokens=TOKENS)
    table = list(reversed(range(BLOCKS)))
    splicer.splice([Chunk(stored, old, new)], [table])

    expected = stored.clone()
    keys = expected.view(*expected.shape[:-1], geometry.heads, -1)[0]
    positions = torch.arange(TOKENS)
    for layer in keys:
        rotary_embedding_k_fused(old + positions, new + positions, layer[..., :SIZE], SIZE, rope, is_neox)
    read = torch.zeros_like(stored)
    blocks = table[new // BLOCK_SIZE :][: TOKENS // BLOCK_SIZE]
    objects = [read if number in SPLIT else read[0]]
    shape, kind = shape_of(geometry), EngineKVFormat(number)
    multi_layer_block_kv_transfer(caches, objects, blocks, "cpu", TransferDirection.D2H, shape, TOKENS, kind, 0)
    np.testing.assert_allclose(read.numpy(), expected.numpy(), rtol=1e-5, atol=2e-6)
