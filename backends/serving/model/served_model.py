"""Reads from a transformers model what each layer caches and how long a request may be, and plans its pool.

    geometry = transformers_geometry(model)
    backend.initialize(kv_cache_config(geometry, num_blocks=1000, block_size=16))

Models that the pool or its attention kernel cannot serve are refused here, before anything is allocated.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ....core.errors import InputError
from ....core.models.architecture import architectures
from ....core.models.config_fields import ConfigFields
from ....core.models.geometry import ModelGeometry, geometry_from_config
from ....core.models.layer_cache import AttentionCache
from ....core.planner.groups import group_layers
from ....core.planner.layout import KVCacheConfig, KVCacheLayout, lay_out

# Config fields with which a layer does not simply store one key and value of its own per token.
_REFUSED_FIELDS = {
    "is_encoder_decoder": "is an encoder and a decoder; the encoder's keys do not grow token by token",
    "add_cross_attention": "attends to another sequence; those keys do not grow token by token",
    "num_kv_shared_layers": "lets layers read the keys and values of earlier ones",
    "use_bidirectional_attention": "attends to later tokens, whose keys are not there when a token is computed",
}


@attrs.frozen
class ServedLayer:
    """One decoder layer as attention sees it."""

    name: str  # name of its cache in the plan and in the backend
    window: int | None  # tokens that a query sees, itself included; None: all


def transformers_geometry(model: Any) -> ModelGeometry:
    """Return the geometry of a transformers model: its config read by `geometry_from_config`, its weights' dtype.

    The geometry's `max_position_embeddings` is the longest request that can be served (`length_limit`).

    Args:
        model: a causal language model (`PreTrainedModel` with a head).

    Raises:
        InputError: an unknown architecture, a missing field that decides the cache, or caches that a pool of plain
            keys and values cannot hold.
    """
    architecture = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    for config in (model.config, text_config):
        for field, reason in _REFUSED_FIELDS.items():
            if getattr(config, field, None):
                raise InputError(
                    f"{architecture} cannot be served: it {reason} ({field} is {getattr(config, field)!r}); serve a "
                    "decoder whose layers each keep their own keys and values"
                )
    values = {
        **model.config.to_dict(),
        "architectures": [architecture],
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    architectures.get(architecture)  # a server computes with more than the fields that a reader by fields asks for
    geometry = geometry_from_config(values, architecture, f"the config of {architecture}")
    served_layers(geometry)
    # The limit has the scaling of positions in it.
    limit = length_limit(model, geometry.max_position_embeddings).num_tokens
    scaling: dict[str, Any] = {"rope_parameters": None, "rope_scaling": None}
    fields = {**geometry.fields.values, **scaling, "max_position_embeddings": limit}
    return attrs.evolve(geometry, fields=ConfigFields(fields, geometry.fields.place))


def served_layers(geometry: ModelGeometry) -> tuple[ServedLayer, ...]:
    """Return the decoder's layers in order, named as in `ModelGeometry.layer_specs`.

    Raises:
        InputError: a layer does not store keys and values of every token or of a sliding window.
    """
    layers: list[ServedLayer] = []
    for index, caches in enumerate(geometry.layers):
        cache = caches[0] if len(caches) == 1 else None
        if not isinstance(cache, AttentionCache) or cache.attention_chunk_size is not None:
            kinds = ", ".join(type(cache).__name__ for cache in caches) or "nothing"
            raise InputError(
                f"{geometry.name}: layer {index} stores {kinds}; live serving has attention kernels only for keys and "
                "values of every token or of a sliding window"
            )
        layers.append(ServedLayer(f"layers.{index}.attn", cache.sliding_window))
    return tuple(layers)


def kv_cache_config(
    geometry: ModelGeometry,
    *,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str = "auto",
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    disable_hybrid_kv_cache_manager: bool = False,
) -> KVCacheConfig:
    """Plan the pool of one rank for `CudaBackend.initialize`: a group of full attention layers, one of windowed ones.

    Args:
        geometry: from `transformers_geometry`.
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        kv_cache_dtype: `auto` is the dtype of the model's weights.
        layout: physical order of the axes; the default suits every `CacheArrangement` that keeps tokens outside heads.
        disable_hybrid_kv_cache_manager: size windowed layers like full ones, in one group.

    Raises:
        InputError: an unknown dtype, layers that cannot share one pool, or a layout that cannot hold the pages.
    """
    specs = geometry.layer_specs(block_size, kv_cache_dtype)
    return lay_out(group_layers(specs, layout, disable_hybrid_kv_cache_manager), num_blocks, layout)


@attrs.frozen
class LengthLimit:
    """The longest request that a model can be served with."""

    num_tokens: int | None  # tokens of prompt and output; None: the model's config does not say
    reason: str  # why it is the limit, and what to do; a clause that follows "and"
    is_longrope: bool = False  # whether rotary scaling of the type `longrope` decides it

    def check(self, num_tokens: int, what: str) -> None:
        """Raise `InputError` if `num_tokens` exceeds the limit; `what` names it in the error."""
        if self.num_tokens is not None and num_tokens > self.num_tokens:
            raise InputError(f"{what} is {num_tokens:,}, and {self.reason}")


def length_limit(model: Any, max_position_embeddings: int | None) -> LengthLimit:
    """Return the limit of a transformers model; `max_position_embeddings` is that of its config.

    With rotary scaling of the type `longrope` it is the original length, where the scaling starts: for longer requests,
    transformers rotates all keys of a forward pass differently, those of shorter requests too, so a request's output
    would depend on the others in its batch.
    """
    name = type(model).__name__
    text_config = model.config.get_text_config(decoder=True)
    originals = [
        rope.get("original_max_position_embeddings") or getattr(text_config, "original_max_position_embeddings", None)
        for rope in _rotary_parameters(text_config)
        if rope.get("rope_type") == "longrope"
    ]
    known = [limit for limit in originals if limit is not None]
    if known and (max_position_embeddings is None or min(known) <= max_position_embeddings):
        limit = min(known)
        reason = (
            f"{name} has rotary scaling of the type longrope, which is served up to its original length of {limit:,} "
            "tokens (original_max_position_embeddings): beyond, what one request is answered would depend on the "
            f"others in its batch; set max_model_len to {limit} at most, or serve a model whose positions are scaled "
            "alike at every length (yarn, llama3, linear)"
        )
        return LengthLimit(limit, reason, is_longrope=True)
    if max_position_embeddings is None:
        return LengthLimit(None, "")
    return LengthLimit(
        max_position_embeddings,
        f"{name} was made for at most {max_position_embeddings:,} (max_position_embeddings); set max_model_len to "
        f"{max_position_embeddings} at most",
    )


def _rotary_parameters(text_config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary parameters of all layers, or of each kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
        return
    for of_kind in parameters.values():
        if isinstance(of_kind, Mapping):
            yield of_kind
