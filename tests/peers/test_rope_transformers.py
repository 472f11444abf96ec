"""Rope tables from configurations, and keys moved with them, against transformers' own models."""

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from kvsplice import Chunk, PagedLayout, RopeTables, Splicer
from kvsplice.rope_scaling import cos_sin_cache

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}

MODELS = {
    "llama 2": (LlamaRotaryEmbedding, LlamaConfig(**SMALL)),
    "llama 3.1": (LlamaRotaryEmbedding, LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "linear": (
        LlamaRotaryEmbedding,
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    ),
    "qwen 3": (Qwen3RotaryEmbedding, Qwen3Config(**SMALL, head_dim=128, rope_parameters=YARN)),
    "yarn, not truncated": (LlamaRotaryEmbedding, LlamaConfig(**SMALL, rope_parameters=YARN | {"truncate": False})),
    "yarn, other ramps": (
        LlamaRotaryEmbedding,
        LlamaConfig(**SMALL, rope_parameters=YARN | {"beta_fast": 16, "beta_slow": 2}),
    ),
    "yarn, magnitude given": (
        LlamaRotaryEmbedding,
        LlamaConfig(**SMALL, rope_parameters=YARN | {"attention_factor": 0.7}),
    ),
    "deepseek v3": (
        DeepseekV3RotaryEmbedding,
        DeepseekV3Config(
            max_position_embeddings=163840,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        ),
    ),
    "gpt-neox, partial": (
        GPTNeoXRotaryEmbedding,
        GPTNeoXConfig(
            hidden_size=256,
            num_attention_heads=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
    ),
}


def as_table(embedding, positions, **options):
    """A model's cosines and sines as rows of a table."""
    cos, sin = embedding(torch.zeros(1), torch.arange(positions)[None], **options)
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=1).numpy()


def check(mine, theirs):
    assert mine.shape == theirs.shape
    # A frequency may differ by a unit in the last place (2^-23), and each product with the position is rounded (2^-24).
    allowed = 2.0**-22 * np.arange(len(mine))[:, None] + 1e-6
    assert (np.abs(mine - theirs) <= allowed).all()


@pytest.mark.parametrize("model", MODELS)
def test_a_table_is_the_models(model):
    embedding, config = MODELS[model]
    check(cos_sin_cache(config, 4096), as_table(embedding(config), 4096))


@pytest.mark.parametrize("model", MODELS)
def test_a_configuration_may_be_a_mapping(model):
    _, config = MODELS[model]
    np.testing.assert_array_equal(cos_sin_cache(config.to_dict(), 16), cos_sin_cache(config, 16))


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_a_table_per_type_of_layer(layer_type):
    config = Gemma3TextConfig()
    theirs = as_table(Gemma3RotaryEmbedding(config), 4096, layer_type=layer_type)
    check(cos_sin_cache(config, 4096, layer_type=layer_type), theirs)


def test_a_head_that_turns_in_part():
    config = Gemma4TextConfig()
    theirs = as_table(Gemma4TextRotaryEmbedding(config), 4096, layer_type="full_attention")
    values = config.to_dict() | {"head_dim": config.per_layer_config["full_attention"].head_dim}
    check(cos_sin_cache(values, 4096, layer_type="full_attention"), theirs)


def test_what_transformers_switches_is_refused():
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    config = Phi3Config(**SMALL, rope_parameters=rope)
    short, long = (as_table(Phi3RotaryEmbedding(config), positions)[:100] for positions in (4000, 5000))
    assert not np.allclose(short, long)
    with pytest.raises(ValueError, match="'longrope' cannot be spliced"):
        cos_sin_cache(config)


@pytest.mark.parametrize("model", [model for model in MODELS if "deepseek" not in model])
@pytest.mark.parametrize(("old", "new"), [(0, 900), (1000, 3), (517, 518)])
def test_a_moved_key_is_the_models_own_at_its_new_place(model, old, new):
    embedding, config = MODELS[model]
    rope = embedding(config)
    tokens, heads = 20, 2
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys = torch.randn(tokens, heads, size, generator=torch.Generator().manual_seed(0))

    def at(position):
        cos, sin = rope(torch.zeros(1), torch.arange(position, position + tokens)[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        turned, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
        return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)

    cache = torch.zeros(64, 2, 16, heads, size)
    stored = torch.zeros(2, 1, tokens, heads * size)
    stored[0, 0] = at(old).reshape(tokens, -1)
    splicer = Splicer(PagedLayout.vllm([cache]), RopeTables([cos_sin_cache(config, 1024)], size), chunk_tokens=tokens)
    splicer.splice([Chunk(stored, old, new)], [list(range(64))])
    spliced = cache[:, 0].reshape(-1, heads, size)[new : new + tokens]
    torch.testing.assert_close(spliced, at(new), rtol=0, atol=2e-3)
