"""Linear attention beside full attention: Qwen 3 Next, 3.5 and later (gated delta nets), Kimi Linear and K3 (KDA)."""

import functools
from typing import Any, ClassVar

from ..errors import InputError
from .architecture import Architecture, architectures
from .config_fields import ConfigFields
from .latent import MLA, latent_cache
from .layer_cache import AttentionCache, LayerCaches, StateCache
from .weights import Groups, ModelWeights, WeightKind, column, experts, gated_mlp, row, vector, whole

DELTA_NET_KERNEL = "linear_conv_kernel_dim"


def linear_state(fields: ConfigFields, prefix: str, kernel_field: str, **dtypes: str) -> StateCache:
    """The state of a gated delta net (`linear_` fields) or of KDA; `dtypes` are those of its two arrays."""
    names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
    *sizes, kernel = fields.integers(*(prefix + name for name in names), kernel_field)
    shape: dict[str, Any] = {**dict(zip(names, sizes, strict=True)), **dtypes}
    return StateCache(conv_kernel_size=kernel, **shape)


@architectures.register(
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
class Qwen35(Architecture):
    """Every fourth layer is full, the others are gated delta nets; experts, where there are any, in every layer."""

    class_defaults: ClassVar = {"head_dim": 256}
    qk_norm = "head"
    understands: ClassVar[frozenset[str]] = frozenset({"full_attention_interval"})

    @functools.cached_property
    def is_linear(self) -> tuple[bool, ...]:
        """Whether each layer is a gated delta net: as listed, else all but every `full_attention_interval`-th."""
        interval = self.fields.integer_or("full_attention_interval", 4)
        types = self.listed_or(lambda index: "linear_attention" if (index + 1) % interval else "full_attention")
        return tuple(kind == "linear_attention" for kind in types)

    def caches(self) -> LayerCaches:
        full = AttentionCache(num_kv_heads=self.heads.num_kv_heads, head_size=self.heads.head_size)
        dtype = self.fields.text("mamba_ssm_dtype") or "fp32"
        state = linear_state(self.fields, "linear_", DELTA_NET_KERNEL, recurrent_dtype=dtype)
        return tuple((state,) if is_linear else (full,) for is_linear in self.is_linear)

    def attention(self, index: int) -> Groups:
        """A gated delta net, or attention that computes an output gate beside the queries."""
        kind, hidden_size, heads = WeightKind.ATTENTION, self.hidden_size, self.heads
        if not self.is_linear[index]:
            gate = column("output gate", kind, hidden_size, heads.num_heads * heads.head_size)
            return (*super().attention(index), gate)
        state = linear_state(self.fields, "linear_", DELTA_NET_KERNEL)
        value_width = state.num_value_heads * state.value_head_dim
        return (
            column("in_proj_qkvz", kind, hidden_size, state.conv_channels + value_width),
            column("in_proj_ba", kind, hidden_size, 2 * state.num_value_heads),
            vector("conv1d", state.conv_channels * state.conv_kernel_size),
            vector("decays and norm", 2 * state.num_value_heads + state.value_head_dim),
            row("out_proj", kind, value_width, hidden_size),
        )

    def mlp(self, index: int) -> Groups:
        fields, hidden_size = self.fields, self.hidden_size
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


@architectures.register("KimiLinearForCausalLM")
class KimiLinear(MLA):
    """Latents on full layers, Kimi Delta Attention (KDA) on the others."""

    @property
    def linear_section(self) -> ConfigFields:
        """The part of the config about the linear layers.

        Raises:
            InputError: there is none.
        """
        section = self.fields.section("linear_attn_config")
        if section is None:
            raise InputError(f"{self.fields.place}: missing linear_attn_config, which says what the linear layers keep")
        return section

    @functools.cached_property
    def is_full(self) -> tuple[bool, ...]:
        """Whether each layer is full; the checkpoint's list counts layers from 1."""
        types = self.listed()
        if types is not None:
            return tuple(kind == "full_attention" for kind in types)
        full = self.linear_section.integer_list("full_attn_layers")
        return tuple(index + 1 in full for index in range(self.num_layers))

    @property
    def state(self) -> StateCache:
        """The state of a linear layer."""
        num_heads, head_size, kernel = self.linear_section.integers("num_heads", "head_dim", "short_conv_kernel_size")
        return StateCache(
            conv_kernel_size=kernel,
            num_key_heads=num_heads,
            key_head_dim=head_size,
            num_value_heads=num_heads,
            value_head_dim=head_size,
        )

    def caches(self) -> LayerCaches:
        latent, state = latent_cache(self.fields), self.state
        return tuple((latent,) if is_full else (state,) for is_full in self.is_full)

    def attention(self, index: int) -> Groups:
        """The latent's projections, or KDA: a decay per channel and an output gate, each through a low-rank pair."""
        if self.is_full[index]:
            return super().attention(index)
        state, hidden_size, kind = self.state, self.hidden_size, WeightKind.ATTENTION
        num_heads, head_size = state.num_value_heads, state.value_head_dim
        width = num_heads * head_size
        return (
            column("qkv_proj", kind, hidden_size, 3 * width),
            vector("conv1d", state.conv_channels * state.conv_kernel_size),
            whole("forget and output gates, down", kind, hidden_size, 2 * head_size),
            column("forget and output gates, up", kind, head_size, 2 * width),
            column("b_proj", kind, hidden_size, num_heads),
            vector("decays and norm", width + num_heads + head_size),
            row("o_proj", kind, width, hidden_size),
        )


@architectures.register("KimiK3ForConditionalGeneration")
class KimiK3(KimiLinear):
    """Kimi Linear's caches; the parameters are not known here."""

    def weights(self) -> ModelWeights:
        """Refuse.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{self.fields.place}: the parameters of Kimi K3 are not known here (its experts work on a latent, and its"
            " layers attend to earlier layers' outputs)"
        )
