"""What a model stores per token and how many parameters it has: from a Hugging Face config.json, or built in by name.

    >>> geometry = builtin_geometry("llama-3.1-8b")
    >>> geometry.parameters
    8030261248
    >>> geometry.sequence_bytes(4096, "bf16").total
    536870912

An unknown architecture is refused, and a missing field is named: nothing about a model is guessed.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from ..errors import InputError
from ..planner.cache_dtype import CacheFormat, cache_format, canonical_dtype
from ..planner.specs import KVCacheSpec
from .catalog import ALIASES, builtin_configs
from .dense import DENSE_ARCHITECTURES, GEMMA4_ARCHITECTURES
from .described import described_caches
from .latent import LATENT_ARCHITECTURES
from .layer_cache import LayerCache, LayerCaches, SequenceBytes, StateCache, layer_specs, sequence_bytes
from .linear import LINEAR_ARCHITECTURES
from .moe import MOE_ARCHITECTURES
from .parts import Architecture, ConfigFields, num_layers
from .weights import ModelWeights


def known_architectures() -> dict[str, Architecture]:
    """Every architecture that can be read, by the name in config.json's `architectures`."""
    return {
        **DENSE_ARCHITECTURES,
        **MOE_ARCHITECTURES,
        **GEMMA4_ARCHITECTURES,
        **LATENT_ARCHITECTURES,
        **LINEAR_ARCHITECTURES,
    }


@attrs.frozen(kw_only=True)
class ModelGeometry:
    """One model.

    Attributes:
        name: as asked for.
        architecture: from config.json's `architectures`.
        fields: the decoder's part of the config.
        layers: what each layer stores; empty for a layer that stores nothing.
        dtype: of the unquantised weights and of an `auto` cache; None where the config does not say.
        quantization_config: of the weights, as in the config; never changes the cache.
        reader: how the architecture is read.
        from_class: fields that the config leaves out and that have their class's default, with the value.
    """

    name: str
    architecture: str
    fields: ConfigFields
    layers: LayerCaches
    dtype: str | None
    quantization_config: Mapping[str, Any] | None
    reader: Architecture
    from_class: tuple[str, ...] = ()

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the decoder, draft layers not counted."""
        return len(self.layers)

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest sequence the model was made for; None where the config does not say."""
        for name in ("max_position_embeddings", "n_positions", "model_max_length"):
            if self.fields.has(name):
                return self.fields.integer(name)
        return None

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.fields.integer("hidden_size", "n_embd")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.fields.integer("vocab_size")

    @functools.cached_property
    def weights(self) -> ModelWeights:
        """The parameters, matrix by matrix.

        Raises:
            InputError: fields that decide them are missing (named), or the architecture's parameters are not known.
        """
        if self.reader.weights is None:
            raise InputError(
                f"{self.name}: the parameters of {self.architecture} are not known here"
                f" ({self.reader.weights_unknown}); give the weights' bytes per GPU (--weights-bytes)"
            )
        try:
            weights = self.reader.weights(self.fields)
        except InputError as error:
            raise InputError(
                f"{error}; so the parameters of {self.name} cannot be counted: give the weights' bytes per GPU"
                " (--weights-bytes)"
            ) from error
        return attrs.evolve(weights, left_out=self.reader.left_out)

    @property
    def parameters(self) -> int:
        """Parameters of the decoder, tied ones once (golden/model_geometry.jsonl).

        Raises:
            InputError: as `weights`.
        """
        return self.weights.parameters

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of fixed size a sequence."""
        return any(isinstance(cache, StateCache) for caches in self.layers for cache in caches)

    def cache_format(self, kv_cache_dtype: str) -> CacheFormat:
        """The storage format of `kv_cache_dtype`; `auto` is the model's own dtype.

        Raises:
            InputError: the dtype is unknown, or `auto` and the config names none.
        """
        return cache_format(kv_cache_dtype, self.dtype)

    def layer_specs(self, block_size: int, kv_cache_dtype: str) -> Mapping[str, KVCacheSpec]:
        """The whole model's caches as pages of `block_size` tokens, by layer name; divide them by TP afterwards."""
        return layer_specs(self.layers, block_size, self.cache_format(kv_cache_dtype))

    def sequence_bytes(self, num_tokens: int, kv_cache_dtype: str) -> SequenceBytes:
        """What one sequence of `num_tokens` tokens occupies at least, TP 1 (golden/model_kv_bytes.jsonl)."""
        return sequence_bytes(self.layers, num_tokens, self.cache_format(kv_cache_dtype))

    def bytes_per_token_formula(self, kv_cache_dtype: str) -> tuple[str, ...]:
        """One line for each kind of layer: how many there are, and what one of them stores per token."""
        counts: dict[LayerCache, int] = {}
        for caches in self.layers:
            for cache in caches:
                counts[cache] = counts.get(cache, 0) + 1
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
        name: what to call the model.
        place: where the config came from, for errors.

    Raises:
        InputError: no architecture, one that is not known here, or a field that decides the cache is missing.
    """
    top = ConfigFields(config, place)
    architectures = top.items("architectures")
    if len(architectures) != 1 or not isinstance(architectures[0], str):
        raise InputError(f"{place}: architectures is {architectures!r}; expected the name of one architecture")
    architecture = architectures[0]
    reader = known_architectures().get(architecture)
    if reader is None:
        raise InputError(
            f"{place}: architecture {architecture!r} is not known here, so what its layers store is not known either;"
            f" known are {', '.join(sorted(known_architectures()))}"
        )
    fields = top.section("text_config") or top
    left_out = {name: value for name, value in reader.class_defaults.items() if not fields.has(name)}
    fields = ConfigFields({**fields.values, **left_out}, fields.place)
    dtype = fields.text("dtype") or fields.text("torch_dtype") or top.text("dtype") or top.text("torch_dtype")
    quantization = top.section("quantization_config") or fields.section("quantization_config")
    layers = tuple(tuple(caches) for caches in reader.caches(fields))
    if len(layers) != num_layers(fields):
        raise InputError(f"{place}: {len(layers)} layers are described, num_hidden_layers is {num_layers(fields)}")
    return ModelGeometry(
        name=name,
        architecture=architecture,
        fields=fields,
        layers=layers,
        dtype=None if dtype is None else canonical_dtype(dtype),
        quantization_config=None if quantization is None else quantization.values,
        reader=reader,
        from_class=tuple(f"{name} {value:,}" for name, value in left_out.items()),
    )


def geometry_from_description(document: Mapping[str, Any], name: str, place: str) -> ModelGeometry:
    """A model described by `kind` and `fields` instead of a config: what it stores, but not its parameters.

    Raises:
        InputError: the description lacks one of the two, or the kind's fields are incomplete.
    """
    top = ConfigFields(document, place)
    kind, fields = top.text("kind"), top.section("fields")
    if kind is None or fields is None:
        raise InputError(f"{place}: a description needs kind and fields")
    # The length limit stands beside the fields in a description, inside them in a config.
    limit = document.get("max_position_embeddings")
    values = fields.values if limit is None else {"max_position_embeddings": limit, **fields.values}
    return ModelGeometry(
        name=name,
        architecture=kind,
        fields=ConfigFields(values, fields.place),
        layers=described_caches(kind, fields),
        dtype=None if (dtype := top.text("dtype")) is None else canonical_dtype(dtype),
        quantization_config=None,
        reader=Architecture(
            caches=lambda described: described_caches(kind, described),
            weights=None,
            weights_unknown="a description of caches says nothing of them",
        ),
    )


def builtin_geometry(name: str) -> ModelGeometry:
    """A built-in model, by its short name (`llama-3.1-8b`) or by a hub id of it (`meta-llama/Llama-3.1-8B-Instruct`).

    Raises:
        InputError: no built-in model of that name; close names are listed.
    """
    configs = builtin_configs()
    short = catalogue_name(name)
    if short is None:
        from difflib import get_close_matches

        close = get_close_matches(_bare(name), configs, n=6, cutoff=0.4)
        raise InputError(
            f"no built-in model is called {name!r}; give a path to its config.json, or one of"
            f" {', '.join(close or configs)} (with --quantization for a quantised checkpoint)"
        )
    return geometry_from_config(configs[short], short, f"built-in {short}")


_TUNINGS = frozenset({"instruct", "it", "chat", "hf", "base", "thinking", "pt", "v0.1", "v0.3", "2407", "2501", "2507"})


def catalogue_name(name: str) -> str | None:
    """The built-in name behind a hub id: organisation and tuning suffixes left away; None if there is none.

    Any other suffix may stand for another size, architecture or quantisation, so it is no match.
    """
    words = _bare(name).split("-")
    while True:
        wanted = "-".join(words)
        wanted = ALIASES.get(wanted, wanted)
        if wanted in builtin_configs():
            return wanted
        if len(words) < 2 or words[-1] not in _TUNINGS:
            return None
        words.pop()


def _bare(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower().replace("_", "-")


def load_geometry(model: str) -> ModelGeometry:
    """A model from a config.json, from a folder that holds one, or built in by name.

    Raises:
        InputError: the file cannot be read or is no JSON object, or there is no such built-in model.
    """
    import json

    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json" and not path.is_file():
        return builtin_geometry(model)
    try:
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
    return geometry_from_config(document, name, str(path))
