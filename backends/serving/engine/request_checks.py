"""What a live engine refuses of a request before it is queued; what needs no engine, `SamplingSettings` checks."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ....core.errors import InputError
from ....core.keys.block_hash import token_array
from ..errors import SettingError
from ..sampling.settings import SamplingSettings, TokenRules


@attrs.define(kw_only=True)
class RequestChecks:
    """What requests are checked against. Lists of tokens are looked at once for all settings in a row that share them.

    Attributes:
        vocab_size: token ids lie below it.
        eos_token_ids: tokens that end an output unless a request ignores them.
        has_tokenizer: whether outputs have text.
        policy: of the scheduler.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    has_tokenizer: bool
    policy: str
    _recent: tuple[SamplingSettings, TokenRules] | None = attrs.field(init=False, default=None, repr=False)

    def prompt(self, prompt_token_ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """The prompt as int64 `[num_prompt_tokens]`.

        Raises:
            InputError: no token, or one that the model does not have.
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
        """The rules of each output of one prompt, whose settings are checked.

        Raises:
            SettingError: one that this engine cannot serve, or would ignore.
            InputError: there are none.
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
        if recent is None or not settings.says_the_same_of_tokens(recent[0]):
            self._settings(settings)
            recent = self._recent = settings, TokenRules.of(settings, self.eos_token_ids)
        return recent[1]

    def _settings(self, settings: SamplingSettings) -> None:
        if settings.stop and not self.has_tokenizer:
            raise SettingError(
                "stop", f"stop {settings.stop!r} needs text, and this engine has no tokenizer; use stop_token_ids"
            )
        self._are_in_vocabulary("stop_token_ids", settings.stop_token_ids)
        self._are_in_vocabulary("logit_bias", [token_id for token_id, _ in settings.logit_bias])
        ending = {*settings.stop_token_ids, *(() if settings.ignore_eos else self.eos_token_ids)}
        if settings.min_tokens and len(ending) == self.vocab_size:
            raise SettingError(
                "min_tokens",
                f"min_tokens is {settings.min_tokens}, and every token of the vocabulary ends the output; leave "
                "min_tokens out, or name fewer stop_token_ids",
            )

    def _are_in_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise SettingError(
                    name, f"{name} holds token {token_id}; the model's vocabulary is 0 to {self.vocab_size - 1}"
                )
