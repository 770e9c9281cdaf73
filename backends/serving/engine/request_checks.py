"""Checks a request before a live engine queues it. `SamplingSettings` checks what needs no engine."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ....core.errors import DoesNotFitError, InputError
from ....core.keys.block_hash import token_array
from ....core.scheduler.scheduler import Scheduler
from ....core.types import Request
from ..errors import SettingError
from ..sampling.settings import SamplingSettings, TokenRules


@attrs.define(kw_only=True)
class RequestChecks:
    """Checks prompts and settings. Consecutive settings that share their token lists are checked once."""

    vocab_size: int  # all token ids are below it
    eos_token_ids: frozenset[int]  # tokens that end an output unless a request ignores them
    has_tokenizer: bool  # whether outputs have text
    policy: str
    _recent: tuple[SamplingSettings, TokenRules] | None = attrs.field(init=False, default=None, repr=False)

    def prompt(self, prompt_token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Check a prompt and return it as int64 `[num_prompt_tokens]`.

        Raises:
            InputError: it has no token, or one that the model does not have.
        """
        tokens = token_array(prompt_token_ids).astype(np.int64)
        if not len(tokens):
            raise InputError("the prompt has no tokens; it needs at least one")
        outside = (tokens < 0) | (tokens >= self.vocab_size)
        if outside.any():
            place = int(outside.argmax())
            raise InputError(
                f"prompt token {place} is {int(tokens[place])}; the model's vocabulary is 0 to {self.vocab_size - 1}"
            )
        return tokens

    def samples(self, settings: Sequence[SamplingSettings], priority: int) -> list[TokenRules]:
        """Check the settings of each output of one prompt, and return their token rules.

        Raises:
            SettingError: a setting that this engine cannot serve, or would ignore.
            InputError: there are no settings.
        """
        if not settings:
            raise InputError("no settings; give one for each output of the prompt")
        if priority and self.policy != "priority":
            raise SettingError(
                "priority",
                f"priority {priority} has no effect under the policy {self.policy!r}; leave it out, or serve with "
                "policy='priority'",
            )
        return [self._rules(each) for each in settings]

    def _rules(self, settings: SamplingSettings) -> TokenRules:
        recent = self._recent
        if recent is None or not settings.shares_token_rules(recent[0]):
            self._check_settings(settings)
            recent = self._recent = settings, TokenRules.of(settings, self.eos_token_ids)
        return recent[1]

    def _check_settings(self, settings: SamplingSettings) -> None:
        if settings.stop and not self.has_tokenizer:
            raise SettingError(
                "stop", f"stop {settings.stop!r} needs text, and this engine has no tokenizer; use stop_token_ids"
            )
        biased = [token_id for token_id, _ in settings.logit_bias]
        for name, token_ids in (("stop_token_ids", settings.stop_token_ids), ("logit_bias", biased)):
            for token_id in token_ids:
                if not 0 <= token_id < self.vocab_size:
                    raise SettingError(
                        name, f"{name} holds token {token_id}; the model's vocabulary is 0 to {self.vocab_size - 1}"
                    )
        ending = {*settings.stop_token_ids, *(() if settings.ignore_eos else self.eos_token_ids)}
        if settings.min_tokens and len(ending) == self.vocab_size:
            raise SettingError(
                "min_tokens",
                f"min_tokens is {settings.min_tokens}, and every token of the vocabulary ends the output; leave "
                "min_tokens out, or name fewer stop_token_ids",
            )


class RequestLengths:
    """The longest prompt and output that the scheduler's limits and the pool can hold.

    Attributes:
        num_tokens: most tokens of prompt and output; the last output token is never computed, and not counted.
        num_prompt_tokens: most tokens of a prompt.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Compute the limits once; neither the scheduler's limits nor the pool change."""
        self._scheduler = scheduler
        self.num_tokens = scheduler.allocator.max_fitting_tokens()
        self.num_prompt_tokens = self.num_tokens
        if not scheduler.config.enable_chunked_prefill:
            self.num_prompt_tokens = min(self.num_tokens, scheduler.config.max_num_batched_tokens)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be held, and count it as rejected.

        Raises:
            DoesNotFitError: with the numbers.
        """
        try:
            self._scheduler.check_fits(request)
        except DoesNotFitError:
            self._scheduler.stats.num_rejected += 1
            raise

    def most_output_tokens(self, num_prompt_tokens: int) -> int:
        """Return the largest `max_tokens` after a prompt of this length; 0 if the prompt alone is too long."""
        return self.num_tokens + 1 - num_prompt_tokens if num_prompt_tokens <= self.num_prompt_tokens else 0
