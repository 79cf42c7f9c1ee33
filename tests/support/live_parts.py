"""vLLM on the demo model in the process of the tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from tuner.engine.limits import EngineLimits
from tuner.engine.live import LiveEngine, LiveSource

# vLLM on a CPU looks through all modules for kernels of its own, and fails on an object of this
# one that claims to have every attribute. An engine's own process starts before it is imported.
_HIDDEN = "llvmlite.binding.ffi"

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "sliding_window": 64,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "query_pre_attn_scalar": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""A model whose layers look back a window, but for every fourth."""

GEMMA_4 = {
    **GEMMA,
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 512,
}
"""A model whose every fourth layer has larger heads: blocks of others hold twice the tokens."""


LFM = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "layer_types": [*["conv"] * 3, "full_attention"],
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A model whose layers keep a state, but for every fourth; its blocks hold 128 tokens."""


def start_live(
    values: Mapping[str, object], ceiling: EngineLimits, *, is_greedy: bool = False
) -> LiveEngine:
    """Start vLLM at the ceiling, also where numba was imported before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, _HIDDEN, raising=False)
        return LiveSource(is_greedy).start(values, ceiling)
