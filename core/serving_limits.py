"""What bounds the blocks that one request can hold, whatever the model."""

from typing import Literal

import attrs

from .validators import non_negative, one_of, positive

StateCacheMode = Literal["none", "align", "all"]
"""When state layers keep snapshots for prefix caching: never, at aligned boundaries, or at every block."""


@attrs.frozen(kw_only=True)
class ServingLimits:
    """What bounds the blocks that one request can hold at once.

    Attributes:
        max_model_len: longest sequence of one request, tokens.
        max_in_flight_tokens: concurrent batches x max_num_batched_tokens; only windowed and chunked layers need it.
        max_encoder_tokens: longest encoder input of one request, tokens; only cross attention needs it.
        decode_context_parallel_size: ranks that the tokens of full-attention layers are spread over (DCP).
        state_cache_mode: snapshots that state layers keep; only state layers need it.
    """

    max_model_len: int = attrs.field(validator=positive)
    max_in_flight_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    max_encoder_tokens: int | None = attrs.field(default=None, validator=attrs.validators.optional(non_negative))
    decode_context_parallel_size: int = attrs.field(default=1, validator=positive)
    state_cache_mode: StateCacheMode | None = attrs.field(
        default=None, validator=attrs.validators.optional(one_of("none", "align", "all"))
    )
