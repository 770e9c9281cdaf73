"""How long the requests of a live engine may be: what its scheduler can ever hold, asked before a request is made."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from ....core.errors import DoesNotFitError, InputError
from ....core.scheduler.scheduler import Scheduler
from ....core.types import Request


class RequestLengths:
    """The bounds on prompt and output, as the scheduler's limits and the pool give them.

    Attributes:
        num_tokens: of prompt and output at most; the last output token is never computed, and not counted.
        num_prompt_tokens: of a prompt at most.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Made once; neither limits nor pool change."""
        self._scheduler = scheduler
        self.num_tokens = scheduler.allocator.max_fitting_tokens()
        self.num_prompt_tokens = self.num_tokens
        if not scheduler.config.enable_chunked_prefill:
            self.num_prompt_tokens = min(self.num_tokens, scheduler.config.max_num_batched_tokens)

    def check(self, request: Request) -> None:
        """Refuse what can never be held, and count it as rejected.

        Raises:
            DoesNotFitError: with the numbers.
        """
        try:
            self._scheduler.check_fits(request)
        except DoesNotFitError:
            self._scheduler.stats.num_rejected += 1
            raise

    def most_output_tokens(self, num_prompt_tokens: int) -> int:
        """The largest `max_tokens` behind such a prompt; 0 where the prompt alone is too long."""
        return self.num_tokens + 1 - num_prompt_tokens if num_prompt_tokens <= self.num_prompt_tokens else 0


# How long a request may be, as the model's positions allow, and why no longer.


@attrs.frozen
class LengthLimit:
    """The longest request that a model is served with.

    Attributes:
        num_tokens: of prompt and output; None: the model's config does not say.
        reason: why no longer, and what to do; a sentence that follows "and".
        is_longrope: rotary scaling of the type `longrope` decides it.
    """

    num_tokens: int | None
    reason: str
    is_longrope: bool = False

    def check(self, num_tokens: int, what: str) -> None:
        """Raise `InputError` if so many tokens are too long; `what` names them."""
        if self.num_tokens is not None and num_tokens > self.num_tokens:
            raise InputError(f"{what} is {num_tokens:,}, and {self.reason}")


def length_limit(model: Any, max_position_embeddings: int | None) -> LengthLimit:
    """The limit of a transformers model.

    Under rotary scaling of the type `longrope` it is the length that the scaling starts from: beyond it, transformers
    turns all keys of a forward pass otherwise, those of shorter neighbours too, so a request's output would depend on
    who is in its batch.

    Args:
        model: a causal language model.
        max_position_embeddings: what its config says that it was made for; None: nothing.
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
    """Those of all layers, or of each kind of layer."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
        return
    for of_kind in parameters.values():
        if isinstance(of_kind, Mapping):
            yield of_kind
