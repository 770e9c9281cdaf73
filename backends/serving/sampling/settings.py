"""The sampling settings of a request: how its output is chosen and where it ends.

Names and meanings are OpenAI's (`presence_penalty`, `frequency_penalty`, `logit_bias`) and vLLM's (`SamplingParams`:
`repetition_penalty`, `min_p`, `min_tokens`, `stop_token_ids`, `ignore_eos`).
"""

import copy
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import SettingError

NUM_SEEDS = 1 << 64
# A step's values of top_k are one int64 tensor: a larger value would fail the step, and thus every request.
MAX_TOP_K = (1 << 63) - 1
# OpenAI's bounds.
MAX_PENALTY = 2
MAX_LOGIT_BIAS = 100
# Far beyond any use, and close enough to 1 that no logit becomes infinite.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 1000


def _whole_number(setting: str) -> Callable[[SupportsIndex], int]:
    """Return a converter. Without it the engine's thread would find the mistake first, and fail every request."""

    def convert(value: SupportsIndex) -> int:
        try:
            return operator.index(value)
        except TypeError:
            raise SettingError(setting, f"{setting} is {value!r}; it must be a whole number") from None

    return convert


def _texts(value: "str | Sequence[str]") -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise SettingError("stop", f"stop holds {text!r}; give texts, or token ids as stop_token_ids")
    return texts


def _token_id(value: Any, setting: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise SettingError(setting, f"{setting} holds {value!r}; token ids are whole numbers") from None


def _ids(value: Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(dict.fromkeys([_token_id(each, "stop_token_ids") for each in value]))


def _biases(value: "Mapping[int, float] | Iterable[tuple[int, float]]") -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for token, bias in value.items() if isinstance(value, Mapping) else value:
        token_id = _token_id(token, "logit_bias")
        if token_id in biases:
            raise SettingError(
                "logit_bias", f"logit_bias of token {token_id} is given twice, {biases[token_id]} and {bias}; give one"
            )
        biases[token_id] = bias
    return tuple(sorted(biases.items()))


@attrs.frozen(kw_only=True)
class SamplingSettings:
    """How to choose the output of one request, and where it ends.

    Attributes:
        max_tokens: most output tokens.
        min_tokens: output tokens before the output may end: until then a token that would end it is never chosen, and
            stop texts are searched for only in the text after them.
        temperature: temperature of the distribution; 0: always the likeliest token (greedy).
        top_p: draw from the smallest set of likeliest tokens whose probabilities reach it; 1: all.
        top_k: draw from this many likeliest tokens; 0: all.
        min_p: do not draw tokens less likely than this fraction of the likeliest token's probability; 0: draw all.
        presence_penalty: subtracted from the logit of every token in the output so far.
        frequency_penalty: subtracted once for each time that the token is in the output so far.
        repetition_penalty: logits of tokens in the prompt or the output so far are divided by it if positive, else
            multiplied; 1: none.
        logit_bias: token -> value to add to its logit, or such pairs; kept as pairs in the order of the tokens.
        seed: seed of the draws; None: the engine derives one for the request.
        stop: texts that end the output, which is cut at their beginning.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens; each is kept once.
        ignore_eos: do not end the output at the model's end-of-sequence tokens.
        logprobs: number of likeliest tokens reported with each token and its own log probability (of the model's
            distribution, before the settings above change it); None: report neither.

    Raises:
        SettingError: a value is out of bounds or of another type; names the setting, the value and the bounds.
    """

    max_tokens: int = attrs.field(converter=_whole_number("max_tokens"))
    min_tokens: int = attrs.field(default=0, converter=_whole_number("min_tokens"))
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = attrs.field(default=0, converter=_whole_number("top_k"))
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_biases)
    seed: int | None = attrs.field(default=None, converter=attrs.converters.optional(_whole_number("seed")))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    logprobs: int | None = attrs.field(default=None, converter=attrs.converters.optional(_whole_number("logprobs")))

    def __attrs_post_init__(self) -> None:
        self._check("max_tokens", self.max_tokens >= 1, "at least 1")
        self._check("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens {self.max_tokens}")
        # A finite number: a whole number can be larger than every float.
        is_finite = 0 <= self.temperature <= sys.float_info.max
        self._check("temperature", is_finite, "0 (greedy) or a finite number above")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)")
        self._check("top_k", 0 <= self.top_k <= MAX_TOP_K, f"0 (all tokens) or at most {MAX_TOP_K}")
        self._check("min_p", 0 <= self.min_p <= 1, "0 (all tokens) to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._check(name, abs(getattr(self, name)) <= MAX_PENALTY, f"-{MAX_PENALTY} to {MAX_PENALTY} (0: none)")
        low, high = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        self._check("repetition_penalty", low <= self.repetition_penalty <= high, f"{low} to {high} (1: none)")
        self._check_biases()
        self._check("seed", self.seed is None or 0 <= self.seed < NUM_SEEDS, f"0 to {NUM_SEEDS - 1}")
        if "" in self.stop:
            raise SettingError(
                "stop", "a stop text is empty, which would end every output before it begins; leave it out"
            )
        self._check("logprobs", self.logprobs is None or self.logprobs >= 0, "0 (the chosen token's only) or more")

    def _check(self, name: str, is_right: bool, bounds: str) -> None:
        if not is_right:
            raise SettingError(name, f"{name} is {getattr(self, name)}; it must be {bounds}")

    def _check_biases(self) -> None:
        for token_id, bias in self.logit_bias:
            if not abs(bias) <= MAX_LOGIT_BIAS:
                raise SettingError(
                    "logit_bias",
                    f"logit_bias of token {token_id} is {bias}; it must be -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}",
                )

    def with_seed(self, seed: int) -> "SamplingSettings":
        """Return the same settings with another seed, from 0 to below `NUM_SEEDS`; the rest is shared, not checked."""
        changed = copy.copy(self)
        object.__setattr__(changed, "seed", seed)
        return changed

    def shares_token_rules(self, other: "SamplingSettings") -> bool:
        """Return whether both hold the same objects as token lists and stop texts. Equal lists are not compared."""
        return (
            self.stop is other.stop
            and self.stop_token_ids is other.stop_token_ids
            and self.logit_bias is other.logit_bias
            and self.min_tokens == other.min_tokens
            and self.ignore_eos == other.ignore_eos
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are excluded from the draw."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether the logits of seen tokens change."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


@attrs.frozen(eq=False)
class TokenRules:
    """The settings about single tokens, in the form that every step needs.

    They are made once for all outputs that share them, since lists may be as long as a vocabulary.
    """

    ends: frozenset[int]  # tokens that end an output
    # int64 `[num_tokens]`, the tokens of `ends` not allowed in the first `min_tokens` tokens: all or none.
    held_back: NDArray[np.int64]
    biased: NDArray[np.int64]  # int64 `[num_biased]`, tokens whose logits are biased
    biases: NDArray[np.float64]  # float64 `[num_biased]`

    @classmethod
    def of(cls, settings: SamplingSettings, eos_token_ids: Collection[int] = ()) -> "TokenRules":
        """Make the rules of a request; `eos_token_ids` are the model's tokens that end an output."""
        ends = frozenset(settings.stop_token_ids).union(() if settings.ignore_eos else eos_token_ids)
        return cls(
            ends=ends,
            held_back=np.array(sorted(ends) if settings.min_tokens else (), dtype=np.int64),
            biased=np.array([token_id for token_id, _ in settings.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in settings.logit_bias], dtype=np.float64),
        )
