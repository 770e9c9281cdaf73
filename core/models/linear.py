"""Linear attention beside full attention: Qwen 3 Next, Qwen 3.5 and later (gated delta nets), Kimi Linear and K3
(KDA).
"""

import attrs

from ..errors import InputError
from .dense import attention_shape
from .latent import latent_size, mla_groups, routed_mlp
from .layer_cache import AttentionCache, LatentCache, LayerCaches, StateCache
from .moe import sparse_layers
from .parts import Architecture, ConfigFields, decoder, layer_types, num_layers, per_layer_types, read_heads
from .weights import Groups, ModelWeights, WeightKind, column, experts, gated_mlp, row, vector, whole


def _qwen_types(fields: ConfigFields) -> tuple[str, ...]:
    interval = fields.integer_or("full_attention_interval", 4)
    return layer_types(fields, lambda index: "linear_attention" if (index + 1) % interval else "full_attention")


def _qwen_state(fields: ConfigFields) -> StateCache:
    key_heads, key_size, value_heads, value_size, kernel = fields.integers(
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_num_value_heads",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    return StateCache(
        conv_kernel_size=kernel,
        num_key_heads=key_heads,
        key_head_dim=key_size,
        num_value_heads=value_heads,
        value_head_dim=value_size,
    )


def _qwen_caches(fields: ConfigFields) -> LayerCaches:
    heads = read_heads(fields)
    full = AttentionCache(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size)
    state = _qwen_state(fields)
    return tuple((state,) if kind == "linear_attention" else (full,) for kind in _qwen_types(fields))


def _delta_net_groups(fields: ConfigFields, hidden_size: int) -> Groups:
    """Gated delta net: projections of queries, keys, values and their gates, a convolution, and two gates a head."""
    state = _qwen_state(fields)
    kind = WeightKind.ATTENTION
    value_width = state.num_value_heads * state.value_head_dim
    return (
        column("in_proj_qkvz", kind, hidden_size, state.conv_channels + value_width),
        column("in_proj_ba", kind, hidden_size, 2 * state.num_value_heads),
        vector("conv1d", state.conv_channels * state.conv_kernel_size),
        vector("decays and norm", 2 * state.num_value_heads + state.value_head_dim),
        row("out_proj", kind, value_width, hidden_size),
    )


def _qwen_weights(fields: ConfigFields) -> ModelWeights:
    """Full layers compute an output gate beside the queries; experts, where there are any, in every layer."""
    hidden_size = fields.integer("hidden_size")
    heads = read_heads(fields)
    attention = attention_shape(fields, qk_norm=2 * heads.head_size)
    full = (
        *attention.groups(),
        column("output gate", WeightKind.ATTENTION, hidden_size, heads.num_heads * heads.head_size),
    )
    linear = _delta_net_groups(fields, hidden_size)
    mlp = _qwen_mlp(fields, hidden_size)
    types = _qwen_types(fields)

    def layer(index: int) -> Groups:
        mixer = linear if types[index] == "linear_attention" else full
        return (*mixer, *mlp, vector("norms", 2 * hidden_size))

    return decoder(fields, layer, tied_by_default=False)


def _qwen_mlp(fields: ConfigFields, hidden_size: int) -> Groups:
    if not fields.has("num_experts") and not fields.has("num_local_experts"):
        return gated_mlp(hidden_size, fields.integer("intermediate_size"))
    num_experts = fields.integer("num_experts", "num_local_experts")
    expert_size, visited, shared_size = fields.integers(
        "moe_intermediate_size", "num_experts_per_tok", "shared_expert_intermediate_size"
    )
    return (
        *experts(hidden_size, expert_size, num_experts, visited),
        *gated_mlp(hidden_size, shared_size),
        vector("shared expert gate", hidden_size),
    )


def _kimi_linear_section(fields: ConfigFields) -> ConfigFields:
    section = fields.section("linear_attn_config")
    if section is None:
        raise InputError(f"{fields.place}: missing linear_attn_config, which says what the linear layers keep")
    return section


def _kimi_is_full(fields: ConfigFields) -> tuple[bool, ...]:
    """Which layers are full; the checkpoint's lists count layers from 1."""
    types = per_layer_types(fields, num_layers(fields))
    if types is not None:
        return tuple(kind == "full_attention" for kind in types)
    full = frozenset(_kimi_linear_section(fields).integer_list("full_attn_layers"))
    return tuple(index + 1 in full for index in range(num_layers(fields)))


def _kimi_state(fields: ConfigFields) -> StateCache:
    section = _kimi_linear_section(fields)
    num_heads, head_size, kernel = section.integers("num_heads", "head_dim", "short_conv_kernel_size")
    return StateCache(
        conv_kernel_size=kernel,
        num_key_heads=num_heads,
        key_head_dim=head_size,
        num_value_heads=num_heads,
        value_head_dim=head_size,
    )


def _kimi_caches(fields: ConfigFields) -> LayerCaches:
    latent, state = LatentCache(head_size=latent_size(fields)), _kimi_state(fields)
    return tuple((latent,) if is_full else (state,) for is_full in _kimi_is_full(fields))


def _kda_groups(fields: ConfigFields, hidden_size: int) -> Groups:
    """KDA: a decay per channel and an output gate, each through a low-rank pair of matrices."""
    state = _kimi_state(fields)
    num_heads, head_size = state.num_value_heads, state.value_head_dim
    width = num_heads * head_size
    kind = WeightKind.ATTENTION
    return (
        column("qkv_proj", kind, hidden_size, 3 * width),
        vector("conv1d", state.conv_channels * state.conv_kernel_size),
        whole("forget and output gates, down", kind, hidden_size, 2 * head_size),
        column("forget and output gates, up", kind, head_size, 2 * width),
        column("b_proj", kind, hidden_size, num_heads),
        vector("decays and norm", width + num_heads + head_size),
        row("o_proj", kind, width, hidden_size),
    )


def _kimi_linear_weights(fields: ConfigFields) -> ModelWeights:
    hidden_size, dense_size = fields.integers("hidden_size", "intermediate_size")
    full, linear, routed = mla_groups(fields), _kda_groups(fields, hidden_size), routed_mlp(fields)
    is_full, sparse = _kimi_is_full(fields), sparse_layers(fields)

    def layer(index: int) -> Groups:
        mixer = full if is_full[index] else linear
        mlp = routed if sparse[index] else gated_mlp(hidden_size, dense_size)
        return (*mixer, *mlp, vector("norms", 2 * hidden_size))

    return decoder(fields, layer, tied_by_default=False)


_VISION = ("vision encoder and projector",)
_QWEN = Architecture(caches=_qwen_caches, weights=_qwen_weights, class_defaults={"head_dim": 256})
_QWEN_WITH_VISION = attrs.evolve(_QWEN, left_out=_VISION)

LINEAR_ARCHITECTURES = {
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN_WITH_VISION,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_WITH_VISION,
    "KimiLinearForCausalLM": Architecture(caches=_kimi_caches, weights=_kimi_linear_weights),
    "KimiK3ForConditionalGeneration": Architecture(
        caches=_kimi_caches,
        weights=None,
        weights_unknown="its experts work on a latent and its layers attend to earlier layers' outputs",
        left_out=_VISION,
    ),
}
