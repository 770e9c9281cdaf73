"""Latent attention: DeepSeek V2, V3, V3.2 and V4, Kimi K2, GLM-5. One latent vector a token serves all heads."""

from ..errors import InputError
from .layer_cache import CachePart, CompressedCache, LatentCache, LayerCache, LayerCaches, WindowBufferCache
from .moe import sparse_layers
from .parts import Architecture, ConfigFields, decoder, num_layers, per_layer_types
from .weights import (
    Groups,
    ModelWeights,
    Sharding,
    WeightGroup,
    WeightKind,
    column,
    experts,
    gated_mlp,
    row,
    vector,
    whole,
)

# DeepSeek V4 names its layers by how many tokens one state covers.
_V4_RATIO_BY_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_V4_INDEXED_RATIO = 4  # only these layers choose what they read
_V4_INDEXER_DTYPE = "fp4"  # at every cache precision; no field says so


def latent_size(fields: ConfigFields) -> int:
    """Elements of one latent: the compressed part and the rotary part."""
    kv_lora_rank, rope = fields.integers("kv_lora_rank", "qk_rope_head_dim")
    return kv_lora_rank + rope


def _mla_caches(fields: ConfigFields) -> LayerCaches:
    return ((LatentCache(head_size=latent_size(fields)),),) * num_layers(fields)


def _has_indexer(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers have an indexer of their own; the others share the choice of an earlier one (GLM-5.2)."""
    count = num_layers(fields)
    types = per_layer_types(fields, count, "indexer_types")
    if types is not None:
        return tuple(kind == "full" for kind in types)
    if fields.has("index_topk_pattern"):
        pattern = fields.values["index_topk_pattern"]
        return tuple(letter in ("F", "full") for letter in tuple(pattern)[:count])
    frequency = fields.integer_or("index_topk_freq", 1)
    offset = fields.integer_or("index_skip_topk_offset", 2)
    return tuple(max(index - offset + 1, 0) % frequency == 0 for index in range(count))


def _dsa_caches(fields: ConfigFields) -> LayerCaches:
    latent = LatentCache(head_size=latent_size(fields))
    indexer = LatentCache(part=CachePart.INDEXER, head_size=fields.integer("index_head_dim"))
    return tuple((latent, indexer) if own else (latent,) for own in _has_indexer(fields))


def mla_groups(fields: ConfigFields) -> Groups:
    """Down and up projections of queries and of the latent, and the output projection."""
    hidden_size, num_heads, kv_lora_rank, nope, rope, value_size = fields.integers(
        "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )
    kind = WeightKind.ATTENTION
    query_width = num_heads * (nope + rope)
    q_lora_rank = fields.optional_integer("q_lora_rank")
    if q_lora_rank is None:
        queries: Groups = (column("q_proj", kind, hidden_size, query_width),)
    else:
        queries = (
            whole("q_a_proj", kind, hidden_size, q_lora_rank),
            vector("q_a norm", q_lora_rank),
            column("q_b_proj", kind, q_lora_rank, query_width),
        )
    bias = (q_lora_rank or 0) + kv_lora_rank + rope + hidden_size if fields.flag("attention_bias", False) else 0
    biases = (vector("attention biases", bias),) if bias else ()
    return (
        *queries,
        whole("kv_a_proj", kind, hidden_size, kv_lora_rank + rope),
        vector("kv_a norm", kv_lora_rank),
        column("kv_b_proj", kind, kv_lora_rank, num_heads * (nope + value_size)),
        row("o_proj", kind, num_heads * value_size, hidden_size),
        *biases,
    )


def _indexer_groups(fields: ConfigFields) -> Groups:
    hidden_size, q_lora_rank, index_heads, index_size = fields.integers(
        "hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim"
    )
    kind = WeightKind.ATTENTION
    return (
        whole("indexer.wq_b", kind, q_lora_rank, index_heads * index_size),
        whole("indexer.wk", kind, hidden_size, index_size),
        whole("indexer.weights_proj", kind, hidden_size, index_heads),
        vector("indexer norm", 2 * index_size),
    )


def routed_mlp(fields: ConfigFields) -> Groups:
    """Routed and shared experts of one layer."""
    hidden_size, expert_size = fields.integers("hidden_size", "moe_intermediate_size")
    visited = fields.integer("num_experts_per_tok", "num_experts_per_token")
    num_experts = fields.integer("n_routed_experts", "num_local_experts", "num_experts")
    shared = fields.values.get("n_shared_experts", fields.values.get("num_shared_experts")) or 0
    if not isinstance(shared, int) or shared < 0:
        raise InputError(f"{fields.place}: n_shared_experts is {shared!r}; expected a whole number of at least 0")
    shared_groups = gated_mlp(hidden_size, shared * expert_size) if shared else ()
    return (*experts(hidden_size, expert_size, num_experts, visited), *shared_groups)


def _deepseek_weights(fields: ConfigFields, has_indexer: tuple[bool, ...]) -> ModelWeights:
    hidden_size, dense_size = fields.integers("hidden_size", "intermediate_size")
    attention, routed = mla_groups(fields), routed_mlp(fields)
    sparse = sparse_layers(fields)
    indexer = _indexer_groups(fields) if any(has_indexer) else ()

    def layer(index: int) -> Groups:
        mlp = routed if sparse[index] else gated_mlp(hidden_size, dense_size)
        return (
            *attention,
            *(indexer if has_indexer[index] else ()),
            *mlp,
            vector("norms", 2 * hidden_size),
        )

    return decoder(fields, layer, tied_by_default=False)


def _mla_weights(fields: ConfigFields) -> ModelWeights:
    return _deepseek_weights(fields, (False,) * num_layers(fields))


def _dsa_weights(fields: ConfigFields) -> ModelWeights:
    return _deepseek_weights(fields, _has_indexer(fields))


def v4_ratios(fields: ConfigFields) -> tuple[int, ...]:
    """Tokens that one state covers, layer by layer (0: none is kept); entries past the layers are draft layers."""
    count = num_layers(fields)
    types = per_layer_types(fields, count)
    if types is not None:
        unknown = [kind for kind in types if kind not in _V4_RATIO_BY_TYPE]
        if unknown:
            known = ", ".join(_V4_RATIO_BY_TYPE)
            raise InputError(f"{fields.place}: layer_types has {unknown[0]!r}; known are {known}")
        return tuple(_V4_RATIO_BY_TYPE[kind] for kind in types)
    ratios = fields.integer_list("compress_ratios")
    if len(ratios) < count:
        raise InputError(f"{fields.place}: compress_ratios has {len(ratios)} entries for {count} layers")
    return ratios[:count]


def v4_caches(fields: ConfigFields) -> LayerCaches:
    """A window of vectors always; compressed states where the ratio is not 0; an indexer where it is 4."""
    head_size, sliding_window = fields.integers("head_dim", "sliding_window")
    buffer = WindowBufferCache(head_size=head_size, sliding_window=sliding_window)
    caches: list[tuple[LayerCache, ...]] = []
    for ratio in v4_ratios(fields):
        layer: list[LayerCache] = [buffer]
        if ratio:
            layer.append(CompressedCache(head_size=head_size, tokens_per_state=ratio))
        if ratio == _V4_INDEXED_RATIO:
            layer.append(
                CompressedCache(
                    part=CachePart.INDEXER,
                    head_size=fields.integer("index_head_dim"),
                    tokens_per_state=_V4_INDEXED_RATIO,
                    fixed_dtype=_V4_INDEXER_DTYPE,
                )
            )
        caches.append(tuple(layer))
    return tuple(caches)


def _v4_compressor(fields: ConfigFields, ratio: int) -> Groups:
    """Projections that build a state; with ratio 4 two halves that overlap, and an indexer built the same way."""
    if not ratio:
        return ()
    hidden_size, head_size, q_lora_rank = fields.integers("hidden_size", "head_dim", "q_lora_rank")
    kind = WeightKind.ATTENTION
    overlap = 2 if ratio == _V4_INDEXED_RATIO else 1
    groups = [
        whole("compressor", kind, hidden_size, 2 * overlap * head_size),
        vector("compressor bias and norm", ratio * overlap * head_size + head_size),
    ]
    if ratio == _V4_INDEXED_RATIO:
        index_heads, index_size = fields.integers("index_n_heads", "index_head_dim")
        groups += [
            whole("indexer.compressor", kind, hidden_size, 2 * overlap * index_size),
            vector("indexer bias and norm", ratio * overlap * index_size + index_size),
            whole("indexer.q_b", kind, q_lora_rank, index_heads * index_size),
            whole("indexer.weights_proj", kind, hidden_size, index_heads),
        ]
    return tuple(groups)


def _v4_weights(fields: ConfigFields) -> ModelWeights:
    """Grouped low-rank output projection, attention sinks, and hyper-connections around attention and MLP."""
    hidden_size, num_heads, head_size, q_lora_rank, o_groups, o_lora_rank, streams = fields.integers(
        "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "hc_mult"
    )
    kind = WeightKind.ATTENTION
    attention: Groups = (
        whole("q_a_proj", kind, hidden_size, q_lora_rank),
        column("q_b_proj", kind, q_lora_rank, num_heads * head_size),
        whole("kv_proj", kind, hidden_size, head_size),
        WeightGroup(
            name="o_a_proj",
            parameters=num_heads * head_size * o_lora_rank,
            kind=kind,
            sharding=Sharding.SPLIT,
            width=num_heads * head_size,
        ),
        row("o_b_proj", kind, o_groups * o_lora_rank, hidden_size),
        vector("attention sinks and norms", num_heads + q_lora_rank + head_size),
    )
    mixes = streams * streams + 2 * streams
    hyper = vector("hyper-connections", 2 * (mixes * streams * hidden_size + mixes + 3))
    routed = routed_mlp(fields)
    ratios = v4_ratios(fields)

    def layer(index: int) -> Groups:
        compressor = _v4_compressor(fields, ratios[index])
        return (*attention, *compressor, *routed, hyper, vector("norms", 2 * hidden_size))

    head = vector("hyper-connection head", streams * streams * hidden_size + streams + 1)
    return decoder(fields, layer, tied_by_default=False, more_head=(head,))


_MLA = Architecture(caches=_mla_caches, weights=_mla_weights)

LATENT_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": _MLA,
    "DeepseekV3ForCausalLM": _MLA,
    "KimiK2ForCausalLM": _MLA,
    "KimiK25ForConditionalGeneration": Architecture(
        caches=_mla_caches, weights=_mla_weights, left_out=("vision encoder and projector",)
    ),
    "DeepseekV32ForCausalLM": Architecture(caches=_dsa_caches, weights=_dsa_weights),
    "GlmMoeDsaForCausalLM": Architecture(caches=_dsa_caches, weights=_dsa_weights),
    "DeepseekV4ForCausalLM": Architecture(caches=v4_caches, weights=_v4_weights),
}
