"""From a transformers model to a plan: what each of its layers stores, in block-table groups, and where it lies.

    geometry = transformers_geometry(model)
    backend.initialize(kv_cache_config(geometry, num_blocks=1000, block_size=16))

What the pool or its attention kernel cannot hold is refused here, before anything is allocated.
"""

from typing import Any

import attrs

from ....core.errors import InputError
from ....core.models.geometry import ModelGeometry, geometry_from_config
from ....core.models.layer_cache import AttentionCache
from ....core.models.config_fields import ConfigFields
from ....core.planner.groups import group_layers
from ....core.planner.layout import KVCacheConfig, KVCacheGroup, KVCacheLayout, lay_out
from ..engine.lengths import length_limit

# Fields of a config under which a token's keys and values are not just its own layer's, one of each a token.
_REFUSED_FIELDS = {
    "is_encoder_decoder": "is an encoder and a decoder; the encoder's keys do not grow token by token",
    "add_cross_attention": "attends to another sequence; those keys do not grow token by token",
    "num_kv_shared_layers": "lets layers read the keys and values of earlier ones",
    "use_bidirectional_attention": "attends to later tokens, whose keys are not there when a token is computed",
}


@attrs.frozen
class ServedLayer:
    """One decoder layer as attention sees it.

    Attributes:
        name: of its cache in the plan and in the backend.
        window: tokens that a query sees, itself among them; None: all.
    """

    name: str
    window: int | None


def transformers_geometry(model: Any) -> ModelGeometry:
    """What a transformers model stores: its config read by `geometry_from_config`, its weights' dtype for `auto`.

    Its `max_position_embeddings` is what the model can be served with (`length_limit`).

    Args:
        model: a causal language model (`PreTrainedModel` with a head).

    Raises:
        InputError: an architecture that is not known here, a field that decides the cache is missing, or caches that
            cannot be served from a pool of plain keys and values.
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
    geometry = geometry_from_config(values, architecture, f"the config of {architecture}")
    served_layers(geometry)
    limit = length_limit(model, geometry.max_position_embeddings).num_tokens
    if limit == geometry.max_position_embeddings:
        return geometry
    fields = {**geometry.fields.values, "max_position_embeddings": limit}
    return attrs.evolve(geometry, fields=ConfigFields(fields, geometry.fields.place))


def served_layers(geometry: ModelGeometry) -> tuple[ServedLayer, ...]:
    """The decoder's layers in order, named as in `ModelGeometry.layer_specs`.

    Raises:
        InputError: a layer that does not store keys and values of every token or of a sliding window.
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


def kv_cache_groups(
    geometry: ModelGeometry,
    *,
    block_size: int,
    kv_cache_dtype: str = "auto",
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    disable_hybrid_kv_cache_manager: bool = False,
) -> tuple[KVCacheGroup, ...]:
    """The model's block-table groups on one rank: full layers, and windows where there are any.

    Args:
        geometry: of `transformers_geometry`.
        block_size: tokens of a block.
        kv_cache_dtype: `auto` is the dtype of the model's weights.
        layout: physical order of the axes; the default suits every `CacheArrangement` that keeps tokens outside heads.
        disable_hybrid_kv_cache_manager: size windowed layers like full ones, in one group.

    Raises:
        InputError: an unknown dtype, or layers that cannot share one pool.
    """
    specs = geometry.layer_specs(block_size, kv_cache_dtype)
    return group_layers(specs, layout, disable_hybrid_kv_cache_manager)


def kv_cache_config(
    geometry: ModelGeometry,
    *,
    num_blocks: int,
    block_size: int,
    kv_cache_dtype: str = "auto",
    layout: KVCacheLayout = KVCacheLayout.LBNHC,
    disable_hybrid_kv_cache_manager: bool = False,
) -> KVCacheConfig:
    """`kv_cache_groups` laid out for `num_blocks` blocks: what `CudaBackend.initialize` takes.

    Raises:
        InputError: as `kv_cache_groups`, or a layout that cannot hold the pages.
    """
    groups = kv_cache_groups(
        geometry,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        layout=layout,
        disable_hybrid_kv_cache_manager=disable_hybrid_kv_cache_manager,
    )
    return lay_out(groups, num_blocks, layout)
