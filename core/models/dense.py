"""Dense decoders: Llama, Mistral, Qwen 2 and 3, Phi, GPT-2, OPT, Gemma 2 and 3, Command."""

import attrs

from ..errors import InputError
from .layer_cache import AttentionCache, LayerCaches
from .parts import (
    Architecture,
    ConfigFields,
    Heads,
    attention_caches,
    decoder,
    every_nth_full,
    layer_types,
    num_layers,
    read_heads,
    window,
)
from .weights import (
    AttentionShape,
    Groups,
    ModelWeights,
    WeightKind,
    embedding,
    experts,
    gated_mlp,
    plain_mlp,
    vector,
    whole,
)


def _full_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, ["full_attention"] * num_layers(fields))


def _windowed_where_set_caches(fields: ConfigFields) -> LayerCaches:
    """All layers slide where the config gives a window (Mistral 7B v0.1, Phi 3), else all are full."""
    default = "sliding_attention" if fields.has("sliding_window") else "full_attention"
    return attention_caches(fields, layer_types(fields, lambda index: default))


def _qwen_caches(fields: ConfigFields) -> LayerCaches:
    """`use_sliding_window` decides; then layers from `max_window_layers` on slide."""
    if not fields.flag("use_sliding_window", False):
        return _full_caches(fields)
    first_sliding = fields.integer("max_window_layers")
    types = layer_types(fields, lambda index: "sliding_attention" if index >= first_sliding else "full_attention")
    return attention_caches(fields, types)


def _gemma2_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 2)))


def _gemma3_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 6)))


def _cohere2_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, layer_types(fields, every_nth_full(fields, "sliding_window_pattern", 4)))


def attention_shape(
    fields: ConfigFields, *, qkv_bias: bool = False, output_bias: bool = False, qk_norm: int = 0
) -> AttentionShape:
    """The attention of a decoder whose layers are alike."""
    heads = read_heads(fields)
    return AttentionShape(
        hidden_size=fields.integer("hidden_size", "n_embd"),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        head_size_v=heads.head_size_v,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
    )


def _llama_weights(fields: ConfigFields) -> ModelWeights:
    bias = fields.flag("attention_bias", False)
    return _gated_decoder(fields, attention_shape(fields, qkv_bias=bias, output_bias=bias))


def _qwen2_weights(fields: ConfigFields) -> ModelWeights:
    return _gated_decoder(fields, attention_shape(fields, qkv_bias=True))


def _qwen3_weights(fields: ConfigFields) -> ModelWeights:
    bias = fields.flag("attention_bias", False)
    norms = 2 * read_heads(fields).head_size
    return _gated_decoder(fields, attention_shape(fields, qkv_bias=bias, output_bias=bias, qk_norm=norms))


def _gated_decoder(
    fields: ConfigFields, attention: AttentionShape, norms: int = 2, tied_by_default: bool = False
) -> ModelWeights:
    hidden_size, intermediate_size = fields.integers("hidden_size", "intermediate_size")
    layer = (
        *attention.groups(),
        *gated_mlp(hidden_size, intermediate_size, fields.flag("mlp_bias", False)),
        vector("norms", norms * hidden_size),
    )
    return decoder(fields, lambda index: layer, tied_by_default=tied_by_default)


def _gemma2_weights(fields: ConfigFields) -> ModelWeights:
    return _gated_decoder(fields, attention_shape(fields), norms=4, tied_by_default=True)


def _gemma3_weights(fields: ConfigFields) -> ModelWeights:
    norms = 2 * read_heads(fields).head_size
    return _gated_decoder(fields, attention_shape(fields, qk_norm=norms), norms=4, tied_by_default=True)


def _cohere_weights(fields: ConfigFields) -> ModelWeights:
    """One norm a layer, since attention and MLP read the same input."""
    heads = read_heads(fields)
    norms = (heads.num_heads + heads.num_kv_heads) * heads.head_size if fields.flag("use_qk_norm", False) else 0
    bias = fields.flag("attention_bias", False)
    shape = attention_shape(fields, qkv_bias=bias, output_bias=bias, qk_norm=norms)
    return _gated_decoder(fields, shape, norms=1, tied_by_default=True)


def _phi_weights(fields: ConfigFields) -> ModelWeights:
    """Phi 1 and 2: biases everywhere, one layer norm a layer, a bias on the output matrix."""
    hidden_size, intermediate_size, vocab_size = fields.integers("hidden_size", "intermediate_size", "vocab_size")
    attention = attention_shape(fields, qkv_bias=True, output_bias=True)
    layer = (*attention.groups(), *plain_mlp(hidden_size, intermediate_size), vector("norm", 2 * hidden_size))
    return decoder(
        fields,
        lambda index: layer,
        tied_by_default=False,
        final_norm=2 * hidden_size,
        more_head=(vector("lm_head bias", vocab_size),),
    )


def _gpt2_weights(fields: ConfigFields) -> ModelWeights:
    hidden_size = fields.integer("hidden_size", "n_embd")
    intermediate_size = fields.integer_or("n_inner", 4 * hidden_size)
    positions = fields.integer("max_position_embeddings", "n_positions")
    return _learned_positions_decoder(fields, hidden_size, intermediate_size, positions)


def _opt_weights(fields: ConfigFields) -> ModelWeights:
    """OPT keeps two more positions than its longest sequence; sizes with an embedding projection are refused."""
    hidden_size, intermediate_size, positions = fields.integers("hidden_size", "ffn_dim", "max_position_embeddings")
    projected = fields.integer_or("word_embed_proj_dim", hidden_size)
    if projected != hidden_size:
        raise InputError(
            f"{fields.place}: word_embed_proj_dim {projected} differs from hidden_size {hidden_size}; the parameters of"
            " OPT models with an embedding projection are not known here, so give the weights' bytes"
        )
    return _learned_positions_decoder(fields, hidden_size, intermediate_size, positions + 2)


def _learned_positions_decoder(
    fields: ConfigFields, hidden_size: int, intermediate_size: int, positions: int
) -> ModelWeights:
    attention = attention_shape(fields, qkv_bias=True, output_bias=True)
    layer: Groups = (
        *attention.groups(),
        *plain_mlp(hidden_size, intermediate_size),
        vector("norms", 4 * hidden_size),
    )
    return decoder(
        fields,
        lambda index: layer,
        tied_by_default=True,
        final_norm=2 * hidden_size,
        more_embeddings=(embedding("embed_positions", positions, hidden_size),),
    )


_VISION = ("vision encoder and projector",)
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}

DENSE_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(caches=_full_caches, weights=_llama_weights),
    "MistralForCausalLM": Architecture(caches=_windowed_where_set_caches, weights=_llama_weights),
    "Qwen2ForCausalLM": Architecture(caches=_qwen_caches, weights=_qwen2_weights),
    "Qwen3ForCausalLM": Architecture(caches=_qwen_caches, weights=_qwen3_weights, class_defaults={"head_dim": 128}),
    "Phi3ForCausalLM": Architecture(caches=_windowed_where_set_caches, weights=_llama_weights),
    "PhiForCausalLM": Architecture(caches=_full_caches, weights=_phi_weights),
    "GPT2LMHeadModel": Architecture(caches=_full_caches, weights=_gpt2_weights),
    "OPTForCausalLM": Architecture(caches=_full_caches, weights=_opt_weights),
    "Gemma2ForCausalLM": Architecture(
        caches=_gemma2_caches, weights=_gemma2_weights, class_defaults={"head_dim": 256, "sliding_window": 4096}
    ),
    "Gemma3ForCausalLM": Architecture(caches=_gemma3_caches, weights=_gemma3_weights, class_defaults=_GEMMA3_DEFAULTS),
    "Gemma3ForConditionalGeneration": Architecture(
        caches=_gemma3_caches, weights=_gemma3_weights, left_out=_VISION, class_defaults=_GEMMA3_DEFAULTS
    ),
    "CohereForCausalLM": Architecture(caches=_full_caches, weights=_cohere_weights),
    "Cohere2ForCausalLM": Architecture(caches=_cohere2_caches, weights=_cohere_weights),
}

# Gemma 4: full and sliding layers of different head sizes, layers that reuse another's cache, per-layer embeddings.


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
