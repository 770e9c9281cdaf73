"""States beside attention: gated delta nets (Qwen 3 Next, 3.5 and later), KDA (Kimi), LFM2 and Nemotron-H."""

import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import attrs

from ..errors import InputError
from .architecture import Architecture, ByFields, architectures
from .config_fields import ConfigFields
from .latent import MLA, latent_cache
from .layer_cache import AttentionCache, LayerCache, LayerCaches, Mamba2Cache, ShortConvCache, StateCache
from .weights import (
    Groups,
    ModelWeights,
    WeightGroup,
    WeightKind,
    column,
    experts,
    gated_mlp,
    rounded_up,
    row,
    vector,
    whole,
)

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


@architectures.register("Lfm2ForCausalLM")
class Lfm2(Architecture):
    """Short gated convolutions, which keep their last inputs, and full attention on the layers that are listed."""

    tied_by_default = True
    understands: ClassVar[frozenset[str]] = frozenset({"full_attn_idxs", "conv_dim_out"})
    qk_norm: ClassVar[Literal["head"]] = "head"  # pyright: ignore[reportIncompatibleVariableOverride]

    @functools.cached_property
    def is_full(self) -> tuple[bool, ...]:
        """Whether each layer attends: by `layer_types`, or as `full_attn_idxs` lists.

        Raises:
            InputError: a layer of another type, or neither list.
        """
        types = self.listed()
        if types is None:
            full = self.fields.integer_list("full_attn_idxs")
            return tuple(index in full for index in range(self.num_layers))
        unknown = [kind for kind in types if kind not in ("conv", "full_attention")]
        if unknown:
            raise InputError(f"{self.fields.place}: layer_types has {unknown[0]!r}; known are conv and full_attention")
        return tuple(kind == "full_attention" for kind in types)

    @property
    def channels(self) -> int:
        """Channels of a convolution: the hidden size unless given."""
        return self.fields.integer_or("conv_dim", self.hidden_size)

    def caches(self) -> LayerCaches:
        full = self.full_cache()
        conv = ShortConvCache(conv_kernel_size=self.fields.integer("conv_L_cache"), channels=self.channels)
        return tuple((full,) if is_full else (conv,) for is_full in self.is_full)

    def attention(self, index: int) -> Groups:
        if self.is_full[index]:
            return super().attention(index)
        kind, hidden_size, channels = WeightKind.ATTENTION, self.hidden_size, self.channels
        kernel = self.fields.integer("conv_L_cache")
        bias = (4 * channels + hidden_size) * self.fields.flag("conv_bias")
        return (
            column("in_proj", kind, hidden_size, 3 * channels),
            vector("conv", channels * kernel + bias),
            row("out_proj", kind, channels, hidden_size),
        )

    def mlp(self, index: int) -> Groups:
        """A gated MLP; its inner size is two thirds of the one given, rounded up, unless that is switched off."""
        size = self.fields.integer("intermediate_size", "block_ff_dim")
        if self.fields.flag("block_auto_adjust_ff_dim", default=True):
            factor = self.fields.get("block_ffn_dim_multiplier")
            size = int(2 * size / 3)
            if isinstance(factor, int | float) and not isinstance(factor, bool):
                size = int(factor * size)
            size = rounded_up(size, self.fields.integer_or("block_multiple_of", 256))
        return gated_mlp(self.hidden_size, size)


# What a letter of Nemotron-H's pattern says of a layer: it has one part, and only two kinds of parts store.
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"


@architectures.register("NemotronHForCausalLM")
class NemotronH(Architecture):
    """Layers of one part each, by a pattern of letters: Mamba 2, attention, an MLP or experts."""

    norms_per_layer = 1
    understands: ClassVar[frozenset[str]] = frozenset(
        {"mamba_head_dim", "mamba_num_heads", "layers_block_type", "chunk_size"}
    )

    @functools.cached_property
    def pattern(self) -> str:
        """One letter for each layer.

        Raises:
            InputError: no pattern, one of another length, or an unknown letter.
        """
        pattern = self.fields.text("hybrid_override_pattern")
        if pattern is None:
            raise InputError(f"{self.fields.place}: missing hybrid_override_pattern, which nothing else says")
        unknown = sorted(set(pattern) - {_MAMBA, _ATTENTION, _MLP, _EXPERTS})
        if unknown:
            raise InputError(
                f"{self.fields.place}: hybrid_override_pattern has {unknown[0]!r}; known are M (Mamba 2), *"
                " (attention), - (MLP) and E (experts)"
            )
        count = self.fields.integer_or("num_hidden_layers", len(pattern))
        if len(pattern) != count:
            raise InputError(
                f"{self.fields.place}: hybrid_override_pattern has {len(pattern)} letters for {count} layers"
            )
        return pattern

    @property
    def num_layers(self) -> int:
        """Letters of the pattern."""
        return len(self.pattern)

    @property
    def state(self) -> Mamba2Cache:
        """The state of a Mamba layer; its matrices are fp32 unless the config says otherwise."""
        sizes = self.fields.integers("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
        return _mamba2_state(sizes, self.fields.text("mamba_ssm_cache_dtype") or "fp32")

    def caches(self) -> LayerCaches:
        full = self.full_cache()
        if self.fields.has("sliding_window"):
            full = attrs.evolve(full, sliding_window=self.window)
        stored: dict[str, tuple[LayerCache, ...]] = {_ATTENTION: (full,)}
        if _MAMBA in self.pattern:
            stored[_MAMBA] = (self.state,)
        return tuple(stored.get(letter, ()) for letter in self.pattern)

    def layer(self, index: int) -> Groups:
        """The one part of the layer, and its norm."""
        part = {
            _MAMBA: self._mamba,
            _ATTENTION: lambda: self.attention(index),
            _MLP: self._plain_mlp,
            _EXPERTS: self._expert_groups,
        }[self.pattern[index]]
        return (*part(), vector("norm", self.hidden_size))

    def _mamba(self) -> Groups:
        return _mamba2(self.state, self.hidden_size, self.fields.flag("use_conv_bias", default=True))

    def _plain_mlp(self) -> Groups:
        return _ungated(self.hidden_size, self.fields.integer("intermediate_size"), WeightKind.MLP)

    def _expert_groups(self) -> Groups:
        """Experts without a gate, on the hidden state or on a narrower one (`moe_latent_size`), and a shared one."""
        fields, hidden_size = self.fields, self.hidden_size
        num_experts, visited, expert_size = fields.integers(
            "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"
        )
        latent = fields.integer_or("moe_latent_size", None)
        width = latent or hidden_size
        shared = fields.get("n_shared_experts") or 0
        groups: list[WeightGroup] = [
            WeightGroup(
                name=name,
                parameters=num_experts * width * expert_size,
                kind=WeightKind.EXPERT,
                width=visited * expert_size,
            )
            for name in ("experts.up_proj", "experts.down_proj")
        ]
        groups.append(attrs.evolve(vector("router", hidden_size * num_experts), width=visited * hidden_size))
        groups.append(vector("router bias", num_experts))
        if latent is not None:
            kind = WeightKind.MLP
            groups += [whole("latent in", kind, hidden_size, latent), whole("latent out", kind, latent, hidden_size)]
        if shared:
            size = shared * fields.integer("moe_shared_expert_intermediate_size")
            groups += _ungated(hidden_size, size, WeightKind.MLP)
        return tuple(groups)


@architectures.register("FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM")
class Mamba2Hybrid(ByFields):
    """Mamba 2 in the layers that `layer_types` names so; without a list, in every layer beside attention (Falcon H1).

    States have the model's dtype unless the server is told otherwise.
    """

    understands: ClassVar[frozenset[str]] = frozenset({"mamba_d_ssm", "mamba_expand", "mamba_chunk_size"})

    @property
    def state(self) -> Mamba2Cache:
        """The state of a layer with Mamba 2."""
        return _mamba2_state(
            self.fields.integers("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
        )

    @functools.cached_property
    def mixers(self) -> tuple[tuple[bool, bool], ...]:
        """Whether each layer has attention, and whether it has a state."""
        types = self.listed()
        if types is None:
            return ((True, True),) * self.num_layers
        if unknown := set(types) - {"attention", "mamba"}:
            raise InputError(f"{self.fields.place}: layer_types has {min(unknown)!r}; known are attention and mamba")
        return tuple((kind == "attention", kind == "mamba") for kind in types)

    def caches(self) -> LayerCaches:
        full, state = self.full_cache(), self.state
        return tuple(
            (*((full,) if attends else ()), *((state,) if has_state else ())) for attends, has_state in self.mixers
        )

    def attention(self, index: int) -> Groups:
        attends, has_state = self.mixers[index]
        states = _mamba2(self.state, self.hidden_size, self.fields.flag("mamba_conv_bias", default=True))
        return (*(super().attention(index) if attends else ()), *(states if has_state else ()))


@architectures.register("JambaForCausalLM")
class Jamba(ByFields):
    """Mamba 1, and attention in one layer of `attn_layer_period`; experts in one of `expert_layer_period`."""

    understands: ClassVar[frozenset[str]] = frozenset({"mamba_dt_rank", "mamba_expand", "sliding_window"})

    def attends(self, index: int) -> bool:
        """Whether a layer has attention instead of a state."""
        period, offset = self.fields.integer("attn_layer_period"), self.fields.get("attn_layer_offset") or 0
        return index % period == offset

    @property
    def width(self) -> int:
        """Channels of a Mamba layer."""
        return self.fields.integer_or("mamba_expand", 2) * self.hidden_size

    def caches(self) -> LayerCaches:
        full = self.full_cache()
        state = _mamba1_state(self.width, *self.fields.integers("mamba_d_state", "mamba_d_conv"))
        return tuple((full,) if self.attends(index) else (state,) for index in range(self.num_layers))

    def attention(self, index: int) -> Groups:
        if self.attends(index):
            return super().attention(index)
        state = _mamba1_state(self.width, *self.fields.integers("mamba_d_state", "mamba_d_conv"))
        return _mamba1(state, self.hidden_size, self.fields.integer_or("mamba_dt_rank", -(-self.hidden_size // 16)))

    def mlp(self, index: int) -> Groups:
        period, offset = self.fields.integer_or("expert_layer_period", 1), self.fields.get("expert_layer_offset") or 0
        if index % period == offset and self.fields.integer_or("num_experts", 1) > 1:
            return super().mlp(index)
        return gated_mlp(self.hidden_size, self.fields.integer("intermediate_size"))


@architectures.register("MambaForCausalLM", "FalconMambaForCausalLM")
class Mamba(Architecture):
    """Mamba 1 in every layer, and nothing else."""

    tied_by_default = True

    @property
    def state(self) -> Mamba2Cache:
        """The state of a layer."""
        return _mamba1_state(*self.fields.integers("intermediate_size", "state_size", "conv_kernel"))

    def caches(self) -> LayerCaches:
        return ((self.state,),) * self.num_layers

    def layer(self, index: int) -> Groups:
        rank = self.fields.integer("time_step_rank")
        return (*_mamba1(self.state, self.hidden_size, rank), vector("norm", self.hidden_size))


@architectures.register("Mamba2ForCausalLM")
class Mamba2(Mamba):
    """Mamba 2 in every layer, and nothing else."""

    understands: ClassVar[frozenset[str]] = frozenset({"chunk_size"})

    @property
    def state(self) -> Mamba2Cache:
        return _mamba2_state(self.fields.integers("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"))

    def layer(self, index: int) -> Groups:
        conv_bias = self.fields.flag("use_conv_bias", default=True)
        return (*_mamba2(self.state, self.hidden_size, conv_bias), vector("norm", self.hidden_size))


def _mamba1_state(width: int, state_size: int, kernel: int) -> Mamba2Cache:
    """Mamba 1 has a vector of the state's size for each channel, which is Mamba 2 with heads of one element."""
    return _mamba2_state((width, 1, 0, state_size, kernel))


def _mamba2_state(sizes: Iterable[int], recurrent_dtype: str = "bf16") -> Mamba2Cache:
    """The state of heads, of a head's width, of groups, of a group's state and of the convolution, in this order."""
    num_heads, head_dim, num_groups, state_size, conv_kernel_size = sizes
    return Mamba2Cache(
        conv_kernel_size=conv_kernel_size,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=state_size,
        recurrent_dtype=recurrent_dtype,
    )


def _mamba1(state: Mamba2Cache, hidden_size: int, rank: int) -> Groups:
    width, kind = state.num_heads, WeightKind.ATTENTION
    return (
        column("in_proj", kind, hidden_size, 2 * width),
        vector("conv1d, decays and skips", width * (state.conv_kernel_size + state.state_size + 3)),
        row("x_proj", kind, width, rank + 2 * state.state_size),
        column("dt_proj", kind, rank, width),
        row("out_proj", kind, width, hidden_size),
    )


def _mamba2(state: Mamba2Cache, hidden_size: int, conv_bias: bool) -> Groups:
    kind, width = WeightKind.ATTENTION, state.num_heads * state.head_dim
    biases = state.conv_channels * conv_bias
    return (
        column("in_proj", kind, hidden_size, width + state.conv_channels + state.num_heads),
        vector("conv1d", state.conv_channels * state.conv_kernel_size + biases),
        vector("decays, skips, biases and norm", 3 * state.num_heads + width),
        row("out_proj", kind, width, hidden_size),
    )


def _ungated(hidden_size: int, intermediate_size: int, kind: WeightKind) -> Groups:
    return (
        column("up_proj", kind, hidden_size, intermediate_size),
        row("down_proj", kind, intermediate_size, hidden_size),
    )
