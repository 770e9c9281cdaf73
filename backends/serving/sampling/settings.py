"""How the output of one request is chosen and where it ends, checked where it is given.

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
# A step's values of top_k are one int64 tensor: a larger one would fail the step, and with it everybody's requests.
MAX_TOP_K = (1 << 63) - 1
# OpenAI's bounds.
MAX_PENALTY = 2
MAX_LOGIT_BIAS = 100
# Far beyond any use, and near enough to 1 that no logit becomes infinite by it.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.001, 1000


def _whole_number(setting: str) -> Callable[[SupportsIndex], int]:
    """A converter. What is none would be noticed in the engine's thread only, and fail everybody's requests."""

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
    """How the output of one request is chosen and where it ends.

    Attributes:
        max_tokens: output tokens at most.
        min_tokens: output tokens before which nothing ends the output: until then a token that would end it is never
            chosen; stop texts are looked for in the text behind.
        temperature: of the distribution; 0: always the likeliest token (greedy).
        top_p: the smallest set of likeliest tokens whose probabilities reach it is drawn from; 1: all.
        top_k: as many of the likeliest tokens are drawn from; 0: all.
        min_p: tokens less likely than this share of the likeliest one's probability are not drawn; 0: all are.
        presence_penalty: taken off the logit of every token that is in the output so far.
        frequency_penalty: taken off as often as the token is in the output so far.
        repetition_penalty: logits of tokens that are in the prompt or in the output so far are divided by it where
            they are above 0, and else multiplied; 1: none.
        logit_bias: token -> what is added to its logit, or such pairs; kept as pairs in the order of the tokens.
        seed: of the draws; None: the engine gives the request one of its own.
        stop: texts that end the output; what follows their beginning is not part of it.
        stop_token_ids: tokens that end the output, beside the model's end-of-sequence tokens; each is kept once.
        ignore_eos: the model's end-of-sequence tokens do not end the output.
        logprobs: how many of the likeliest tokens are reported with each token and its own log probability (of the
            model's distribution, before anything above changes it); None: neither is.

    Raises:
        SettingError: a value out of its bounds, or of another kind; names the setting, the value and the bounds.
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
        # A finite number, which also a whole number can exceed.
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
        """The same settings with another seed, 0 or more and below `NUM_SEEDS`; the rest is shared, not looked at."""
        changed = copy.copy(self)
        object.__setattr__(changed, "seed", seed)
        return changed

    def says_the_same_of_tokens(self, other: "SamplingSettings") -> bool:
        """Whether both share what they say of tokens and stop texts. Lists that are merely equal are not compared."""
        return (
            self.stop is other.stop
            and self.stop_token_ids is other.stop_token_ids
            and self.logit_bias is other.logit_bias
            and self.min_tokens == other.min_tokens
            and self.ignore_eos == other.ignore_eos
        )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are too unlikely to be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were seen before get other logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1


# What settings say of single tokens, in the form in which every step asks for it.


@attrs.frozen(eq=False)
class TokenRules:
    """Made once for all outputs whose settings say the same of tokens: lists may be as long as a vocabulary.

    Attributes:
        ends: tokens that end an output.
        held_back: int64 `[num_tokens]`, those of them that cannot come in its first `min_tokens` tokens: all or none.
        biased: int64 `[num_biased]`, tokens whose logits are biased.
        biases: float64 `[num_biased]`.
    """

    ends: frozenset[int]
    held_back: NDArray[np.int64]
    biased: NDArray[np.int64]
    biases: NDArray[np.float64]

    @classmethod
    def of(cls, settings: SamplingSettings, eos_token_ids: Collection[int] = ()) -> "TokenRules":
        """The rules of a request; `eos_token_ids` are the model's tokens that end an output."""
        ends = frozenset(settings.stop_token_ids).union(() if settings.ignore_eos else eos_token_ids)
        return cls(
            ends=ends,
            held_back=np.array(sorted(ends) if settings.min_tokens else (), dtype=np.int64),
            biased=np.array([token_id for token_id, _ in settings.logit_bias], dtype=np.int64),
            biases=np.array([bias for _, bias in settings.logit_bias], dtype=np.float64),
        )
