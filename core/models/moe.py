"""Mixture-of-experts decoders with ordinary keys and values: Mixtral, Qwen 3 MoE, GPT-OSS, MiniMax M2, MiMo, Llama
4.
"""

import attrs

from ..errors import InputError
from .dense import attention_shape
from .layer_cache import AttentionCache, CachePart, LatentCache, LayerCache, LayerCaches
from .parts import Architecture, ConfigFields, attention_caches, decoder, layer_types, num_layers, read_heads, window
from .weights import AttentionShape, Groups, ModelWeights, WeightKind, experts, gated_mlp, vector, whole


def _full_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(fields, ["full_attention"] * num_layers(fields))


def _gpt_oss_caches(fields: ConfigFields) -> LayerCaches:
    return attention_caches(
        fields, layer_types(fields, lambda index: "full_attention" if index % 2 else "sliding_attention")
    )


def sparse_layers(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers route to experts: a list of types or of 0 and 1, or all from `first_k_dense_replace` on."""
    count = num_layers(fields)
    if fields.has("mlp_layer_types"):
        return tuple(kind != "dense" for kind in fields.text_list("mlp_layer_types")[:count])
    if fields.has("moe_layer_freq") and not isinstance(fields.values["moe_layer_freq"], int):
        return tuple(bool(item) for item in fields.integer_list("moe_layer_freq")[:count])
    first_sparse = 0
    if fields.values.get("first_k_dense_replace"):
        first_sparse = fields.integer("first_k_dense_replace")
    return tuple(index >= first_sparse for index in range(count))


def _mixtral_weights(fields: ConfigFields) -> ModelWeights:
    hidden_size, intermediate_size, num_experts, visited = fields.integers(
        "hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"
    )
    layer = (
        *attention_shape(fields).groups(),
        *experts(hidden_size, intermediate_size, num_experts, visited),
        vector("norms", 2 * hidden_size),
    )
    return decoder(fields, lambda index: layer, tied_by_default=False)


def _qwen3_moe_weights(fields: ConfigFields) -> ModelWeights:
    """`mlp_only_layers` and `decoder_sparse_step` decide which layers are dense."""
    hidden_size, dense_size, expert_size, visited = fields.integers(
        "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok"
    )
    num_experts = fields.integer("num_experts", "num_local_experts")
    bias = fields.flag("attention_bias", False)
    norms = 2 * read_heads(fields).head_size
    common = (
        *attention_shape(fields, qkv_bias=bias, output_bias=bias, qk_norm=norms).groups(),
        vector("norms", 2 * hidden_size),
    )
    dense_layers = fields.integer_list("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    sparse_step = fields.integer_or("decoder_sparse_step", 1)

    def layer(index: int) -> Groups:
        if index in dense_layers or (index + 1) % sparse_step:
            return (*common, *gated_mlp(hidden_size, dense_size))
        return (*common, *experts(hidden_size, expert_size, num_experts, visited))

    return decoder(fields, layer, tied_by_default=False)


def _gpt_oss_weights(fields: ConfigFields) -> ModelWeights:
    """Attention sinks per head; biases on every projection, on the router and on every expert."""
    hidden_size, expert_size, num_experts = fields.integers("hidden_size", "intermediate_size", "num_local_experts")
    visited = fields.integer("num_experts_per_tok", "experts_per_token")
    expert_biases = num_experts * (2 * expert_size + hidden_size)
    layer = (
        *attention_shape(fields, qkv_bias=True, output_bias=True).groups(),
        vector("attention sinks", read_heads(fields).num_heads),
        *experts(hidden_size, expert_size, num_experts, visited),
        vector("router and expert biases", num_experts + expert_biases),
        vector("norms", 2 * hidden_size),
    )
    return decoder(fields, lambda index: layer, tied_by_default=False)


def _minimax_m2_weights(fields: ConfigFields) -> ModelWeights:
    """Query and key norms over all heads together."""
    hidden_size, expert_size, num_experts, visited = fields.integers(
        "hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok"
    )
    heads = read_heads(fields)
    norms = (heads.num_heads + heads.num_kv_heads) * heads.head_size
    layer = (
        *attention_shape(fields, qk_norm=norms).groups(),
        *experts(hidden_size, expert_size, num_experts, visited),
        vector("norms", 2 * hidden_size),
    )
    return decoder(fields, lambda index: layer, tied_by_default=False)


def _mimo_heads(fields: ConfigFields) -> tuple[AttentionCache, AttentionCache]:
    """Full and sliding layers of MiMo, which may differ in heads and in both head sizes."""
    heads = read_heads(fields)
    full = AttentionCache(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size, head_size_v=heads.head_size_v)
    sliding = AttentionCache(
        num_kv_heads=fields.integer("swa_num_key_value_heads"),
        head_size=fields.integer_or("swa_head_dim", heads.head_size),
        head_size_v=fields.integer_or("swa_v_head_dim", heads.head_size_v),
        sliding_window=window(fields),
    )
    return full, sliding


def _mimo_slides(fields: ConfigFields) -> tuple[bool, ...]:
    count = num_layers(fields)
    if fields.has("layer_types"):
        return tuple(kind == "sliding_attention" for kind in layer_types(fields, str))
    pattern = fields.integer_list("hybrid_layer_pattern")
    if len(pattern) < count:
        raise InputError(f"{fields.place}: hybrid_layer_pattern has {len(pattern)} entries for {count} layers")
    return tuple(bool(item) for item in pattern[:count])


def _mimo_caches(fields: ConfigFields) -> LayerCaches:
    full, sliding = _mimo_heads(fields)
    return tuple((sliding,) if slides else (full,) for slides in _mimo_slides(fields))


def _mimo_weights(fields: ConfigFields) -> ModelWeights:
    """Attention sinks on sliding layers; dense and sparse layers as listed."""
    hidden_size, dense_size, expert_size, num_experts, visited = fields.integers(
        "hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"
    )
    num_heads = read_heads(fields).num_heads
    sliding_heads = fields.integer_or("swa_num_attention_heads", num_heads)
    slides, sparse = _mimo_slides(fields), sparse_layers(fields)
    full_cache, sliding_cache = _mimo_heads(fields)

    def layer(index: int) -> Groups:
        cache, heads = (sliding_cache, sliding_heads) if slides[index] else (full_cache, num_heads)
        attention = AttentionShape(
            hidden_size=hidden_size,
            num_heads=heads,
            num_kv_heads=cache.num_kv_heads,
            head_size=cache.head_size,
            head_size_v=cache.head_size_v,
        )
        sinks = (vector("attention sinks", heads),) if slides[index] else ()
        mlp = (
            experts(hidden_size, expert_size, num_experts, visited)
            if sparse[index]
            else gated_mlp(hidden_size, dense_size)
        )
        return (*attention.groups(), *sinks, *mlp, vector("norms", 2 * hidden_size))

    return decoder(fields, layer, tied_by_default=False)


def _minimax_m3_sparse_attention(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers have an indexer: by layer type, or by the checkpoint's 0/1 list."""
    if fields.has("layer_types"):
        return tuple(kind != "full_attention" for kind in layer_types(fields, str))
    section = fields.section("sparse_attention_config")
    if section is None:
        raise InputError(f"{fields.place}: missing layer_types or sparse_attention_config.sparse_attention_freq")
    return tuple(bool(item) for item in section.integer_list("sparse_attention_freq")[: num_layers(fields)])


def _minimax_m3_index(fields: ConfigFields) -> tuple[int, int]:
    """Heads and head size of the indexer."""
    section = fields.section("sparse_attention_config")
    if section is not None and section.has("sparse_index_dim"):
        return section.integer("sparse_num_index_heads"), section.integer("sparse_index_dim")
    return fields.integer("index_n_heads"), fields.integer("index_head_dim")


def _minimax_m3_caches(fields: ConfigFields) -> LayerCaches:
    """Ordinary keys and values, and on sparse layers an indexer's keys, in bf16 whatever the cache dtype."""
    heads = read_heads(fields)
    kv = AttentionCache(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size)
    _, index_size = _minimax_m3_index(fields)
    indexer = LatentCache(part=CachePart.INDEXER, head_size=index_size, fixed_dtype="bf16")
    dense_layer: tuple[LayerCache, ...] = (kv,)
    return tuple((kv, indexer) if sparse else dense_layer for sparse in _minimax_m3_sparse_attention(fields))


def _minimax_m3_weights(fields: ConfigFields) -> ModelWeights:
    hidden_size, expert_size, num_experts, visited, dense_size, shared_size = fields.integers(
        "hidden_size",
        "intermediate_size",
        "num_local_experts",
        "num_experts_per_tok",
        "dense_intermediate_size",
        "shared_intermediate_size",
    )
    head_size = read_heads(fields).head_size
    index_heads, index_size = _minimax_m3_index(fields)
    has_indexer, sparse_mlp = _minimax_m3_sparse_attention(fields), sparse_layers(fields)
    attention = attention_shape(fields, qk_norm=2 * head_size).groups()
    indexer = (
        whole("indexer", WeightKind.ATTENTION, hidden_size, (index_heads + 1) * index_size),
        vector("indexer norms", 2 * index_size),
    )
    sparse = (*experts(hidden_size, expert_size, num_experts, visited), *gated_mlp(hidden_size, shared_size))

    def layer(index: int) -> Groups:
        mlp = sparse if sparse_mlp[index] else gated_mlp(hidden_size, dense_size)
        return (*attention, *(indexer if has_indexer[index] else ()), *mlp, vector("norms", 2 * hidden_size))

    return decoder(fields, layer, tied_by_default=False)


def _llama4_types(fields: ConfigFields) -> tuple[str, ...]:
    """Layers with rotary positions attend in chunks; the others (every fourth by default) to everything."""
    if not fields.has("attention_chunk_size"):
        return ("full_attention",) * num_layers(fields)
    if fields.values.get("no_rope_layers"):
        uses_rope = fields.integer_list("no_rope_layers")
        return tuple("chunked_attention" if rope else "full_attention" for rope in uses_rope[: num_layers(fields)])
    interval = fields.integer_or("no_rope_layer_interval", 4)
    return layer_types(fields, lambda index: "chunked_attention" if (index + 1) % interval else "full_attention")


def _llama4_caches(fields: ConfigFields) -> LayerCaches:
    heads = read_heads(fields)
    full = AttentionCache(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size)
    chunk = fields.optional_integer("attention_chunk_size")
    chunked = attrs.evolve(full, attention_chunk_size=chunk)
    return tuple((chunked,) if kind == "chunked_attention" else (full,) for kind in _llama4_types(fields))


def _llama4_weights(fields: ConfigFields) -> ModelWeights:
    """Every `interleave_moe_layer_step`-th layer routes and has a shared expert; the others are dense."""
    hidden_size, expert_size, dense_size, num_experts, visited = fields.integers(
        "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"
    )
    step = fields.integer_or("interleave_moe_layer_step", 1)
    if fields.values.get("moe_layers"):
        moe_layers = frozenset(fields.integer_list("moe_layers"))
    else:
        moe_layers = frozenset(range(step - 1, num_layers(fields), step))
    attention = (*attention_shape(fields).groups(), vector("norms", 2 * hidden_size))
    routed = (*experts(hidden_size, expert_size, num_experts, visited), *gated_mlp(hidden_size, expert_size))
    dense = gated_mlp(hidden_size, dense_size)
    return decoder(
        fields, lambda index: (*attention, *(routed if index in moe_layers else dense)), tied_by_default=False
    )


_VISION = ("vision encoder and projector",)

MOE_ARCHITECTURES = {
    "MixtralForCausalLM": Architecture(caches=_full_caches, weights=_mixtral_weights),
    "Qwen3MoeForCausalLM": Architecture(caches=_full_caches, weights=_qwen3_moe_weights),
    "GptOssForCausalLM": Architecture(
        caches=_gpt_oss_caches, weights=_gpt_oss_weights, class_defaults={"head_dim": 64}
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        caches=_full_caches, weights=_minimax_m2_weights, class_defaults={"head_dim": 128}
    ),
    "MiniMaxM3SparseForConditionalGeneration": Architecture(
        caches=_minimax_m3_caches, weights=_minimax_m3_weights, left_out=_VISION
    ),
    "MiniMaxM3SparseForCausalLM": Architecture(caches=_minimax_m3_caches, weights=_minimax_m3_weights),
    "MiMoV2FlashForCausalLM": Architecture(caches=_mimo_caches, weights=_mimo_weights),
    "MiMoV2ForCausalLM": Architecture(caches=_mimo_caches, weights=_mimo_weights),
    "Llama4ForCausalLM": Architecture(caches=_llama4_caches, weights=_llama4_weights, hybrid_manager=False),
    "Llama4ForConditionalGeneration": Architecture(
        caches=_llama4_caches, weights=_llama4_weights, left_out=_VISION, hybrid_manager=False
    ),
}
