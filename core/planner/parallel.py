"""How parallelism divides a model's KV cache: heads over tensor-parallel ranks, layers over pipeline stages."""

from collections.abc import Mapping

import attrs

from ..errors import InputError
from .specs import AttentionSpec, KVCacheSpec, MambaLikeSpec, StateArray


def kv_heads_per_rank(num_kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads that one tensor-parallel rank stores (field report A04).

    Heads are split if they divide evenly. With more ranks than heads every rank stores a copy of one head, so that the
    capacity in tokens stops growing with the number of ranks.

    Raises:
        InputError: neither number divides the other.
    """
    if num_kv_heads % tensor_parallel_size == 0:
        return num_kv_heads // tensor_parallel_size
    if tensor_parallel_size % num_kv_heads == 0:
        return 1
    near = [size for size in range(1, 2 * num_kv_heads + 1) if num_kv_heads % size == 0 or size % num_kv_heads == 0]
    raise InputError(
        f"tensor_parallel_size {tensor_parallel_size} and {num_kv_heads} KV heads: neither divides the other, so heads "
        f"can be neither split nor replicated evenly; sizes that work are {', '.join(map(str, near))} and further "
        f"multiples of {num_kv_heads}"
    )


def tensor_parallel_spec(spec: KVCacheSpec, tensor_parallel_size: int) -> KVCacheSpec:
    """The part of a layer that one tensor-parallel rank stores.

    Every rank stores latents and opaque formats whole, because they serve all heads; the arrays of a state are divided
    along their `tp_axis`.

    Raises:
        InputError: heads or a state's axis cannot be divided.
    """
    if isinstance(spec, AttentionSpec):
        return attrs.evolve(spec, num_kv_heads=kv_heads_per_rank(spec.num_kv_heads, tensor_parallel_size))
    if isinstance(spec, MambaLikeSpec):
        return attrs.evolve(spec, states=tuple(_state_shard(array, tensor_parallel_size) for array in spec.states))
    return spec


def _state_shard(array: StateArray, tensor_parallel_size: int) -> StateArray:
    if array.tp_axis is None:
        return array
    size = array.shape[array.tp_axis]
    if size % tensor_parallel_size:
        raise InputError(
            f"tensor_parallel_size {tensor_parallel_size} does not divide axis {array.tp_axis} ({size}) of the state "
            f"{array.name!r} with shape {array.shape}"
        )
    shape = list(array.shape)
    shape[array.tp_axis] = size // tensor_parallel_size
    return attrs.evolve(array, shape=tuple(shape))


def layers_per_stage(num_layers: int, pipeline_parallel_size: int) -> tuple[int, ...]:
    """Number of layers of each pipeline stage, as vLLM divides them.

    Left-over layers go one each to the stages before the last, from the back: the last stage also holds the final norm
    and the output embedding, the first the input embedding.

    Raises:
        InputError: more stages than layers.
    """
    if not 1 <= pipeline_parallel_size <= num_layers:
        raise InputError(
            f"pipeline_parallel_size is {pipeline_parallel_size} for {num_layers} layers; it must be 1 to {num_layers}"
        )
    even, left_over = divmod(num_layers, pipeline_parallel_size)
    stages = [even] * pipeline_parallel_size
    for place_from_back in range(2, left_over + 2):
        stages[-place_from_back] += 1
    return tuple(stages)


def tensor_parallel_layers(layer_specs: Mapping[str, KVCacheSpec], tensor_parallel_size: int) -> dict[str, KVCacheSpec]:
    """Apply `tensor_parallel_spec` to every layer.

    Raises:
        InputError: as `tensor_parallel_spec`, naming the layer.
    """
    shards: dict[str, KVCacheSpec] = {}
    for name, spec in layer_specs.items():
        try:
            shards[name] = tensor_parallel_spec(spec, tensor_parallel_size)
        except InputError as error:
            raise InputError(f"layer {name}: {error}") from error
    return shards
