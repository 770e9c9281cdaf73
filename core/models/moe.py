"""Mixture-of-experts decoders with ordinary keys and values: Mixtral, Qwen 3 MoE, gpt-oss, MiniMax, MiMo, Llama 4."""

import functools
from collections.abc import Sequence
from typing import ClassVar

import attrs

from ..errors import InputError
from .architecture import Architecture, ByFields, architectures
from .layer_cache import AttentionCache, CachePart, LatentCache, LayerCache, LayerCaches
from .weights import Groups, Heads, WeightKind, attention_projections, experts, gated_mlp, vector, whole


@architectures.register("MixtralForCausalLM")
class Mixtral(Architecture):
    """Full attention; every layer routes to experts."""

    def mlp(self, index: int) -> Groups:
        sizes = ("hidden_size", "intermediate_size", "num_local_experts", "num_experts_per_tok")
        return experts(*self.fields.integers(*sizes))


@architectures.register("MiniMaxM2ForCausalLM")
class MiniMaxM2(Mixtral):
    """Query and key norms over all heads together."""

    class_defaults: ClassVar = {"head_dim": 128}
    qk_norm = "heads"

    def caches(self) -> LayerCaches:
        """Full attention everywhere.

        Raises:
            InputError: `attn_type_list` has a layer that is not full (MiniMax 01 and M1 have lightning attention).
        """
        if self.fields.has("attn_type_list"):
            types = self.fields.integer_list("attn_type_list")
            other = [index for index, kind in enumerate(types[: self.num_layers]) if kind != 1]
            if other:
                raise InputError(
                    f"{self.fields.place}: attn_type_list[{other[0]}] is {types[other[0]]}; only 1 is known"
                )
        return super().caches()


@architectures.register("Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration")
class Qwen3Moe(Architecture):
    """Norms on each head's queries and keys; `mlp_only_layers`, `decoder_sparse_step` choose dense layers."""

    understands: ClassVar[frozenset[str]] = frozenset({"max_window_layers"})

    biases = "attention_bias"
    qk_norm = "head"

    def mlp(self, index: int) -> Groups:
        fields = self.fields
        hidden_size, dense_size, expert_size, visited = fields.integers(
            "hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok"
        )
        num_experts = fields.integer("num_experts", "num_local_experts")
        dense_layers = fields.integer_list("mlp_only_layers") if fields.has("mlp_only_layers") else ()
        if index in dense_layers or (index + 1) % fields.integer_or("decoder_sparse_step", 1):
            return gated_mlp(hidden_size, dense_size)
        return experts(hidden_size, expert_size, num_experts, visited)


@architectures.register("GptOssForCausalLM")
class GptOss(Architecture):
    """Every second layer slides; attention sinks; biases on every projection, on the router and on every expert."""

    class_defaults: ClassVar = {"head_dim": 64}
    biases = "all"

    def layer_types(self) -> Sequence[str]:
        return self.listed_or(lambda index: "full_attention" if index % 2 else "sliding_attention")

    def attention(self, index: int) -> Groups:
        return (*super().attention(index), vector("attention sinks", self.heads.num_heads))

    def mlp(self, index: int) -> Groups:
        hidden_size, expert_size, num_experts = self.fields.integers(
            "hidden_size", "intermediate_size", "num_local_experts"
        )
        visited = self.fields.integer("num_experts_per_tok", "experts_per_token")
        biases = vector("router and expert biases", num_experts + num_experts * (2 * expert_size + hidden_size))
        return (*experts(hidden_size, expert_size, num_experts, visited), biases)


@architectures.register("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")
class MiMo(Architecture):
    """Full and sliding layers that may differ in heads and in both head sizes; dense and sparse layers as listed."""

    understands: ClassVar[frozenset[str]] = frozenset(
        {"swa_num_attention_heads", "hybrid_layer_pattern", "sliding_window_size", "attention_chunk_size"}
    )

    @functools.cached_property
    def slides(self) -> tuple[bool, ...]:
        """Whether each layer slides."""
        types = self.listed()
        if types is not None:
            return tuple(kind == "sliding_attention" for kind in types)
        pattern = self.fields.integer_list("hybrid_layer_pattern")
        if len(pattern) < self.num_layers:
            raise InputError(
                f"{self.fields.place}: hybrid_layer_pattern has {len(pattern)} entries for {self.num_layers} layers"
            )
        return tuple(bool(item) for item in pattern[: self.num_layers])

    def sliding_cache(self) -> AttentionCache:
        """Keys and values of the last tokens."""
        heads = self.heads
        return AttentionCache(
            num_kv_heads=self.fields.integer("swa_num_key_value_heads"),
            head_size=self.fields.integer_or("swa_head_dim", heads.head_size),
            head_size_v=self.fields.integer_or("swa_v_head_dim", heads.head_size_v),
            sliding_window=self.window,
        )

    def caches(self) -> LayerCaches:
        full, sliding = self.full_cache(), self.sliding_cache()
        return tuple((sliding,) if slides else (full,) for slides in self.slides)

    def attention(self, index: int) -> Groups:
        slides, num_heads = self.slides[index], self.heads.num_heads
        cache = self.sliding_cache() if slides else self.full_cache()
        heads = self.fields.integer_or("swa_num_attention_heads", num_heads) if slides else num_heads
        shape = Heads(
            num_heads=heads, num_kv_heads=cache.num_kv_heads, head_size=cache.head_size, head_size_v=cache.head_size_v
        )
        projections = attention_projections(self.hidden_size, shape)
        return (*projections, vector("attention sinks", heads)) if slides else projections

    def mlp(self, index: int) -> Groups:
        hidden_size, dense_size, expert_size, num_experts, visited = self.fields.integers(
            "hidden_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"
        )
        if self.routes()[index]:
            return experts(hidden_size, expert_size, num_experts, visited)
        return gated_mlp(hidden_size, dense_size)


@architectures.register("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
class Step3p5(ByFields):
    """Full and sliding layers; those of `attention_other_setting` have heads of their own."""

    biases = "attention_bias"
    qk_norm = "head"

    @functools.cached_property
    def others(self) -> tuple[str, Heads] | None:
        """The type of the layers with other heads, and their heads; None: there are none."""
        section = self.fields.section("attention_other_setting")
        if section is None:
            return None
        num_heads, num_kv_heads, head_size = section.integers("num_attention_heads", "num_attention_groups", "head_dim")
        heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, head_size_v=head_size)
        return str(section.get("attention_type")), heads

    def layer_types(self) -> Sequence[str]:
        """As listed; every second one slides where nothing is."""
        return self.listed_or(lambda index: "full_attention" if index % 2 else "sliding_attention")

    def caches(self) -> LayerCaches:
        caches = super().caches()
        if self.others is None:
            return caches
        kind, heads = self.others
        shape = {name: getattr(heads, name) for name in ("num_kv_heads", "head_size", "head_size_v")}
        return tuple(
            tuple(attrs.evolve(cache, **shape) for cache in layer) if of_layer == kind else layer
            for layer, of_layer in zip(caches, self.layer_types(), strict=True)
        )


@architectures.register("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")
class MiniMaxM3(Architecture):
    """Ordinary keys and values, and on sparse layers an indexer's keys, in bf16 whatever the cache dtype."""

    qk_norm = "head"

    @functools.cached_property
    def has_indexer(self) -> tuple[bool, ...]:
        """Whether each layer has an indexer: by layer type, or by the checkpoint's 0/1 list."""
        types = self.listed()
        if types is not None:
            return tuple(kind != "full_attention" for kind in types)
        section = self.fields.section("sparse_attention_config")
        if section is None:
            raise InputError(
                f"{self.fields.place}: missing layer_types or sparse_attention_config.sparse_attention_freq"
            )
        return tuple(bool(item) for item in section.integer_list("sparse_attention_freq")[: self.num_layers])

    @property
    def indexer_shape(self) -> tuple[int, int]:
        """Heads and head size of the indexer."""
        section = self.fields.section("sparse_attention_config")
        if section is not None and section.has("sparse_index_dim"):
            return section.integer("sparse_num_index_heads"), section.integer("sparse_index_dim")
        return self.fields.integer("index_n_heads"), self.fields.integer("index_head_dim")

    def caches(self) -> LayerCaches:
        kv = AttentionCache(num_kv_heads=self.heads.num_kv_heads, head_size=self.heads.head_size)
        indexer = LatentCache(part=CachePart.INDEXER, head_size=self.indexer_shape[1], fixed_dtype="bf16")
        dense_layer: tuple[LayerCache, ...] = (kv,)
        return tuple((kv, indexer) if sparse else dense_layer for sparse in self.has_indexer)

    def attention(self, index: int) -> Groups:
        projections = super().attention(index)
        if not self.has_indexer[index]:
            return projections
        index_heads, index_size = self.indexer_shape
        return (
            *projections,
            whole("indexer", WeightKind.ATTENTION, self.hidden_size, (index_heads + 1) * index_size),
            vector("indexer norms", 2 * index_size),
        )

    def mlp(self, index: int) -> Groups:
        hidden_size, expert_size, num_experts, visited, dense_size, shared_size = self.fields.integers(
            "hidden_size",
            "intermediate_size",
            "num_local_experts",
            "num_experts_per_tok",
            "dense_intermediate_size",
            "shared_intermediate_size",
        )
        if not self.routes()[index]:
            return gated_mlp(hidden_size, dense_size)
        return (*experts(hidden_size, expert_size, num_experts, visited), *gated_mlp(hidden_size, shared_size))


@architectures.register("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
class Llama4(Architecture):
    """Chunked attention in layers with rotary positions; layers that route also have a shared expert."""

    hybrid_manager = False
    understands: ClassVar[frozenset[str]] = frozenset({"layer_types"})

    def layer_types(self) -> Sequence[str]:
        """Layers with rotary positions attend in chunks; the others (every fourth by default) to everything."""
        fields = self.fields
        if not fields.has("attention_chunk_size"):
            return super().layer_types()
        if fields.get("no_rope_layers"):
            uses_rope = fields.integer_list("no_rope_layers")
            return tuple("chunked_attention" if rope else "full_attention" for rope in uses_rope[: self.num_layers])
        interval = fields.integer_or("no_rope_layer_interval", 4)
        return self.listed_or(lambda index: "chunked_attention" if (index + 1) % interval else "full_attention")

    def caches(self) -> LayerCaches:
        full = AttentionCache(num_kv_heads=self.heads.num_kv_heads, head_size=self.heads.head_size)
        chunked = attrs.evolve(full, attention_chunk_size=self.fields.integer_or("attention_chunk_size", None))
        return tuple((chunked,) if kind == "chunked_attention" else (full,) for kind in self.layer_types())

    def mlp(self, index: int) -> Groups:
        """Every `interleave_moe_layer_step`-th layer routes, unless `moe_layers` lists them."""
        fields = self.fields
        hidden_size, expert_size, dense_size, num_experts, visited = fields.integers(
            "hidden_size", "intermediate_size", "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok"
        )
        if fields.get("moe_layers"):
            routes = index in fields.integer_list("moe_layers")
        else:
            routes = (index + 1) % fields.integer_or("interleave_moe_layer_step", 1) == 0
        if not routes:
            return gated_mlp(hidden_size, dense_size)
        return (*experts(hidden_size, expert_size, num_experts, visited), *gated_mlp(hidden_size, expert_size))
