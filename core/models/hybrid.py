"""Attention beside short convolutions or Mamba 2: LFM2 and Nemotron-H; and layers searched one by one: DeciLM."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import attrs

from ..errors import InputError
from .architecture import Architecture, architectures
from .config_fields import ConfigFields
from .layer_cache import AttentionCache, LayerCache, LayerCaches, Mamba2Cache, ShortConvCache
from .weights import (
    Groups,
    Heads,
    WeightGroup,
    WeightKind,
    attention_projections,
    column,
    gated_mlp,
    row,
    vector,
    whole,
)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@architectures.register("Lfm2ForCausalLM")
class Lfm2(Architecture):
    """Short gated convolutions, which keep their last inputs, and full attention on the layers that are listed."""

    tied_by_default = True
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
            size = _rounded_up(size, self.fields.integer_or("block_multiple_of", 256))
        return gated_mlp(self.hidden_size, size)


# What a letter of Nemotron-H's pattern says of a layer: it has one part, and only two kinds of parts store.
_MAMBA, _ATTENTION, _MLP, _EXPERTS = "M", "*", "-", "E"


@architectures.register("NemotronHForCausalLM")
class NemotronH(Architecture):
    """Layers of one part each, by a pattern of letters: Mamba 2, attention, an MLP or experts."""

    norms_per_layer = 1
    understands: ClassVar[frozenset[str]] = frozenset({"mamba_head_dim", "mamba_num_heads", "layers_block_type"})

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
        num_heads, head_dim, state_size, kernel, groups = self.fields.integers(
            "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel", "n_groups"
        )
        return Mamba2Cache(
            conv_kernel_size=kernel,
            num_heads=num_heads,
            head_dim=head_dim,
            num_groups=groups,
            state_size=state_size,
            recurrent_dtype=self.fields.text("mamba_ssm_cache_dtype") or "fp32",
        )

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
        state, hidden_size, kind = self.state, self.hidden_size, WeightKind.ATTENTION
        width = state.num_heads * state.head_dim
        conv_bias = state.conv_channels * self.fields.flag("use_conv_bias", default=True)
        return (
            column("in_proj", kind, hidden_size, width + state.conv_channels + state.num_heads),
            vector("conv1d", state.conv_channels * state.conv_kernel_size + conv_bias),
            vector("decays, skips, biases and norm", 3 * state.num_heads + width),
            row("out_proj", kind, width, hidden_size),
        )

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


def _ungated(hidden_size: int, intermediate_size: int, kind: WeightKind) -> Groups:
    return (
        column("up_proj", kind, hidden_size, intermediate_size),
        row("down_proj", kind, intermediate_size, hidden_size),
    )


@architectures.register("DeciLMForCausalLM")
class DeciLM(Architecture):
    """Llama whose layers were searched one by one: each has its own KV heads and inner size, or lacks a part."""

    biases = "attention_bias"

    def blocks(self) -> Sequence[tuple[ConfigFields, ConfigFields]]:
        """The attention and the MLP of each layer.

        Raises:
            InputError: `block_configs` does not describe every layer.
        """
        fields = self.fields
        blocks = fields.items("block_configs")
        if len(blocks) != self.num_layers:
            raise InputError(f"{fields.place}: block_configs has {len(blocks)} entries for {self.num_layers} layers")
        found: list[tuple[ConfigFields, ConfigFields]] = []
        for index, block in enumerate(blocks):
            part = ConfigFields({"block": block}, f"{fields.place}: block_configs[{index}]").section("block")
            attention, ffn = (None, None) if part is None else (part.section("attention"), part.section("ffn"))
            if attention is None or ffn is None:
                raise InputError(f"{fields.place}: block_configs[{index}] has no attention and ffn")
            found.append((attention, ffn))
        return found

    def caches(self) -> LayerCaches:
        """Keys and values where there is attention.

        Raises:
            InputError: KV heads that do not divide the heads, or a window or a sparse pattern in a layer.
        """
        if not self.fields.has("block_configs"):  # DeciLM 7B lists KV heads alone
            heads = self.fields.integer_list("num_key_value_heads_per_layer")
            return tuple((self._cache(count),) for count in heads[: self.num_layers])
        return tuple(
            () if _is_left_out(attention) else (self._cache(self._kv_heads(attention)),)
            for attention, _ in self.blocks()
        )

    def _cache(self, num_kv_heads: int) -> AttentionCache:
        return AttentionCache(num_kv_heads=num_kv_heads, head_size=self.heads.head_size)

    def _kv_heads(self, attention: ConfigFields) -> int:
        for name in ("window_length", "sparsify"):
            if attention.get(name):
                raise InputError(f"{attention.place}: {name} {attention.get(name)!r}: what it keeps is not known here")
        in_group = attention.integer("n_heads_in_group")
        if self.heads.num_heads % in_group:
            raise InputError(
                f"{attention.place}: n_heads_in_group {in_group} does not divide {self.heads.num_heads} heads"
            )
        return self.heads.num_heads // in_group

    def layer(self, index: int) -> Groups:
        """Attention or one matrix instead of it, and the MLP; a part that is left out has no norm either."""
        if not self.fields.has("block_configs"):
            raise InputError(f"{self.fields.place}: missing block_configs, which says how wide each layer's MLP is")
        hidden_size, (attention, ffn) = self.hidden_size, self.blocks()[index]
        groups: list[WeightGroup] = []
        if _is_left_out(attention):
            if attention.flag("replace_with_linear"):
                groups.append(whole("linear_attn", WeightKind.ATTENTION, hidden_size, hidden_size))
        else:
            heads: Heads = attrs.evolve(self.heads, num_kv_heads=self._kv_heads(attention))
            groups += attention_projections(hidden_size, heads)
        if not ffn.flag("no_op"):
            if ffn.flag("replace_with_linear"):
                groups.append(whole("linear_mlp", WeightKind.MLP, hidden_size, hidden_size))
            else:
                groups += gated_mlp(hidden_size, self._inner_size(ffn))
        norms = (not attention.flag("no_op")) + (not ffn.flag("no_op"))
        return (*groups, vector("norms", norms * hidden_size))

    def _inner_size(self, ffn: ConfigFields) -> int:
        factor: Any = ffn.get("ffn_mult")
        if factor is None:
            return ffn.integer("intermediate_size")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
            raise InputError(f"{ffn.place}: ffn_mult is {factor!r}; expected a number above 0")
        return _rounded_up(int(2 * factor * self.hidden_size / 3), 256)


def _is_left_out(attention: ConfigFields) -> bool:
    return attention.flag("no_op") or attention.flag("replace_with_linear")
