"""The readers of model architectures: the base class, and the registry of all that are known.

An architecture is a class that is registered under the names in config.json's `architectures`. It overrides what
differs from the base class, which is a decoder with full attention and a gated MLP in every layer:

    >>> from kvledger.core.models.architecture import Architecture, architectures
    >>> from kvledger.core.models.geometry import geometry_from_config
    >>> @architectures.register("ZebraForCausalLM")
    ... class Zebra(Architecture):
    ...     '''Every fourth layer attends to all tokens, the others to a sliding window.'''
    ...
    ...     def layer_types(self):
    ...         return self.every_nth_full("sliding_window_pattern", 4)
    >>> config = {
    ...     "architectures": ["ZebraForCausalLM"], "dtype": "bfloat16", "num_hidden_layers": 8, "hidden_size": 1024,
    ...     "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 4096, "vocab_size": 32000,
    ...     "sliding_window": 512,
    ... }
    >>> geometry = geometry_from_config(config, "zebra")
    >>> print(*geometry.bytes_per_token_formula("auto"), sep="; ")
    6 layers x 4 heads x (64 + 64) x 2 B (bf16), at most 512 tokens; 2 layers x 4 heads x (64 + 64) x 2 B (bf16)
    >>> geometry.parameters
    187188224

A file with such a class is loaded by `kvledger --plugin FILE`; an installed package names its module in the entry-point
group `kvledger.architectures`. `caches` needs only fields that decide what layers store; `weights` may need more.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Literal

import attrs

from ..errors import InputError
from ..registry import Registry
from .config_fields import ConfigFields
from .layer_cache import AttentionCache, LayerCaches
from .weights import (
    Groups,
    Heads,
    ModelWeights,
    WeightKind,
    attention_projections,
    embedding,
    experts,
    gated_mlp,
    plain_mlp,
    vector,
)


class Architecture:
    """Reads one config.json: what each layer stores, and the parameters.

    Attributes:
        fields: the decoder's part of the config.
        class_defaults: values of fields that a config of this architecture may leave out, where its own class has a
            default that other architectures do not share (a checkpoint's config omits fields that equal these).
        understands: fields that decide what layers store and that the reader knows without asking for them in every
            config (what it does not know either way is named in a warning).
        encoders: parts of a `...ForConditionalGeneration` checkpoint that `weights` does not count.
        hybrid_manager: False where vLLM sizes windowed layers like full ones by default (Llama 4's chunks).
        tied_by_default: whether the output matrix is the embedding where the config does not say.
        norms_per_layer, final_norms: norm vectors of the hidden size in a layer, and before the output matrix.
        full_every: one layer in so many is full and the others slide, unless the config lists types or has its own
            `sliding_window_pattern`; 0: all are full.
        biases: the projections with biases: those of queries, keys and values ("qkv"), all four ("all"), all four where
            the config's `attention_bias` is true ("attention_bias"), or none.
        qk_norm: norms of queries and keys: of each head alone ("head"), of all heads together ("heads"), or none.
    """

    class_defaults: ClassVar[Mapping[str, int]] = MappingProxyType({})
    understands: ClassVar[frozenset[str]] = frozenset()
    encoders: ClassVar[str] = "vision encoder and projector"
    hybrid_manager: ClassVar[bool] = True
    tied_by_default: ClassVar[bool] = False
    norms_per_layer: ClassVar[int] = 2
    final_norms: ClassVar[int] = 1
    full_every: ClassVar[int] = 0
    biases: ClassVar[Literal["qkv", "all", "attention_bias"] | None] = None
    qk_norm: ClassVar[Literal["head", "heads"] | None] = None

    def __init__(self, fields: ConfigFields) -> None:
        """Keep `fields`; they are read and checked where they are needed."""
        self.fields = fields

    @property
    def num_layers(self) -> int:
        """Layers of the decoder, without draft layers."""
        return self.fields.integer("num_hidden_layers", "n_layer", "num_layers", "n_layers")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.fields.integer("hidden_size", "n_embd", "d_model")

    @functools.cached_property
    def heads(self) -> Heads:
        """Heads of the decoder; an explicit head_dim wins over hidden_size / num_attention_heads.

        Raises:
            InputError: a field is missing, or hidden_size is no multiple of the heads and no head_dim is given.
        """
        fields = self.fields
        num_heads = fields.integer("num_attention_heads", "n_head")
        head_size = fields.integer_or("head_dim", None)
        if head_size is None:
            head_size, rest = divmod(self.hidden_size, num_heads)
            if rest:
                raise InputError(
                    f"{fields.place}: hidden_size {self.hidden_size} is no multiple of num_attention_heads {num_heads};"
                    " give head_dim"
                )
        return Heads(
            num_heads=num_heads,
            num_kv_heads=fields.integer_or("num_key_value_heads", num_heads),
            head_size=head_size,
            head_size_v=fields.integer_or("v_head_dim", head_size),
        )

    @property
    def window(self) -> int:
        """The sliding window; layers that slide require it."""
        return self.fields.integer("sliding_window", "sliding_window_size")

    def listed(self, name: str = "layer_types") -> tuple[str, ...] | None:
        """The config's own list of strings with one entry a layer, or None where it has none.

        Entries beyond the layers describe draft layers, which hold no cache of the main model.

        Raises:
            InputError: the list is shorter than the layers.
        """
        if not self.fields.has(name):
            return None
        types = self.fields.text_list(name)
        if len(types) < self.num_layers:
            raise InputError(f"{self.fields.place}: {name} has {len(types)} entries for {self.num_layers} layers")
        return types[: self.num_layers]

    def listed_or(self, default: Callable[[int], str]) -> tuple[str, ...]:
        """The type of each layer: the config's `layer_types`, else `default` of the layer's index."""
        return self.listed() or tuple(default(index) for index in range(self.num_layers))

    def every_nth_full(self, pattern_field: str, default: int) -> tuple[str, ...]:
        """Unless the config lists types: every n-th layer is full, the others slide; n is `pattern_field`."""
        pattern = self.fields.integer_or(pattern_field, default)
        return self.listed_or(lambda index: "sliding_attention" if (index + 1) % pattern else "full_attention")

    def routes(self) -> tuple[bool, ...]:
        """Whether each layer routes to experts: as listed (types, or 0 and 1), else from `first_k_dense_replace`."""
        fields, count = self.fields, self.num_layers
        if fields.has("mlp_layer_types"):
            return tuple(kind != "dense" for kind in fields.text_list("mlp_layer_types")[:count])
        if fields.has("moe_layer_freq") and not isinstance(fields.get("moe_layer_freq"), int):
            return tuple(bool(item) for item in fields.integer_list("moe_layer_freq")[:count])
        first = fields.integer("first_k_dense_replace") if fields.get("first_k_dense_replace") else 0
        return tuple(index >= first for index in range(count))

    def layer_types(self) -> Sequence[str]:
        """`full_attention` or `sliding_attention` for each layer, by `full_every` unless overridden."""
        if self.full_every:
            return self.every_nth_full("sliding_window_pattern", self.full_every)
        return ("full_attention",) * self.num_layers

    def full_cache(self) -> AttentionCache:
        """Keys and values of every token."""
        heads = self.heads
        return AttentionCache(num_kv_heads=heads.num_kv_heads, head_size=heads.head_size, head_size_v=heads.head_size_v)

    def caches(self) -> LayerCaches:
        """What each layer stores: full and sliding layers of equal heads and sizes, unless overridden.

        Raises:
            InputError: a layer type that is neither, or sliding layers without a window.
        """
        full = self.full_cache()
        caches: list[tuple[AttentionCache, ...]] = []
        for index, kind in enumerate(self.layer_types()):
            if kind not in ("full_attention", "sliding_attention"):
                raise InputError(
                    f"{self.fields.place}: layer_types[{index}] is {kind!r}; this architecture has full_attention and"
                    " sliding_attention layers"
                )
            caches.append((full if kind == "full_attention" else attrs.evolve(full, sliding_window=self.window),))
        return caches

    def attention(self, index: int) -> Groups:
        """Parameters of the attention of layer `index`: by default four projections with `biases` and `qk_norm`."""
        heads, biases, norm = self.heads, self.biases, 0
        if biases == "attention_bias":
            biases = "all" if self.fields.flag("attention_bias") else None
        if self.qk_norm is not None:
            norm = (2 if self.qk_norm == "head" else heads.num_heads + heads.num_kv_heads) * heads.head_size
        return attention_projections(
            self.hidden_size, heads, qkv_bias=biases is not None, output_bias=biases == "all", qk_norm=norm
        )

    def mlp(self, index: int) -> Groups:
        """Parameters of the MLP or of the experts of layer `index`."""
        hidden_size, intermediate_size = self.fields.integers("hidden_size", "intermediate_size")
        return gated_mlp(hidden_size, intermediate_size, self.fields.flag("mlp_bias"))

    def layer(self, index: int) -> Groups:
        """All parameters of layer `index`."""
        norms = vector("norms", self.norms_per_layer * self.hidden_size)
        return (*self.attention(index), *self.mlp(index), norms)

    def more_embeddings(self) -> Groups:
        """Further tables that the first pipeline stage holds."""
        return ()

    def more_head(self) -> Groups:
        """Further parameters that the last pipeline stage holds."""
        return ()

    def weights(self) -> ModelWeights:
        """The parameters of the decoder: embeddings, layers, final norm and output matrix.

        Raises:
            InputError: a field is missing, or the parameters of this architecture are not known.
        """
        vocab_size, hidden_size = self.fields.integer("vocab_size", "padded_vocab_size"), self.hidden_size
        tied = self.fields.flag("tie_word_embeddings", self.tied_by_default)
        head = (vector("final norm", self.final_norms * hidden_size), *self.more_head())
        return ModelWeights(
            embeddings=(embedding("embed_tokens", vocab_size, hidden_size), *self.more_embeddings()),
            layers=tuple(self.layer(index) for index in range(self.num_layers)),
            head=head if tied else (*head, embedding("lm_head", vocab_size, hidden_size, WeightKind.LM_HEAD)),
            tied=tied,
        )


architectures = Registry[type[Architecture]]("architecture", "kvledger.architectures")


class ByFields(Architecture):
    """An architecture that is not known by name, read by fields that mean the same in every config that has them.

    It has ordinary keys and values in every layer, in full or in a window. A config with any other field that could
    decide what is stored is refused: see `unread_fields`.
    """

    understands: ClassVar[frozenset[str]] = frozenset(
        {"sliding_window", "sliding_window_size", "sliding_window_pattern", "max_window_layers"}
        | {"global_attn_every_n_layers"}
    )

    @functools.cached_property
    def heads(self) -> Heads:
        """Heads by the first name that is there; one KV head under `multi_query`, as many as heads unless given."""
        section = self.fields.section("attn_config")  # DBRX
        fields = self.fields
        if section is not None:
            fields = ConfigFields({**section.values, **fields.values}, section.place)
        num_heads = fields.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
        names = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_n_heads", "n_head_kv", "num_attention_groups")
        if fields.flag("multi_query_attention"):  # ChatGLM
            names = (*names, "multi_query_group_num")
        given = _agreed(fields, *names)
        if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):  # Falcon
            given = 1
        head_size = _agreed(fields, "head_dim", "kv_channels", "head_size", "attention_head_dim")
        if head_size is None and self.hidden_size % num_heads:
            raise InputError(f"{fields.place}: hidden_size {self.hidden_size} is no multiple of {num_heads} heads")
        head_size = head_size or self.hidden_size // num_heads
        return Heads(
            num_heads=num_heads,
            num_kv_heads=given or num_heads,
            head_size=head_size,
            head_size_v=fields.integer_or("v_head_dim", head_size),
        )

    def layer_types(self) -> Sequence[str]:
        """As listed; by a pattern of letters (`LLLG`) or one full layer in so many; else all slide if any window."""
        fields = self.fields
        if (types := self.listed()) is not None:
            return ["full_attention" if kind in ("attention", "full", "global") else kind for kind in types]
        if not fields.has("sliding_window") or fields.get("use_sliding_window") is False:
            return ("full_attention",) * self.num_layers
        for name in ("sliding_window_pattern", "global_attn_every_n_layers"):
            pattern = fields.get(name)
            if isinstance(pattern, str) and set(pattern) <= {"L", "G"} and pattern:
                kinds = ["full_attention" if letter == "G" else "sliding_attention" for letter in pattern]
                return [kinds[index % len(kinds)] for index in range(self.num_layers)]
            if pattern is not None:
                return self.every_nth_full(name, 1)
        return ("sliding_attention",) * self.num_layers

    def mlp(self, index: int) -> Groups:
        """A gated MLP, or experts under the names that are in use; what a gate or a bias adds is not known."""
        fields, hidden_size = self.fields, self.hidden_size
        dense = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff")
        counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
        count = next((name for name in counts if fields.get(name)), None)  # 0: a dense model of a family with experts
        if count is None or not self.routes()[index]:
            inner = next((name for name in ("shared_intermediate_size", *dense) if fields.get(name)), None)
            # Models without the field (Bloom, Falcon) and those with squared ReLU (Nemotron) have no gate.
            is_plain = inner is None or fields.get("hidden_act") in ("relu2", "relu_squared")
            size = 4 * hidden_size if inner is None else fields.integer(inner)
            return (plain_mlp if is_plain else gated_mlp)(hidden_size, size)
        size = self._in_layer(index, "moe_intermediate_size", "expert_intermediate_size", *dense)
        visited = self._in_layer(
            index, "num_experts_per_tok", "moe_top_k", "moe_k", "num_experts_per_token", "moe_topk"
        )
        groups = experts(hidden_size, size, self._in_layer(index, count), visited)
        names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim")
        names = (*names, "shared_intermediate_size")
        of_shared = next((self._in_layer(index, name) for name in names if fields.get(name)), 0)
        if not of_shared:
            counts = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
            of_shared = size * next((self._in_layer(index, name) for name in counts if fields.get(name)), 0)
        return (*groups, *gated_mlp(hidden_size, of_shared)) if of_shared else groups

    def _in_layer(self, index: int, *names: str) -> int:
        """A number under the first of these names that is there, or that of the layer where it is a list."""
        name = next((name for name in names if self.fields.has(name)), names[0])
        if isinstance(self.fields.get(name), list):
            return self.fields.integer_list(name)[index]
        return self.fields.integer(name)


def _agreed(fields: ConfigFields, *names: str) -> int | None:
    """The number under any of these names; None if none is there. Raises InputError: they contradict each other."""
    found = {name: fields.integer(name) for name in names if fields.has(name)}
    if len(set(found.values())) > 1:
        raise InputError(f"{fields.place}: {found} contradict each other")
    return next(iter(found.values()), None)


# Sections of a config that describe the decoder beside encoders, nested ones with a dot.
DECODERS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config.text_config",
    "text_model",
    "decoder_config",
)
_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


def decoder_of(top: ConfigFields) -> ConfigFields:
    """The part of a config that describes the decoder: a section of it, or all."""
    for path in DECODERS:
        part: ConfigFields | None = top
        for name in path.split("."):
            part = None if part is None else part.section(name)
        if part is not None:
            return part
    return top


def reader_of(name: str, fields: ConfigFields, *, is_section: bool) -> type[Architecture] | None:
    """The class that reads a decoder by the config's name; a section also by its own, or by its `model_type`.

    `Qwen3MoeForCausalLM` is read for `model_type` qwen3_moe or qwen3_moe_text. None: there is no such class.
    """
    if name in architectures:
        return architectures.get(name)
    if not is_section:
        return None
    for own in fields.items("architectures") if fields.has("architectures") else ():
        if own in architectures:
            return architectures.get(own)
    kind = (fields.text("model_type") or "").removesuffix("_text").replace("_", "").lower()
    for known in architectures.names():
        stem = next((known.removesuffix(suffix) for suffix in _SUFFIXES if known.endswith(suffix)), known)
        if kind and stem.lower() == kind:
            return architectures.get(known)
    return None
