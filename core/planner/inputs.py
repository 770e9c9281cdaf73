"""The planner's question: layers with their specs, ranks with their memory, and the limits of serving."""

from collections.abc import Mapping

import attrs

from ..errors import InputError, non_negative, one_of, positive
from .layout import KVCacheLayout
from .specs import KVCacheSpec, ServingLimits, StateCacheMode


@attrs.frozen(kw_only=True)
class PlanInputs:
    """Everything that decides how many blocks fit on one engine (each data-parallel rank is a separate engine).

    Attributes:
        layer_specs: layer name -> what one rank stores of it (heads already divided), in registration order.
        available_bytes: memory for the KV cache, rank by rank; may be negative, which is then refused with the numbers.
        rank_layers: layer names that each rank holds (pipeline stages); None: every rank holds all.
        max_model_len: longest request, tokens; with `auto_fit_max_model_len` the upper bound of the search.
        auto_fit_max_model_len: lower `max_model_len` to the largest that fits (`max_model_len` -1 of vLLM).
        enable_prefix_caching: decides at which granularity prefixes are hashed.
        block_size: the engine's `block_size` option; None: that of the layers.
        max_in_flight_tokens: concurrent batches x max_num_batched_tokens; windowed and chunked layers need it.
        max_encoder_tokens: longest encoder input; cross attention needs it.
        decode_context_parallel_size: ranks that the tokens of attention layers are spread over.
        state_cache_mode: when state layers keep snapshots; they need it.
        layout: physical order of the cache's axes.
        disable_hybrid_kv_cache_manager: size windowed layers like full attention.
        num_gpu_blocks_override: blocks of the pool, whatever would fit.
        validate_override: refuse an override that takes more than `available_bytes`; vLLM accepts any.
        cap_to_max_num_seqs: limit the pool to what this many requests of `max_model_len` need (A08).
    """

    layer_specs: Mapping[str, KVCacheSpec] = attrs.field(converter=dict[str, KVCacheSpec])
    available_bytes: tuple[int, ...] = attrs.field(converter=tuple)
    rank_layers: tuple[tuple[str, ...], ...] | None = None
    max_model_len: int = attrs.field(validator=positive)
    auto_fit_max_model_len: bool = False
    enable_prefix_caching: bool
    block_size: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    max_in_flight_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    max_encoder_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(non_negative))
    decode_context_parallel_size: int = attrs.field(default=1, validator=positive)
    state_cache_mode: StateCacheMode | None = attrs.field(
        default=None, validator=attrs.validators.optional(one_of("none", "align", "all"))
    )
    layout: KVCacheLayout = KVCacheLayout.LBNHC
    disable_hybrid_kv_cache_manager: bool = False
    num_gpu_blocks_override: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    validate_override: bool = True
    cap_to_max_num_seqs: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))

    def __attrs_post_init__(self) -> None:
        if not self.layer_specs:
            raise InputError("layer_specs is empty: no layer stores a KV cache, so there is nothing to plan")
        if not self.available_bytes:
            raise InputError("available_bytes is empty: give the memory of at least one rank")
        if fractional := [value for value in self.available_bytes if value != int(value)]:
            raise InputError(f"available_bytes holds {fractional[0]!r}; memory is counted in whole bytes")
        if self.rank_layers is not None:
            _check_rank_layers(self.rank_layers, self.layer_specs, len(self.available_bytes))

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine: tensor-parallel x pipeline-parallel."""
        return len(self.available_bytes)

    def layers_of_rank(self, rank: int) -> tuple[str, ...]:
        """Layer names that `rank` holds."""
        return tuple(self.layer_specs) if self.rank_layers is None else self.rank_layers[rank]

    @property
    def limits(self) -> ServingLimits:
        """The limits that bound the blocks of one request."""
        return ServingLimits(
            max_model_len=self.max_model_len,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_encoder_tokens=self.max_encoder_tokens,
            decode_context_parallel_size=self.decode_context_parallel_size,
            state_cache_mode=self.state_cache_mode,
        )


def _check_rank_layers(
    rank_layers: tuple[tuple[str, ...], ...], layer_specs: Mapping[str, KVCacheSpec], num_ranks: int
) -> None:
    if len(rank_layers) != num_ranks:
        raise InputError(f"rank_layers names {len(rank_layers)} ranks, available_bytes {num_ranks}")
    for rank, names in enumerate(rank_layers):
        unknown = [name for name in names if name not in layer_specs]
        if unknown or len(set(names)) < len(names):
            raise InputError(
                f"rank_layers[{rank}] holds unknown or repeated layers: {', '.join(unknown) or 'a name occurs twice'}"
            )
    held = {name for names in rank_layers for name in names}
    if missing := [name for name in layer_specs if name not in held]:
        raise InputError(f"no rank holds the layers {', '.join(missing)}")
