"""Families of tiny decoders, named and configured as transformers has them; needs torch alone."""

import pytest
import torch

WINDOW = 10

_DECODER = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

# Grouped queries (a number of heads that is no power of 2), windows in some layers or all, biases, norms of queries
# and keys, softcaps, learned positions, experts.
FAMILIES = {
    "llama": ("Llama", _DECODER),
    "qwen2": ("Qwen2", {k: v for k, v in _DECODER.items() if k != "head_dim"}),
    "qwen3": ("Qwen3", _DECODER),
    "qwen3-moe": ("Qwen3Moe", _DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mistral-windowed": ("Mistral", _DECODER | {"sliding_window": WINDOW}),
    "gemma2-windowed": ("Gemma2", _DECODER | _HYBRID | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma3-windowed": ("Gemma3", _DECODER | _HYBRID | {"query_pre_attn_scalar": 8}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 64}),
}

# The same suite on a GPU where there is one: "llama on cuda".
EVERYWHERE = [
    *FAMILIES,
    *(pytest.param(f"{name} on cuda", marks=pytest.mark.gpu) for name in FAMILIES if torch.cuda.is_available()),
]
