"""Latent attention: DeepSeek V2, V3, V3.2 and V4, Kimi K2, GLM-5. One latent vector a token serves all heads."""

import functools
from typing import ClassVar

from ..errors import InputError
from ..planner.cache_dtype import PackedLatent, ScaleStorage
from .architecture import Architecture, architectures
from .config_fields import ConfigFields
from .layer_cache import (
    CachePart,
    CompressedCache,
    CompressorCache,
    LatentCache,
    LayerCache,
    LayerCaches,
    WindowBufferCache,
)
from .weights import Groups, ModelWeights, WeightGroup, WeightKind, column, experts, gated_mlp, row, vector, whole

INDEXER_KEY_SCALES = ScaleStorage(4, 128)  # one fp32 scale for every 128 elements


def indexer_cache(head_size: int) -> LatentCache:
    """The keys of a sparse attention's indexer: fp8 with fp32 scales, whatever the cache dtype (field report A18)."""
    return LatentCache(
        part=CachePart.INDEXER, head_size=head_size, fixed_dtype="fp8_e4m3", fixed_scales=INDEXER_KEY_SCALES
    )


def latent_cache(fields: ConfigFields) -> LatentCache:
    """One latent: the compressed part and the rotary part."""
    return LatentCache(head_size=sum(fields.integers("kv_lora_rank", "qk_rope_head_dim")))


@architectures.register(
    "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK2ForCausalLM", "KimiK25ForConditionalGeneration"
)
class MLA(Architecture):
    """A latent in every layer; dense layers first, the others route to experts."""

    def caches(self) -> LayerCaches:
        return ((latent_cache(self.fields),),) * self.num_layers

    def attention(self, index: int) -> Groups:
        """Down and up projections of queries and of the latent, and the output projection."""
        fields = self.fields
        hidden_size, num_heads, kv_lora_rank, nope, rope, value_size = fields.integers(
            "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
        )
        kind = WeightKind.ATTENTION
        query_width = num_heads * (nope + rope)
        q_lora_rank = fields.integer_or("q_lora_rank", None)
        if q_lora_rank is None:
            queries: Groups = (column("q_proj", kind, hidden_size, query_width),)
        else:
            queries = (
                whole("q_a_proj", kind, hidden_size, q_lora_rank),
                vector("q_a norm", q_lora_rank),
                column("q_b_proj", kind, q_lora_rank, query_width),
            )
        bias = (q_lora_rank or 0) + kv_lora_rank + rope + hidden_size
        return (
            *queries,
            whole("kv_a_proj", kind, hidden_size, kv_lora_rank + rope),
            vector("kv_a norm", kv_lora_rank),
            column("kv_b_proj", kind, kv_lora_rank, num_heads * (nope + value_size)),
            row("o_proj", kind, num_heads * value_size, hidden_size),
            *((vector("attention biases", bias),) if fields.flag("attention_bias") else ()),
        )

    def mlp(self, index: int) -> Groups:
        hidden_size, dense_size = self.fields.integers("hidden_size", "intermediate_size")
        counts = ("n_routed_experts", "num_local_experts", "num_experts")
        routes = any(self.fields.has(name) for name in counts) and self.routes()[index]
        return self.expert_groups() if routes else gated_mlp(hidden_size, dense_size)

    def expert_groups(self) -> Groups:
        """Routed and shared experts of one layer."""
        fields = self.fields
        hidden_size, expert_size = fields.integers("hidden_size", "moe_intermediate_size")
        visited = fields.integer("num_experts_per_tok", "num_experts_per_token")
        num_experts = fields.integer("n_routed_experts", "num_local_experts", "num_experts")
        shared = fields.get("n_shared_experts") or fields.get("num_shared_experts") or 0
        if not isinstance(shared, int) or shared < 0:
            raise InputError(f"{fields.place}: n_shared_experts is {shared!r}; expected a whole number of at least 0")
        routed = experts(hidden_size, expert_size, num_experts, visited)
        return (*routed, *gated_mlp(hidden_size, shared * expert_size)) if shared else routed


@architectures.register("LongcatFlashForCausalLM")
class LongcatFlash(MLA):
    """Two latent attentions and two dense MLPs in every layer, and experts beside them."""

    def caches(self) -> LayerCaches:
        return (((latent_cache(self.fields),) * 2),) * self.num_layers

    def attention(self, index: int) -> Groups:
        return super().attention(index) * 2

    def mlp(self, index: int) -> Groups:
        hidden_size, dense_size, expert_size, num_experts, visited = self.fields.integers(
            "hidden_size", "ffn_hidden_size", "expert_ffn_hidden_size", "n_routed_experts", "moe_topk"
        )
        return (*gated_mlp(hidden_size, dense_size) * 2, *experts(hidden_size, expert_size, num_experts, visited))


@architectures.register("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
class SparseMLA(MLA):
    """DeepSeek Sparse Attention: an indexer chooses the tokens that a layer reads."""

    understands: ClassVar[frozenset[str]] = frozenset(
        {"indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"}
    )

    @functools.cached_property
    def has_indexer(self) -> tuple[bool, ...]:
        """Whether each layer has its own indexer; the others share the choice of an earlier one (GLM-5.2)."""
        fields, count = self.fields, self.num_layers
        types = self.listed("indexer_types")
        if types is not None:
            return tuple(kind == "full" for kind in types)
        if fields.has("index_topk_pattern"):
            return tuple(letter in ("F", "full") for letter in tuple(fields.get("index_topk_pattern"))[:count])
        frequency = fields.integer_or("index_topk_freq", 1)
        offset = fields.integer_or("index_skip_topk_offset", 2)
        return tuple(max(index - offset + 1, 0) % frequency == 0 for index in range(count))

    def caches(self) -> LayerCaches:
        latent = latent_cache(self.fields)
        indexer = indexer_cache(self.fields.integer("index_head_dim"))
        return tuple((latent, indexer) if own else (latent,) for own in self.has_indexer)

    def attention(self, index: int) -> Groups:
        if not self.has_indexer[index]:
            return super().attention(index)
        hidden_size, q_lora_rank, index_heads, index_size = self.fields.integers(
            "hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim"
        )
        kind = WeightKind.ATTENTION
        return (
            *super().attention(index),
            whole("indexer.wq_b", kind, q_lora_rank, index_heads * index_size),
            whole("indexer.wk", kind, hidden_size, index_size),
            whole("indexer.weights_proj", kind, hidden_size, index_heads),
            vector("indexer norm", 2 * index_size),
        )


# DeepSeek V4 names its layers by how many tokens one state covers.
_V4_RATIO_BY_TYPE = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_V4_INDEXED_RATIO = 4  # only these layers choose what they read


# The records of a vector of 512 elements, 64 of them rotary, and of the indexer's keys, as vLLM 0.32 packs them; pages
# are rounded up to what its kernels read at once.
_FP8, _NVFP4, _FP8_KEY = "fp8_ds_mla", "nvfp4_ds_mla", "128 x 1 B (fp8) + 4 B scale"
_V4_RECORDS = (PackedLatent(_FP8, 584, "448 x 1 B (fp8) + 64 x 2 B (bf16) + 8 x 1 B scales", 576),)
_V4_KEYS = (PackedLatent(_FP8, 132, _FP8_KEY, 576),)
_V41_STATES = (*_V4_RECORDS, PackedLatent(_NVFP4, 288, "512 x 0.5 B (fp4) + 32 x 1 B scales", 512))
_V41_WINDOWS = (*_V4_RECORDS, PackedLatent(_NVFP4, 528, "512 x 1 B (fp8) + 16 x 1 B scales", 512))
_V41_KEYS = (*_V4_KEYS, PackedLatent(_NVFP4, 68, "128 x 0.5 B (fp4) + 4 x 1 B scales", 512))
_V41_WINDOW_BLOCK = 32  # tokens of a window's block in V4.1


def _compressor(ratio: int, head_size: int) -> CompressorCache:
    """What builds the states of a layer: with ratio 4 two halves that overlap; blocks as large as the server's."""
    overlap = 2 if ratio == _V4_INDEXED_RATIO else 1
    return CompressorCache(
        state_size=2 * overlap * head_size,
        sliding_window=overlap * ratio,
        block_tokens=4 if ratio == _V4_INDEXED_RATIO else 8,
        page_alignment=_V4_RECORDS[0].page_alignment,
    )


@architectures.register("DeepseekV4ForCausalLM")
class DeepseekV4(MLA):
    """A window of vectors and compressed states; hyper-connections around attention and MLP; every layer routes.

    Where the config names the layers that store (`kv_source_layer_ids`), the others read the latest source below them:
    that is V4.1, whichever of the two architectures the config names (field report A19).
    """

    understands: ClassVar[frozenset[str]] = frozenset({"layer_types", "compress_ratios", "index_source_layer_ids"})

    @functools.cached_property
    def ratios(self) -> tuple[int, ...]:
        """Tokens that one state covers, layer by layer (0: none is kept); entries past the layers are draft layers."""
        fields, count = self.fields, self.num_layers
        types = self.listed()
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

    @property
    def has_sources(self) -> bool:
        """Whether the config names the layers whose states the others read."""
        return self.fields.has("kv_source_layer_ids") or self.fields.has("index_source_layer_ids")

    def sources(self, name: str) -> tuple[int, ...]:
        """The layers that store, of those within the decoder.

        Raises:
            InputError: none are named, or one of them compresses nothing.
        """
        named = self.fields.integer_list(name)
        sources = tuple(index for index in named if index < self.num_layers)
        idle = [index for index in sources if not self.ratios[index]]
        if idle:
            raise InputError(f"{self.fields.place}: {name} has layer {idle[0]}, whose compress_ratios is 0")
        return sources

    def keys(self, ratio: int, records: tuple[PackedLatent, ...]) -> CompressedCache:
        """The indexer's keys: fp8 with fp32 scales, unless a record says otherwise."""
        return CompressedCache(
            part=CachePart.INDEXER,
            head_size=self.fields.integer("index_head_dim"),
            tokens_per_state=ratio,
            fixed_dtype="fp8_e4m3",
            fixed_scales=INDEXER_KEY_SCALES,
            records=records,
        )

    def sourced_caches(self) -> LayerCaches:
        """V4.1: a window in every layer; states and keys where a source stores them.

        Keys belong to the layers that are a source of both; other index sources read the keys of the source below.

        Raises:
            InputError: a layer reads compressed states, and no source lies at or below it.
        """
        head_size, sliding_window = self.fields.integers("head_dim", "sliding_window")
        kv, index = self.sources("kv_source_layer_ids"), self.sources("index_source_layer_ids")
        window = WindowBufferCache(
            head_size=head_size,
            sliding_window=sliding_window,
            records=_V41_WINDOWS,
            block_tokens=_V41_WINDOW_BLOCK,
        )
        caches: list[tuple[LayerCache, ...]] = []
        for layer, ratio in enumerate(self.ratios):
            if ratio and not any(source <= layer for source in kv):
                raise InputError(f"{self.fields.place}: kv_source_layer_ids has no layer at or below {layer}")
            stored: list[LayerCache] = [window]
            if layer in kv:
                stored.append(CompressedCache(head_size=head_size, tokens_per_state=ratio, records=_V41_STATES))
            if layer in kv and layer in index:
                stored.append(self.keys(ratio, _V41_KEYS))
            caches.append(tuple(stored))
        return caches

    def caches(self) -> LayerCaches:
        """A window of vectors always; compressed states where the ratio is not 0; an indexer where it is 4."""
        if self.has_sources:
            return self.sourced_caches()
        head_size, sliding_window = self.fields.integers("head_dim", "sliding_window")
        caches: list[tuple[LayerCache, ...]] = []
        for ratio in self.ratios:
            layer: list[LayerCache] = [
                WindowBufferCache(head_size=head_size, sliding_window=sliding_window, records=_V4_RECORDS)
            ]
            if ratio:
                layer.append(CompressedCache(head_size=head_size, tokens_per_state=ratio, records=_V4_RECORDS))
                layer.append(_compressor(ratio, head_size))
            if ratio == _V4_INDEXED_RATIO:
                layer.append(self.keys(ratio, _V4_KEYS))
                layer.append(_compressor(ratio, self.fields.integer("index_head_dim")))
            caches.append(tuple(layer))
        return caches

    def weights(self) -> ModelWeights:
        """The parameters of V4.

        Raises:
            InputError: V4.1, whose parameters are not known here.
        """
        if self.has_sources:
            raise InputError(f"{self.fields.place}: the parameters of DeepSeek V4.1 are not known here")
        return super().weights()

    def attention(self, index: int) -> Groups:
        """Low-rank queries, a grouped low-rank output projection, attention sinks, and what builds the states."""
        hidden_size, num_heads, head_size, q_lora_rank, o_groups, o_lora_rank = self.fields.integers(
            "hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank"
        )
        kind = WeightKind.ATTENTION
        width = num_heads * head_size
        return (
            whole("q_a_proj", kind, hidden_size, q_lora_rank),
            column("q_b_proj", kind, q_lora_rank, width),
            whole("kv_proj", kind, hidden_size, head_size),
            WeightGroup(name="o_a_proj", parameters=width * o_lora_rank, kind=kind, width=width),
            row("o_b_proj", kind, o_groups * o_lora_rank, hidden_size),
            vector("attention sinks and norms", num_heads + q_lora_rank + head_size),
            *self._compressor(self.ratios[index]),
        )

    def _compressor(self, ratio: int) -> Groups:
        """Projections that build a state; with ratio 4 two halves that overlap, and an indexer built the same way."""
        if not ratio:
            return ()
        hidden_size, head_size, q_lora_rank = self.fields.integers("hidden_size", "head_dim", "q_lora_rank")
        kind = WeightKind.ATTENTION
        overlap = 2 if ratio == _V4_INDEXED_RATIO else 1
        compressor = (
            whole("compressor", kind, hidden_size, 2 * overlap * head_size),
            vector("compressor bias and norm", ratio * overlap * head_size + head_size),
        )
        if ratio != _V4_INDEXED_RATIO:
            return compressor
        index_heads, index_size = self.fields.integers("index_n_heads", "index_head_dim")
        return (
            *compressor,
            whole("indexer.compressor", kind, hidden_size, 2 * overlap * index_size),
            vector("indexer bias and norm", ratio * overlap * index_size + index_size),
            whole("indexer.q_b", kind, q_lora_rank, index_heads * index_size),
            whole("indexer.weights_proj", kind, hidden_size, index_heads),
        )

    def mlp(self, index: int) -> Groups:
        """Experts, and the hyper-connections of the layer's streams around attention and MLP."""
        streams = self.fields.integer("hc_mult")
        mixes = streams * streams + 2 * streams
        hyper = vector("hyper-connections", 2 * (mixes * streams * self.hidden_size + mixes + 3))
        return (*self.expert_groups(), hyper)

    def more_head(self) -> Groups:
        """The hyper-connection that joins the streams before the output matrix."""
        streams = self.fields.integer("hc_mult")
        return (vector("hyper-connection head", streams * streams * self.hidden_size + streams + 1),)


@architectures.register("DeepseekV41ForCausalLM")
class DeepseekV41(DeepseekV4):
    """V4 whose compressed states and keys are stored by a few source layers."""

    @property
    def has_sources(self) -> bool:
        """Always: a config that does not name them is incomplete."""
        return True
