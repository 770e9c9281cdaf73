"""Dense decoders: Llama, Mistral, Qwen 2 and 3, Phi, GPT-2, OPT, Gemma 2, 3 and 4, Command, DeciLM."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import attrs

from ..errors import InputError
from . import weights
from .architecture import Architecture, architectures
from .config_fields import ConfigFields
from .layer_cache import AttentionCache, LayerCaches
from .weights import Groups, Heads, WeightGroup, WeightKind


@architectures.register("LlamaForCausalLM")
class Llama(Architecture):
    """Full attention, with biases where `attention_bias` is true, and a gated MLP; listed layers may slide."""

    biases = "attention_bias"

    def layer_types(self) -> Sequence[str]:
        return self.listed_or(lambda index: "full_attention")


@architectures.register("MistralForCausalLM", "Phi3ForCausalLM")
class Mistral(Llama):
    """Llama whose layers all slide where the config gives a window (Mistral 7B v0.1, Phi 3)."""

    def layer_types(self) -> Sequence[str]:
        default = "sliding_attention" if self.fields.has("sliding_window") else "full_attention"
        return self.listed_or(lambda index: default)


@architectures.register("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
class Qwen2(Architecture):
    """Biases on query, key and value; windows only where `use_sliding_window` is true."""

    biases = "qkv"
    understands: ClassVar[frozenset[str]] = frozenset({"sliding_window", "max_window_layers"})

    def layer_types(self) -> Sequence[str]:
        """Layers from `max_window_layers` on slide."""
        if not self.fields.flag("use_sliding_window"):
            return self.listed_or(lambda index: "full_attention")
        first_sliding = self.fields.integer("max_window_layers")
        return self.listed_or(lambda index: "sliding_attention" if index >= first_sliding else "full_attention")


@architectures.register("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration")
class Qwen3(Qwen2):
    """Norms on each head's queries and keys instead of biases."""

    class_defaults: ClassVar = {"head_dim": 128}
    biases = "attention_bias"
    qk_norm = "head"


@architectures.register("Gemma2ForCausalLM")
class Gemma2(Architecture):
    """Every second layer is full, the others slide; four norms a layer."""

    class_defaults: ClassVar = {"head_dim": 256, "sliding_window": 4096}
    understands: ClassVar[frozenset[str]] = frozenset({"sliding_window_pattern"})
    tied_by_default = True
    norms_per_layer = 4
    full_every = 2


@architectures.register("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
class Gemma3(Gemma2):
    """Every sixth layer is full; norms on each head's queries and keys."""

    class_defaults: ClassVar = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    }
    full_every = 6
    qk_norm = "head"


@architectures.register("CohereForCausalLM")
class Cohere(Architecture):
    """One norm a layer, since attention and MLP read the same input; `use_qk_norm` adds those of queries and keys."""

    tied_by_default = True
    norms_per_layer = 1
    biases = "attention_bias"

    @property
    def qk_norm(self) -> Literal["heads"] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "heads" if self.fields.flag("use_qk_norm") else None


@architectures.register("Cohere2ForCausalLM")
class Cohere2(Cohere):
    """Every fourth layer is full, the others slide."""

    full_every = 4
    understands: ClassVar[frozenset[str]] = frozenset({"sliding_window_pattern"})


@architectures.register("PhiForCausalLM")
class Phi(Architecture):
    """Phi 1 and 2: biases everywhere, one layer norm (weight and bias) a layer, a bias on the output matrix."""

    final_norms = 2
    biases = "all"

    def mlp(self, index: int) -> Groups:
        return weights.plain_mlp(*self.fields.integers("hidden_size", "intermediate_size"))

    def more_head(self) -> Groups:
        return (weights.vector("lm_head bias", self.fields.integer("vocab_size")),)


@architectures.register("GPT2LMHeadModel")
class GPT2(Architecture):
    """Learned positions, biases everywhere, two layer norms (weight and bias) a layer."""

    tied_by_default = True
    norms_per_layer = 4
    final_norms = 2
    biases = "all"

    def mlp(self, index: int) -> Groups:
        """Two matrices with biases; the inner size is four hidden sizes unless given."""
        return weights.plain_mlp(self.hidden_size, self.fields.integer_or("n_inner", 4 * self.hidden_size))

    def more_embeddings(self) -> Groups:
        positions = self.fields.integer("max_position_embeddings", "n_positions")
        return (weights.embedding("embed_positions", positions, self.hidden_size),)


@architectures.register("OPTForCausalLM")
class OPT(GPT2):
    """OPT keeps two more positions than its longest sequence; sizes with an embedding projection are refused."""

    def mlp(self, index: int) -> Groups:
        hidden_size, ffn_dim = self.fields.integers("hidden_size", "ffn_dim")
        projected = self.fields.integer_or("word_embed_proj_dim", hidden_size)
        if projected != hidden_size:
            raise InputError(
                f"{self.fields.place}: word_embed_proj_dim {projected} differs from hidden_size {hidden_size}; the"
                " parameters of OPT models with an embedding projection are not known here"
            )
        return weights.plain_mlp(hidden_size, ffn_dim)

    def more_embeddings(self) -> Groups:
        positions = self.fields.integer("max_position_embeddings") + 2
        return (weights.embedding("embed_positions", positions, self.hidden_size),)


@architectures.register("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
class Gemma4(Architecture):
    """Full and sliding layers with different head sizes, layers that share an earlier cache, per-layer embeddings."""

    class_defaults: ClassVar = {"head_dim": 256, "global_head_dim": 512}
    understands: ClassVar[frozenset[str]] = frozenset({"sliding_window_pattern", "num_global_key_value_heads"})
    encoders = "vision and audio encoders"
    tied_by_default = True
    norms_per_layer = 4

    @functools.cached_property
    def types(self) -> tuple[str, ...]:
        """One full layer in `sliding_window_pattern` unless listed; the last layer is always full."""
        return (*self.every_nth_full("sliding_window_pattern", 6)[:-1], "full_attention")

    @functools.cached_property
    def full_heads(self) -> Heads:
        """Full layers have larger heads, and fewer KV heads where keys double as values."""
        heads = self.heads
        size = self.fields.integer_or("global_head_dim", heads.head_size)
        num_kv_heads = heads.num_kv_heads
        if self.fields.flag("attention_k_eq_v"):
            num_kv_heads = self.fields.integer_or("num_global_key_value_heads", num_kv_heads)
        return attrs.evolve(heads, num_kv_heads=num_kv_heads, head_size=size, head_size_v=size)

    @property
    def num_stored(self) -> int:
        """Layers that store a cache: the last `num_kv_shared_layers` read an earlier layer's."""
        shared = self.fields.get("num_kv_shared_layers") or 0
        return self.num_layers - (self.fields.integer("num_kv_shared_layers") if shared else 0)

    @property
    def per_layer_size(self) -> int:
        """Width of each layer's own embedding; 0 without such embeddings."""
        return self.fields.get("hidden_size_per_layer_input") or 0

    def caches(self) -> LayerCaches:
        sliding, full = self.heads, self.full_heads
        sliding_cache = AttentionCache(
            num_kv_heads=sliding.num_kv_heads, head_size=sliding.head_size, sliding_window=self.window
        )
        full_cache = AttentionCache(num_kv_heads=full.num_kv_heads, head_size=full.head_size)
        stored = self.num_stored
        return tuple(
            () if index >= stored else (full_cache,) if kind == "full_attention" else (sliding_cache,)
            for index, kind in enumerate(self.types)
        )

    def attention(self, index: int) -> Groups:
        """Projections with norms; layers that share a cache have neither keys nor values of their own."""
        is_full = self.types[index] == "full_attention"
        heads = self.full_heads if is_full else self.heads
        shared = index >= self.num_stored
        return weights.attention_projections(
            self.hidden_size,
            attrs.evolve(heads, head_size_v=heads.head_size),
            qk_norm=heads.head_size if shared else 2 * heads.head_size,
            shared_kv=shared,
            value_is_key=is_full and self.fields.flag("attention_k_eq_v"),
        )

    def mlp(self, index: int) -> Groups:
        """A gated MLP, twice as wide in sharing layers under `use_double_wide_mlp`; experts beside it if enabled."""
        hidden_size, intermediate_size = self.fields.integers("hidden_size", "intermediate_size")
        is_wide = self.fields.flag("use_double_wide_mlp") and index >= self.num_stored
        dense = weights.gated_mlp(hidden_size, intermediate_size * (2 if is_wide else 1))
        if not self.fields.flag("enable_moe_block"):
            return dense
        expert_size, num_experts, visited = self.fields.integers(
            "moe_intermediate_size", "num_experts", "top_k_experts"
        )
        # Three of a layer's seven norms belong to the experts.
        norms = weights.vector("router scales and expert norms", hidden_size + num_experts + 3 * hidden_size)
        return (*dense, *weights.experts(hidden_size, expert_size, num_experts, visited), norms)

    def layer(self, index: int) -> Groups:
        """The layer, with a gate and a projection where it has embeddings of its own."""
        size, hidden_size = self.per_layer_size, self.hidden_size
        if not size:
            return super().layer(index)
        return (
            *super().layer(index),
            weights.whole("per_layer_input_gate", WeightKind.MLP, hidden_size, size),
            weights.whole("per_layer_projection", WeightKind.MLP, size, hidden_size),
            weights.vector("per-layer norm", hidden_size),
        )

    def more_embeddings(self) -> Groups:
        """The per-layer embeddings of all layers, with the projection of the hidden state that is added to them."""
        size, width = self.per_layer_size, self.num_layers * self.per_layer_size
        if not size:
            return ()
        vocab_size = self.fields.integer_or("vocab_size_per_layer_input", self.fields.integer("vocab_size"))
        return (
            weights.embedding("embed_tokens_per_layer", vocab_size, width),
            weights.whole("per_layer_model_projection", WeightKind.MLP, self.hidden_size, width),
            weights.vector("per-layer projection norm", size),
        )


@architectures.register("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration")
class Gemma3n(Gemma3):
    """Full and sliding layers of equal heads; the last `num_kv_shared_layers` read an earlier layer's cache."""

    class_defaults: ClassVar = {"head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512}
    encoders = "vision and audio encoders"
    full_every = 5

    def caches(self) -> LayerCaches:
        stored = self.num_layers - self.fields.integer_or("num_kv_shared_layers", 0)
        return tuple(caches if index < stored else () for index, caches in enumerate(super().caches()))

    def weights(self) -> weights.ModelWeights:
        """Refuse: the parameters of its laurels and per-layer embeddings are not known here."""
        raise InputError(f"{self.fields.place}: the parameters of Gemma 3n are not known here")


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
                groups.append(weights.whole("linear_attn", WeightKind.ATTENTION, hidden_size, hidden_size))
        else:
            heads: Heads = attrs.evolve(self.heads, num_kv_heads=self._kv_heads(attention))
            groups += weights.attention_projections(hidden_size, heads)
        if not ffn.flag("no_op"):
            if ffn.flag("replace_with_linear"):
                groups.append(weights.whole("linear_mlp", WeightKind.MLP, hidden_size, hidden_size))
            else:
                groups += weights.gated_mlp(hidden_size, self._inner_size(ffn))
        norms = (not attention.flag("no_op")) + (not ffn.flag("no_op"))
        return (*groups, weights.vector("norms", norms * hidden_size))

    def _inner_size(self, ffn: ConfigFields) -> int:
        factor: Any = ffn.get("ffn_mult")
        if factor is None:
            return ffn.integer("intermediate_size")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
            raise InputError(f"{ffn.place}: ffn_mult is {factor!r}; expected a number above 0")
        return weights.rounded_up(int(2 * factor * self.hidden_size / 3), 256)


def _is_left_out(attention: ConfigFields) -> bool:
    return attention.flag("no_op") or attention.flag("replace_with_linear")
