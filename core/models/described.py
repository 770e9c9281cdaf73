"""Descriptions of a model's caches by kind instead of a config: counts of layers and the sizes of each kind.

For models whose architecture is not known here, and for golden/model_kv_bytes.jsonl, whose rows are such
descriptions. They give no order of the layers, so layers of one kind follow each other.
"""

from collections.abc import Callable, Iterator

import attrs

from ..errors import InputError
from .architecture import Architecture
from .config_fields import ConfigFields
from .latent import DeepseekV4, indexer_cache, latent_cache
from .layer_cache import (
    AttentionCache,
    CachePart,
    LatentCache,
    LayerCache,
    LayerCaches,
    OpaqueStateCache,
    RecordCache,
)
from .linear import DELTA_NET_KERNEL, linear_state
from .weights import ModelWeights


class Described(Architecture):
    """The reader of a description: it knows no parameters."""

    def weights(self) -> ModelWeights:
        """Refuse.

        Raises:
            InputError: always.
        """
        raise InputError(f"{self.fields.place}: a description of caches says nothing about parameters")


# Dtypes by the names that descriptions use where a model fixes the precision of its indexer.
_DTYPE_OF_PRECISION = {"bf16_fp16": "bf16", "fp8_int8": "fp8", "fp4_int4": "fp4"}


def described_caches(kind: str, fields: ConfigFields) -> LayerCaches:
    """List what each layer of a model of `kind` stores.

    Raises:
        InputError: the kind is unknown, a field is missing, or the counts of layers do not add up.
    """
    reader = _READERS.get(kind)
    if reader is None:
        raise InputError(f"{fields.place}: unknown kind {kind!r}; known: {', '.join(sorted(_READERS))}")
    return reader(fields)


def _attention(fields: ConfigFields, prefix: str = "") -> AttentionCache:
    """Heads and sizes; fields of sliding layers start with `swa_` where they differ."""
    heads = fields.integer_or(f"{prefix}num_key_value_heads", fields.integer("num_key_value_heads"))
    size = fields.integer_or(f"{prefix}head_dim", fields.integer("head_dim"))
    value_default = fields.integer_or("v_head_dim", size)
    return AttentionCache(
        num_kv_heads=heads, head_size=size, head_size_v=fields.integer_or(f"{prefix}v_head_dim", value_default)
    )


def _standard(fields: ConfigFields) -> LayerCaches:
    """Layers that keep keys and values of every token; a window in the fields is ignored."""
    stored = fields.integer_or("stored_layers", fields.integer("num_hidden_layers"))
    return _counted(fields, [(stored, (_attention(fields),))])


def _mixed(fields: ConfigFields) -> LayerCaches:
    """Full and sliding layers, and layers that store nothing because they read another's cache."""
    full, sliding = fields.integers("full_attention_layers", "sliding_attention_layers")
    full_cache = _attention(fields)
    if fields.has("global_head_dim"):
        size = fields.integer("global_head_dim")
        full_cache = attrs.evolve(
            full_cache,
            num_kv_heads=fields.integer_or("num_global_key_value_heads", full_cache.num_kv_heads),
            head_size=size,
            head_size_v=size,
        )
    sliding_cache = attrs.evolve(_attention(fields, "swa_"), sliding_window=Architecture(fields).window)
    return _counted(fields, [(full, (full_cache,)), (sliding, (sliding_cache,))])


def _mla(fields: ConfigFields) -> LayerCaches:
    return ((latent_cache(fields),),) * fields.integer("num_hidden_layers")


def _dsa(fields: ConfigFields) -> LayerCaches:
    """Latents everywhere, and keys on the layers with their own indexer."""
    latent, indexer = latent_cache(fields), indexer_cache(fields.integer("index_head_dim"))
    count = fields.integer("num_hidden_layers")
    own = fields.integer_or("indexer_full_layers", count)
    return _counted(fields, [(own, (latent, indexer)), (count - own, (latent,))])


def _indexer(fields: ConfigFields) -> LatentCache:
    precision = fields.text("indexer_fixed_precision_id")
    if precision is not None and precision not in _DTYPE_OF_PRECISION:
        known = ", ".join(_DTYPE_OF_PRECISION)
        raise InputError(f"{fields.place}: indexer_fixed_precision_id is {precision!r}; known are {known}")
    return LatentCache(
        part=CachePart.INDEXER,
        head_size=fields.integer("index_head_dim"),
        fixed_dtype=None if precision is None else _DTYPE_OF_PRECISION[precision],
    )


def _msa(fields: ConfigFields) -> LayerCaches:
    """Keys and values everywhere, and an indexer's keys on sparse layers."""
    full, sparse = fields.integers("full_attention_layers", "sparse_attention_layers")
    cache = _attention(fields)
    return _counted(fields, [(full, (cache,)), (sparse, (cache, _indexer(fields)))])


def _linear(fields: ConfigFields) -> LayerCaches:
    """Full layers, and linear ones with a fixed state: conv inputs in 2 bytes, recurrent matrices in 4."""
    full, linear = fields.integers("full_attention_layers", "linear_attention_layers")
    return _counted(
        fields, [(full, (_attention(fields),)), (linear, (linear_state(fields, "linear_", DELTA_NET_KERNEL),))]
    )


def _kda(fields: ConfigFields) -> LayerCaches:
    """Latents on full layers; a fixed state on the others, with the bytes per element that the fields give."""
    full, linear = fields.integers("full_attention_layers", "kda_layers")
    state = linear_state(
        fields,
        "kda_",
        "kda_conv_kernel_size",
        conv_dtype=_dtype_of_bytes(fields, "kda_conv_state_bytes_per_element", "bf16"),
        recurrent_dtype=_dtype_of_bytes(fields, "kda_recurrent_state_bytes_per_element", "fp32"),
    )
    return _counted(fields, [(full, (latent_cache(fields),)), (linear, (state,))])


def _dtype_of_bytes(fields: ConfigFields, name: str, default: str) -> str:
    dtypes = {1: "int8", 2: "bf16", 4: "fp32"}
    size = fields.integer_or(name, None)
    if size is None:
        return default
    if size not in dtypes:
        raise InputError(f"{fields.place}: {name} is {size}; expected 1, 2 or 4")
    return dtypes[size]


def _counted(fields: ConfigFields, counted: list[tuple[int, tuple[LayerCache, ...]]]) -> LayerCaches:
    """Lay out layers by count, then those that store nothing; together they are all layers."""
    count = fields.integer("num_hidden_layers")
    described = sum(number for number, _ in counted)
    stored = fields.integer_or("stored_layers", count)
    if described != stored:
        listed = " + ".join(str(number) for number, _ in counted)
        raise InputError(f"{fields.place}: {listed} layers are described, {stored} store a cache")
    caches = [layer for number, layer in counted for layer in (layer,) * number]
    return (*caches, *((),) * (count - stored))


def _layers(fields: ConfigFields) -> LayerCaches:
    """Layers as listed, each entry with its `count` and what one layer of it stores; nothing if it says no more.

    An entry has `num_key_value_heads` and `head_dim` (with `v_head_dim`, `sliding_window` or `attention_chunk_size`
    where they apply), `latent_size`, `bytes_per_token`, `state_bytes` (per sequence), `indexer_key_size`, or several.
    """
    caches: list[tuple[LayerCache, ...]] = []
    for index, item in enumerate(fields.items("layers")):
        entry = ConfigFields({"layer": item}, f"{fields.place}: layers[{index}]").section("layer")
        if entry is None:
            raise InputError(f"{fields.place}: layers[{index}] is null; expected an object")
        unknown = sorted(set(entry.values) - _LAYER_FIELDS)
        if unknown:
            raise InputError(f"{entry.place}: unknown field {unknown[0]}; known are {', '.join(sorted(_LAYER_FIELDS))}")
        caches += [tuple(_listed_caches(entry))] * entry.integer_or("count", 1)
    total = fields.integer_or("num_hidden_layers", len(caches))
    if total != len(caches):
        raise InputError(f"{fields.place}: {len(caches)} layers are listed, num_hidden_layers is {total}")
    return caches


_LAYER_FIELDS = frozenset(
    {"count", "num_key_value_heads", "head_dim", "v_head_dim", "sliding_window", "attention_chunk_size", "latent_size"}
    | {"bytes_per_token", "state_bytes", "indexer_key_size"}
)


def _listed_caches(entry: ConfigFields) -> Iterator[LayerCache]:
    if entry.has("num_key_value_heads") or entry.has("head_dim"):
        cache = _attention(entry)
        yield attrs.evolve(
            cache,
            sliding_window=entry.integer_or("sliding_window", None),
            attention_chunk_size=entry.integer_or("attention_chunk_size", None),
        )
    if entry.has("latent_size"):
        yield LatentCache(head_size=entry.integer("latent_size"))
    if entry.has("bytes_per_token"):
        yield RecordCache(bytes_per_token=entry.integer("bytes_per_token"))
    if entry.has("indexer_key_size"):
        yield indexer_cache(entry.integer("indexer_key_size"))
    if entry.has("state_bytes"):
        yield OpaqueStateCache(state_bytes=entry.integer("state_bytes"))


_READERS: dict[str, Callable[[ConfigFields], LayerCaches]] = {
    "layers": _layers,
    "standard_gqa": _standard,
    "mixed_full_sliding_gqa": _mixed,
    "mla": _mla,
    "dsa_mla": _dsa,
    "deepseek_v4_hybrid": lambda fields: DeepseekV4(fields).caches(),
    "qwen_linear_full_hybrid": _linear,
    "kimi_kda_mla_hybrid": _kda,
    "minimax_msa": _msa,
}
