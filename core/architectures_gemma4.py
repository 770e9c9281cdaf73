"""Gemma 4: full and sliding layers of different head sizes, layers that reuse another's cache, per-layer embeddings."""

import attrs

from .architecture_parts import (
    Architecture,
    Heads,
    decoder,
    every_nth_full,
    layer_types,
    num_layers,
    read_heads,
    window,
)
from .config_fields import ConfigFields
from .layer_cache import AttentionCache, LayerCaches
from .model_weights import (
    AttentionShape,
    Groups,
    ModelWeights,
    WeightKind,
    embedding,
    experts,
    gated_mlp,
    vector,
    whole,
)


def _types(fields: ConfigFields) -> tuple[str, ...]:
    """Every n-th layer is full, and the last one always."""
    types = layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 6))
    return (*types[:-1], "full_attention")


def _full_heads(fields: ConfigFields) -> Heads:
    """Full layers have larger heads, and fewer KV heads where keys double as values."""
    heads = read_heads(fields)
    size = fields.integer_or("global_head_dim", heads.head_size)
    num_kv_heads = heads.num_kv_heads
    if fields.flag("attention_k_eq_v", False):
        num_kv_heads = fields.integer_or("num_global_key_value_heads", heads.num_kv_heads)
    return attrs.evolve(heads, num_kv_heads=num_kv_heads, head_size=size, head_size_v=size)


def _num_stored(fields: ConfigFields) -> int:
    """The last `num_kv_shared_layers` layers read an earlier layer's cache and store nothing."""
    shared = fields.values.get("num_kv_shared_layers") or 0
    return num_layers(fields) - (fields.integer("num_kv_shared_layers") if shared else 0)


def _caches(fields: ConfigFields) -> LayerCaches:
    sliding, full = read_heads(fields), _full_heads(fields)
    sliding_cache = AttentionCache(
        num_kv_heads=sliding.num_kv_heads, head_size=sliding.head_size, sliding_window=window(fields)
    )
    full_cache = AttentionCache(num_kv_heads=full.num_kv_heads, head_size=full.head_size)
    stored = _num_stored(fields)
    return tuple(
        () if index >= stored else (full_cache,) if kind == "full_attention" else (sliding_cache,)
        for index, kind in enumerate(_types(fields))
    )


def _weights(fields: ConfigFields) -> ModelWeights:
    """Four norms a layer (seven with experts); a gate and a projection per layer where it has embeddings of its own."""
    hidden_size, intermediate_size = fields.integers("hidden_size", "intermediate_size")
    types, stored = _types(fields), _num_stored(fields)
    per_layer_size = fields.values.get("hidden_size_per_layer_input") or 0
    doubles = fields.flag("use_double_wide_mlp", False)
    key_is_value = fields.flag("attention_k_eq_v", False)
    moe = _moe_groups(fields, hidden_size) if fields.flag("enable_moe_block", False) else ()

    def layer(index: int) -> Groups:
        is_full = types[index] == "full_attention"
        heads = _full_heads(fields) if is_full else read_heads(fields)
        shared = index >= stored
        attention = AttentionShape(
            hidden_size=hidden_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_size=heads.head_size,
            head_size_v=heads.head_size,
            qk_norm=heads.head_size if shared else 2 * heads.head_size,
            shared_kv=shared,
            value_is_key=is_full and key_is_value,
        )
        mlp = gated_mlp(hidden_size, intermediate_size * (2 if doubles and shared else 1))
        groups = (*attention.groups(), *mlp, *moe, vector("norms", 4 * hidden_size))
        return (*groups, *_per_layer_groups(hidden_size, per_layer_size)) if per_layer_size else groups

    return decoder(
        fields,
        layer,
        tied_by_default=True,
        more_embeddings=_per_layer_embeddings(fields, hidden_size, per_layer_size) if per_layer_size else (),
    )


def _moe_groups(fields: ConfigFields, hidden_size: int) -> Groups:
    expert_size, num_experts, visited = fields.integers("moe_intermediate_size", "num_experts", "top_k_experts")
    return (
        *experts(hidden_size, expert_size, num_experts, visited),
        vector("router scales and expert norms", hidden_size + num_experts + 3 * hidden_size),
    )


def _per_layer_groups(hidden_size: int, per_layer_size: int) -> Groups:
    return (
        whole("per_layer_input_gate", WeightKind.MLP, hidden_size, per_layer_size),
        whole("per_layer_projection", WeightKind.MLP, per_layer_size, hidden_size),
        vector("per-layer norm", hidden_size),
    )


def _per_layer_embeddings(fields: ConfigFields, hidden_size: int, per_layer_size: int) -> Groups:
    width = num_layers(fields) * per_layer_size
    vocab_size = fields.integer_or("vocab_size_per_layer_input", fields.integer("vocab_size"))
    return (
        embedding("embed_tokens_per_layer", vocab_size, width),
        whole("per_layer_model_projection", WeightKind.MLP, hidden_size, width),
        vector("per-layer projection norm", per_layer_size),
    )


_GEMMA4 = Architecture(caches=_caches, weights=_weights, class_defaults={"head_dim": 256, "global_head_dim": 512})

GEMMA4_ARCHITECTURES = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": attrs.evolve(_GEMMA4, left_out=("vision and audio encoders",)),
}
