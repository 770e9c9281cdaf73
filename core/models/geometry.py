"""Geometry of a model: what it stores per token and its parameters, from a config.json or built in by name.

    >>> geometry = builtin_geometry("llama-3.1-8b")
    >>> geometry.parameters
    8030261248
    >>> geometry.sequence_bytes(4096, "bf16").total
    536870912

An unknown architecture is an error, and so is a missing field, by its name: nothing about a model is guessed.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from ..errors import InputError
from ..planner.cache_dtype import (
    KEEPS_BOUNDARY_LAYERS,
    PACKED_LATENT_SIZES,
    PACKED_LATENTS,
    CacheFormat,
    cache_format,
    canonical_dtype,
)
from ..planner.specs import KVCacheSpec
from . import dense, latent, linear, moe
from .architecture import Architecture, ByFields, architectures, decoder_of, reader_of
from .catalog import builtin_configs, catalogue_name, unknown_model
from .config_fields import ConfigFields, unread_fields, warning_about
from .described import Described, described_caches
from .layer_cache import (
    AttentionCache,
    CachePart,
    LatentCache,
    LayerCache,
    LayerCaches,
    SequenceBytes,
    SequenceStateCache,
    VectorCache,
)
from .weights import ModelWeights

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
# Kinds of rope scaling whose factor is in the longest sequence already.
_SCALED_ROPE = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
# What vLLM serves in where the config names no dtype, or names fp32.
UNNAMED_DTYPE = "bf16"
BUILTIN_ARCHITECTURES = (dense, latent, linear, moe)  # their classes register themselves when they are imported


@attrs.frozen(kw_only=True)
class ModelGeometry:
    """One model.

    Attributes:
        name: short name, or name of the config's folder or file.
        architecture: from config.json's `architectures`, or the kind of a description.
        fields: the decoder's part of the config.
        layers: what each layer stores; empty for a layer that stores nothing.
        dtype: of the unquantised weights and of an `auto` cache; None where the config does not say.
        quantization_config: quantisation of the weights, as in the config; it never changes the cache.
        reader: the class that reads the architecture.
        from_class: fields that the config leaves out, each with the default of its class.
        warnings: what the reader of a plan should know of the config.
        is_section: whether the decoder is a section of the config, beside encoders.
    """

    name: str
    architecture: str
    fields: ConfigFields
    layers: LayerCaches
    dtype: str | None
    quantization_config: Mapping[str, Any] | None
    reader: type[Architecture]
    from_class: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    is_section: bool = False

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder, without draft layers."""
        return len(self.layers)

    @property
    def max_position_embeddings(self) -> int | None:
        """Positions of the config, the least under any of its names; None where it does not say."""
        return min((self.fields.integer(name) for name in _LENGTHS if self.fields.has(name)), default=None)

    @property
    def longest_request(self) -> int | None:
        """Longest request that vLLM 0.32 accepts: the positions, times the factor of a scaling that they leave out."""
        positions, (kind, factor) = self.max_position_embeddings, self._rope_scaling
        is_scaled = kind in _SCALED_ROPE or "gemma3" in str(self.fields.get("model_type"))
        return positions if positions is None or factor is None or is_scaled else int(positions * factor)

    @property
    def default_max_model_len(self) -> int | None:
        """Longest request unless one is given: `longest_request`, or the unscaled positions under LongRoPE."""
        original = self.fields.get("original_max_position_embeddings")
        if self._rope_scaling[0] in ("longrope", "su") and isinstance(original, int):
            return original
        return self.longest_request

    @property
    def _rope_scaling(self) -> tuple[str | None, float | None]:
        """Kind and factor of the scaling of rotary positions."""
        rope = self.fields.get("rope_parameters") or self.fields.get("rope_scaling")
        if not isinstance(rope, Mapping):
            return None, None
        values = cast("Mapping[str, Any]", rope)
        factor = values.get("factor")
        return values.get("rope_type", values.get("type")), factor if isinstance(factor, int | float) else None

    @property
    def num_attention_heads(self) -> int | None:
        """Query heads of a layer; None where the config does not say."""
        names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
        return next((self.fields.integer(name) for name in names if self.fields.has(name)), None)

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.fields.integer("hidden_size", "n_embd", "d_model")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.fields.integer("vocab_size")

    @functools.cached_property
    def weights(self) -> ModelWeights:
        """The parameters, matrix by matrix.

        Raises:
            InputError: fields that they need are missing (named), or the architecture's parameters are not known.
        """
        try:
            return self.reader(self.fields).weights()
        except InputError as error:
            raise InputError(
                f"{error}; so the parameters of {self.name} cannot be counted: give the weights' bytes per GPU"
                " (weights_bytes)"
            ) from error

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of the checkpoint that the parameters do not count: encoders beside the decoder."""
        has_encoder = self.architecture.endswith("ForConditionalGeneration") or self.is_section
        return (self.reader.encoders,) if has_encoder else ()

    @property
    def parameters(self) -> int:
        """Number of parameters of the decoder, tied ones once (golden/model_geometry.jsonl).

        Raises:
            InputError: as `weights`.
        """
        return self.weights.parameters

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of fixed size per sequence."""
        return any(isinstance(cache, SequenceStateCache) for caches in self.layers for cache in caches)

    def cache_format(self, kv_cache_dtype: str) -> CacheFormat:
        """The storage format of `kv_cache_dtype`; `auto` is the model's own dtype.

        Raises:
            InputError: the dtype is unknown or packs what this model does not store, or it is `auto` and the config
                names none.
        """
        storage = cache_format(kv_cache_dtype, self.dtype)
        if storage.latent is not None and not (self.has_sparse_latents or self.has_records):
            raise InputError(
                f"kv_cache_dtype {kv_cache_dtype!r} packs the latents of sparse latent attention, which {self.name}"
                " does not have; use fp8_e4m3"
            )
        if storage.packed is not None and any(
            not isinstance(c, AttentionCache | SequenceStateCache) for c in self.caches()
        ):
            raise InputError(
                f"kv_cache_dtype {kv_cache_dtype!r} packs the keys and values of heads, and {self.name} stores latents;"
                " use fp8_e4m3"
            )
        return storage

    @property
    def checkpoint_cache_dtype(self) -> str | None:
        """The cache dtype that the checkpoint's quantization asks for where none is given; None if it asks for none.

        Rules of vLLM 0.32: `kv_cache_scheme` of 8-bit floats (compressed-tensors, modelopt) means fp8, of 4-bit floats
        (modelopt) nvfp4; `kv_cache_quant_algo` (modelopt) names one of the two.

        Raises:
            InputError: it asks for a cache that is not known here.
        """
        if self.quantization_config is None:
            return None
        config = ConfigFields(self.quantization_config, f"{self.name}: quantization_config")
        parts = [part for part in (config.section("quantization"), config) if part is not None]
        asked = (part.get(name) for name in ("kv_cache_scheme", "kv_cache_quant_algo") for part in parts)
        scheme: Any = next((value for value in asked if value), None)
        if scheme is None:
            return None
        if isinstance(scheme, str):
            dtype = {"FP8": "fp8", "NVFP4": "nvfp4"}.get(scheme.upper())
        else:
            described = ConfigFields(scheme, f"{config.place}: kv_cache_scheme")
            floats = {8: "fp8", 4: "nvfp4"} if described.get("type") == "float" else {}
            dtype = floats.get(described.integer("num_bits"))
        if dtype is None:
            raise InputError(
                f"{self.name}: quantization_config asks for a cache of {scheme!r}, which is not known here; give"
                " kv_cache_dtype"
            )
        return dtype

    @property
    def has_sparse_latents(self) -> bool:
        """Whether layers store latents of which an indexer chooses what is read (DeepSeek V3.2, GLM-5)."""
        caches = list(self.caches())
        parts = {cache.part for cache in caches if isinstance(cache, LatentCache)}
        return parts >= {CachePart.KV, CachePart.INDEXER}

    @property
    def has_records(self) -> bool:
        """Whether layers store vectors that have packed records of their own (DeepSeek V4)."""
        return any(isinstance(cache, VectorCache) and cache.records for cache in self.caches())

    def caches(self) -> Iterable[LayerCache]:
        """Every cache of every layer."""
        return itertools.chain.from_iterable(self.layers)

    def layer_specs(
        self, block_size: int, kv_cache_dtype: str, layers: LayerCaches | None = None
    ) -> Mapping[str, KVCacheSpec]:
        """The whole model's caches as pages of `block_size` tokens, by layer name; divide them by TP afterwards.

        `layers` stands for the model's own where a drafter's are to be counted too (`Drafts.layers_with`).
        """
        storage = self.cache_format(kv_cache_dtype)
        specs: dict[str, KVCacheSpec] = {}
        for index, caches in enumerate(self.layers if layers is None else layers):
            for cache in caches:
                name = f"layers.{index}.{'indexer' if cache.part is CachePart.INDEXER else cache.label}"
                if name in specs:
                    name = f"{name}.{cache.__class__.__name__}"
                specs[name] = cache.spec(block_size, storage)
        return specs

    def sequence_bytes(self, num_tokens: int, kv_cache_dtype: str) -> SequenceBytes:
        """The least that one sequence of `num_tokens` tokens occupies, TP 1 (golden/model_kv_bytes.jsonl).

        Raises:
            InputError: fewer than 0 tokens.
        """
        if num_tokens < 0:
            raise InputError(f"a sequence of {num_tokens} tokens; give 0 or more")
        storage = self.cache_format(kv_cache_dtype)
        by_part = dict.fromkeys(CachePart, 0)
        for cache in itertools.chain.from_iterable(self.layers):
            by_part[cache.part] += cache.floor_bytes(num_tokens, storage)
        return SequenceBytes(by_part[CachePart.KV], by_part[CachePart.INDEXER], by_part[CachePart.STATE])

    def bytes_per_token_formula(self, kv_cache_dtype: str) -> tuple[str, ...]:
        """One line for each kind of layer: how many there are, and what one of them stores per token."""
        counts = Counter(itertools.chain.from_iterable(self.layers))
        storage = self.cache_format(kv_cache_dtype)
        return tuple(
            f"{count} layers x {cache.token_bytes_formula(storage)}{_extent(cache)}" for cache, count in counts.items()
        )


def _extent(cache: LayerCache) -> str:
    window = getattr(cache, "sliding_window", None) or getattr(cache, "attention_chunk_size", None)
    return f", at most {window:,} tokens" if window else ""


def geometry_from_config(config: Mapping[str, Any], name: str, place: str = "config.json") -> ModelGeometry:
    """Read a Hugging Face config.

    Args:
        config: the parsed config.json.
        name: name of the model.
        place: origin of the config, for errors.

    Raises:
        InputError: no architecture, one that is not known here, or a field that decides the cache is missing.
    """
    top = ConfigFields(config, place)
    named = top.items("architectures")
    if not named or not isinstance(named[0], str):
        raise InputError(f"{place}: architectures is {named!r}; expected the name of an architecture")
    decoder = fields = decoder_of(top)
    reader = reader_of(named[0], fields, is_section=fields is not top)
    is_known = reader is not None
    if reader is None:
        reader = latent.MLA if fields.has("kv_lora_rank") else ByFields
    left_out = {name: value for name, value in reader.class_defaults.items() if not fields.has(name)}
    fields = ConfigFields({**fields.values, **left_out}, fields.place)
    parts = [fields, top, *filter(None, (top.section("vision_config"), top.section("encoder_config")))]
    dtypes = (part.text(name) for part in parts for name in ("dtype", "torch_dtype"))
    dtype = next(filter(None, dtypes), None)
    quantization = top.section("quantization_config") or fields.section("quantization_config")
    try:
        layers = tuple(tuple(caches) for caches in reader(fields).caches())
        num_layers = reader(fields).num_layers
    except InputError as error:
        raise error if is_known else _unknown(named[0], place, str(error)) from None
    unread = unread_fields(top, fields, reader.understands)
    if unread and not is_known:
        raise _unknown(named[0], place, f"{'; '.join(unread)}: may decide what layers store")
    if len(layers) != num_layers:
        raise InputError(f"{place}: {len(layers)} layers are described, num_hidden_layers is {num_layers}")
    return ModelGeometry(
        name=name,
        architecture=named[0],
        fields=fields,
        layers=layers,
        dtype=canonical_dtype(dtype or UNNAMED_DTYPE),
        quantization_config=None if quantization is None else quantization.values,
        reader=reader,
        from_class=tuple(f"{name} {value:,}" for name, value in left_out.items())
        + (() if dtype is not None else (f"dtype {UNNAMED_DTYPE}",)),
        warnings=(
            *_by_fields(named[0], is_known),
            *((warning_about(unread, fields.place, named[0]),) if unread else ()),
        ),
        is_section=decoder is not top,
    )


def _by_fields(architecture: str, is_known: bool) -> tuple[str, ...]:
    if is_known:
        return ()
    return (
        f"{architecture} is not known by name: what its layers store follows from the config's fields, and its"
        " parameters are counted as those of a decoder with gated MLPs",
    )


def _unknown(architecture: str, place: str, why: str) -> InputError:
    return InputError(
        f"{place}: architecture {architecture!r} is not known by name, and its fields do not say what it stores: {why}."
        " That is not guessed: describe the caches by hand, by kind and fields (docs/planning.md), or register a class"
        f" that reads the config (docs/extending.md). Known by name: {', '.join(architectures.names())}"
    )


def geometry_from_description(document: Mapping[str, Any], name: str, place: str) -> ModelGeometry:
    """Read a description by `kind` and `fields` instead of a config: what a model stores, but not its parameters.

    Raises:
        InputError: the description lacks one of the two, or the kind's fields are incomplete.
    """
    top = ConfigFields(document, place)
    kind, fields = top.text("kind"), top.section("fields")
    if kind is None or fields is None:
        raise InputError(f"{place}: a description needs kind and fields")
    # A description has the length limit beside its fields, a config inside them.
    limit = document.get("max_position_embeddings")
    values = fields.values if limit is None else {"max_position_embeddings": limit, **fields.values}
    layers = described_caches(kind, fields)
    unread = unread_fields(fields, fields, ())
    return ModelGeometry(
        name=name,
        architecture=kind,
        fields=ConfigFields(values, fields.place),
        layers=layers,
        dtype=None if (dtype := top.text("dtype")) is None else canonical_dtype(dtype),
        quantization_config=None,
        reader=Described,
        warnings=(warning_about(unread, fields.place, f"kind {kind}"),) if unread else (),
    )


def builtin_geometry(name: str) -> ModelGeometry:
    """Load a built-in model by its short name (`llama-3.1-8b`) or a hub id (`meta-llama/Llama-3.1-8B-Instruct`).

    Raises:
        InputError: no built-in model of that name; close names are listed.
    """
    short = catalogue_name(name)
    if short is None:
        raise unknown_model(name)
    return geometry_from_config(builtin_configs()[short], short, f"built-in {short}")


def load_geometry(model: str) -> ModelGeometry:
    """Load a model from a config.json, from a folder with one, or built in by name.

    Raises:
        InputError: the file cannot be read or is no JSON object, or there is no such built-in model.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and not path.is_file():
        return builtin_geometry(model)
    try:
        import json

        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: not a JSON document: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object with the model's configuration")
    document = cast("dict[str, Any]", config)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    if "kind" in document and "architectures" not in document:
        return geometry_from_description(document, name, str(path))
    geometry = geometry_from_config(document, name, str(path))
    if geometry.dtype != "fp32":
        return geometry
    note = f"the config's dtype is float32, which vLLM serves in {UNNAMED_DTYPE}; give --dtype float32 for the other"
    return attrs.evolve(geometry, dtype=UNNAMED_DTYPE, warnings=(*geometry.warnings, note))


# The value of `kv_cache_dtype` names no layout by itself where a model's latents are sparse: `fp8` means packed records
# on one GPU and plain elements on another (rules of vLLM 0.32's choice of an attention backend; field report A18).
_PACKED, _PLAIN = "fp8_ds_mla", "fp8_e4m3"
_BOUNDARY_LAYERS = 2  # on either side, in formats that leave them alone
# Architectures whose cache is fp8 on GPUs of compute capability 10.x where no dtype is given.
_EIGHT_BITS_ON_BLACKWELL = ("GlmMoeDsaForCausalLM",)


def served_cache_dtype(geometry: ModelGeometry, kv_cache_dtype: str, cuda_capability: int | None = None) -> str:
    """The `kv_cache_dtype` with a server's layout: for sparse latents `fp8` becomes `fp8_ds_mla` or `fp8_e4m3`.

    DeepSeek V4 is packed unless a plain dtype is asked for.

    Args:
        geometry: the model.
        kv_cache_dtype: as it was given.
        cuda_capability: ten times the compute capability of the GPU (90: Hopper); 0: no CUDA; None: not known.
    """
    if kv_cache_dtype == "auto":
        kv_cache_dtype = geometry.checkpoint_cache_dtype or "auto"
    if geometry.has_records and kv_cache_dtype in ("auto", "fp8"):
        return _PACKED
    if not geometry.has_sparse_latents:
        return kv_cache_dtype
    major = None if cuda_capability is None else cuda_capability // 10
    if major == 12 and kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"):
        return _PACKED
    if major == 10 and kv_cache_dtype == "auto" and geometry.architecture in _EIGHT_BITS_ON_BLACKWELL:
        return _PLAIN
    if kv_cache_dtype != "fp8":
        return kv_cache_dtype
    is_packed = major not in (10, 0) and _latent_size(geometry) in PACKED_LATENT_SIZES
    return _PACKED if is_packed else _PLAIN


def cache_notes(geometry: ModelGeometry, given: str, served: str) -> tuple[str, ...]:
    """Sentences about the layout: which one was taken, and sizes that were rounded.

    Args:
        geometry: the model.
        given: the `kv_cache_dtype` as it was given.
        served: the one with its layout (`served_cache_dtype`).
    """
    notes = (*_layout_notes(geometry, given, served), *_rounding_notes(geometry, served))
    if given != "auto" or geometry.checkpoint_cache_dtype is None:
        return notes
    return (f"kv_cache_dtype {served}, from the checkpoint's quantization_config", *notes)


def boundary_warning(geometry: ModelGeometry, served: str) -> str | None:
    """What a format with unquantised boundary layers needs beyond what is counted; None for other formats.

    A server leaves the first and last two layers of a model without states in the model's dtype.
    """
    if served not in KEEPS_BOUNDARY_LAYERS or geometry.has_states or geometry.dtype is None:
        return None
    count = geometry.num_hidden_layers
    side = min(_BOUNDARY_LAYERS, count // 2)
    layers = sorted({*range(side), *range(count - side, count)})
    storage, plain = geometry.cache_format(served), geometry.cache_format("auto")
    more = sum(
        cache.floor_bytes(1, plain) - cache.floor_bytes(1, storage)
        for index in layers
        for cache in geometry.layers[index]
    )
    return (
        f"kv_cache_dtype {served} is counted in all {count} layers; vLLM leaves layers {', '.join(map(str, layers))} in"
        f" {geometry.dtype}, which are {more:,} B a token more"
    )


def _latent_size(geometry: ModelGeometry) -> int | None:
    latents = (cache for cache in geometry.caches() if isinstance(cache, LatentCache) and cache.fixed_dtype is None)
    return next((cache.head_size for cache in latents), None)


def _layout_notes(geometry: ModelGeometry, given: str, served: str) -> tuple[str, ...]:
    if geometry.has_records:
        records = {
            f"{record.bytes_per_token} B ({record.formula})"
            for cache in geometry.caches()
            if isinstance(cache, VectorCache) and cache.fixed_dtype is None
            for record in cache.records
            if record.name == served
        }
        if not records:
            return ()
        why = ", as vLLM 0.32 does unless a plain dtype is given" if given != served else ""
        return (f"kv_cache_dtype {given} packs vectors in records ({served}) of {' or '.join(sorted(records))}{why}",)
    if not geometry.has_sparse_latents or not served.startswith(("fp8", "nvfp4")):
        return ()
    size = _latent_size(geometry)
    record = PACKED_LATENTS.get(served)
    if record is not None:
        taken = f"packed records ({record.name}), {record.bytes_per_token} B a token and layer: {record.formula}"
        other = f"; {_PLAIN} is the plain layout, {size} B" if given != served else ""
    else:
        taken = f"plain {served}, {size} B a token and layer"
        other = f"; {_PACKED} is the packed layout, {PACKED_LATENTS[_PACKED].bytes_per_token} B"
    why = ", as vLLM 0.32 chooses on such a GPU" if given != served else ""
    return (f"kv_cache_dtype {given} stores latents as {taken}{why}{other}",)


def _rounding_notes(geometry: ModelGeometry, served: str) -> tuple[str, ...]:
    storage = geometry.cache_format(served)
    per_scale = None if storage.scales is None else storage.scales.elements_per_scale
    if per_scale is None or storage.scales is None:
        return ()
    sizes: set[int] = set()
    for cache in geometry.caches():
        if isinstance(cache, AttentionCache):
            sizes |= {cache.head_size, cache.head_size_v}
        elif isinstance(cache, LatentCache) and cache.fixed_dtype is None:
            sizes.add(cache.head_size)
    return tuple(
        f"kv_cache_dtype {served}: {size} elements are {size / per_scale:g} groups of {per_scale}, so"
        f" {-(-size // per_scale)} scales are counted for each vector"
        for size in sorted(sizes)
        if size % per_scale
    )
