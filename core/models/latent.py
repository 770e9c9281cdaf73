"""Latent attention: DeepSeek V2, V3, V3.2 and V4, Kimi K2, GLM-5. One latent vector a token serves all heads."""

import functools

from ..errors import InputError
from ..planner.cache_dtype import ScaleStorage
from .architecture import Architecture, architectures
from .config_fields import ConfigFields
from .layer_cache import CachePart, CompressedCache, LatentCache, LayerCache, LayerCaches, WindowBufferCache
from .weights import Groups, WeightGroup, WeightKind, column, experts, gated_mlp, row, vector, whole

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
        return self.expert_groups() if self.routes()[index] else gated_mlp(hidden_size, dense_size)

    def expert_groups(self) -> Groups:
        """Routed and shared experts of one layer."""
        fields = self.fields
        hidden_size, expert_size = fields.integers("hidden_size", "moe_intermediate_size")
        visited = fields.integer("num_experts_per_tok", "num_experts_per_token")
        num_experts = fields.integer("n_routed_experts", "num_local_experts", "num_experts")
        shared = fields.values.get("n_shared_experts", fields.values.get("num_shared_experts")) or 0
        if not isinstance(shared, int) or shared < 0:
            raise InputError(f"{fields.place}: n_shared_experts is {shared!r}; expected a whole number of at least 0")
        routed = experts(hidden_size, expert_size, num_experts, visited)
        return (*routed, *gated_mlp(hidden_size, shared * expert_size)) if shared else routed


@architectures.register("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
class SparseMLA(MLA):
    """DeepSeek Sparse Attention: an indexer chooses the tokens that a layer reads."""

    @functools.cached_property
    def has_indexer(self) -> tuple[bool, ...]:
        """Whether each layer has its own indexer; the others share the choice of an earlier one (GLM-5.2)."""
        fields, count = self.fields, self.num_layers
        types = self.listed("indexer_types")
        if types is not None:
            return tuple(kind == "full" for kind in types)
        if fields.has("index_topk_pattern"):
            return tuple(letter in ("F", "full") for letter in tuple(fields.values["index_topk_pattern"])[:count])
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
_V4_RATIO_BY_TYPE = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
_V4_INDEXED_RATIO = 4  # only these layers choose what they read
_V4_INDEXER_DTYPE = "fp4"  # at every cache precision; no field says so


@architectures.register("DeepseekV4ForCausalLM")
class DeepseekV4(MLA):
    """A window of vectors and compressed states; hyper-connections around attention and MLP; every layer routes."""

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

    def caches(self) -> LayerCaches:
        """A window of vectors always; compressed states where the ratio is not 0; an indexer where it is 4."""
        head_size, sliding_window = self.fields.integers("head_dim", "sliding_window")
        caches: list[tuple[LayerCache, ...]] = []
        for ratio in self.ratios:
            layer: list[LayerCache] = [WindowBufferCache(head_size=head_size, sliding_window=sliding_window)]
            if ratio:
                layer.append(CompressedCache(head_size=head_size, tokens_per_state=ratio))
            if ratio == _V4_INDEXED_RATIO:
                layer.append(
                    CompressedCache(
                        part=CachePart.INDEXER,
                        head_size=self.fields.integer("index_head_dim"),
                        tokens_per_state=ratio,
                        fixed_dtype=_V4_INDEXER_DTYPE,
                    )
                )
            caches.append(tuple(layer))
        return caches

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
