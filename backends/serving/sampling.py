"""How the next token is chosen: settings of a request, and one draw for each output that depends on nothing else.

Output i of a request is drawn with the number `uniform(seed, i)`. So a request produces the same tokens whoever
else is in its batch, and again after it was preempted.
"""

import hashlib
import sys
from collections.abc import Sequence

import attrs
import torch

from ...core.errors import InputError

# With so many bits a draw times a sum of probabilities is always below that sum, in double precision.
_DRAW_BITS = 52
MAX_SEED = (1 << 64) - 1
# A step's values of top_k are one int64 tensor: a larger one would fail the step, and with it everybody's requests.
MAX_TOP_K = (1 << 63) - 1


def _texts(value: "str | Sequence[str]") -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _ids(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(value)


@attrs.frozen(kw_only=True)
class SamplingSettings:
    """How the output of one request is chosen and where it ends.

    Attributes:
        max_tokens: output tokens at most.
        temperature: of the distribution; 0: always the likeliest token (greedy).
        top_p: the smallest set of likeliest tokens whose probabilities reach it is drawn from; 1: all.
        top_k: as many of the likeliest tokens are drawn from; 0: all.
        seed: of the draws; None: the engine gives the request one of its own.
        stop: texts that end the output; what follows their beginning is not part of it.
        stop_token_ids: tokens that end the output, beside the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens do not end the output.
        logprobs: how many of the likeliest tokens are reported with each token and its own log probability (of the
            model's distribution, before temperature and truncation); None: neither is.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_texts)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False
    logprobs: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature <= sys.float_info.max:  # which also a whole number can exceed
            raise InputError(f"temperature is {self.temperature}; it must be 0 (greedy) or a finite number above")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1: all tokens)")
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise InputError(f"top_k is {self.top_k}; it must be 0 (all tokens) or at most {MAX_TOP_K}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InputError(f"seed is {self.seed}; it must lie in 0 to {MAX_SEED}")
        if "" in self.stop:
            raise InputError("a stop text is empty, which would end every output before it begins; leave it out")
        if self.logprobs is not None and self.logprobs < 0:
            raise InputError(f"logprobs is {self.logprobs}; it must be 0 (the chosen token's only) or more")

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


@attrs.frozen
class ChosenToken:
    """One output token.

    Attributes:
        token_id: which.
        logprob: its log probability, where asked for.
        top_logprobs: (token, log probability) of the likeliest ones, in descending order, where asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, index: int) -> float:
    """The draw for output `index` of a request: a number in [0, 1), the same on every machine."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def seed_of_request(engine_seed: int, ordinal: int) -> int:
    """The seed of the `ordinal`-th request of an engine, for requests that bring none."""
    digest = hashlib.blake2b(engine_seed.to_bytes(8, "little") + ordinal.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class ChosenTokens:
    """The tokens of one step on their way from the device."""

    def __init__(
        self, token_ids: torch.Tensor, logprobs: "dict[int, tuple[torch.Tensor, torch.Tensor | None]]"
    ) -> None:
        self._token_ids = token_ids
        # Row -> log probabilities of all tokens, and of the likeliest ones.
        self._logprobs = logprobs

    def wait(self) -> list[ChosenToken]:
        """The tokens, one a row of the logits; waits for the device."""
        chosen = [ChosenToken(token_id) for token_id in self._token_ids.tolist()]
        for row, (own, top) in self._logprobs.items():
            likeliest: tuple[tuple[int, float], ...] = ()
            if top is not None:
                values, token_ids = top.tolist()
                likeliest = tuple([(int(token), value) for token, value in zip(token_ids, values, strict=True)])
            chosen[row] = attrs.evolve(chosen[row], logprob=own.item(), top_logprobs=likeliest)
        return chosen


def choose_tokens(logits: torch.Tensor, settings: Sequence[SamplingSettings], draws: Sequence[float]) -> ChosenTokens:
    """Choose a token for each row; never waits for the device.

    Args:
        logits: `[num_sampled, vocab_size]`, of any floating dtype.
        settings: of each row's request.
        draws: the `uniform` number of each row's output; greedy rows use none.

    What a row's draw becomes depends on that row alone: its logits, its settings, its number.
    """
    token_ids = torch.argmax(logits, dim=-1)
    plain = [row for row, each in enumerate(settings) if not each.is_greedy and not _truncates(each)]
    truncated = [row for row, each in enumerate(settings) if not each.is_greedy and _truncates(each)]
    for rows, draw in ((plain, _draw_of_all), (truncated, _draw_of_likeliest)):
        if rows:
            index = torch.tensor(rows, device=logits.device)
            token_ids[index] = draw(logits[index], [settings[row] for row in rows], [draws[row] for row in rows])
    return ChosenTokens(token_ids, _logprobs(logits, settings, token_ids))


def _truncates(settings: SamplingSettings) -> bool:
    return settings.top_p < 1 or settings.top_k > 0


def _scaled(logits: torch.Tensor, settings: Sequence[SamplingSettings]) -> torch.Tensor:
    """Logits over temperature in double precision, the highest of each row at 0 so that none overflows."""
    temperatures = torch.tensor([each.temperature for each in settings], dtype=torch.float64, device=logits.device)
    wide = logits.to(torch.float64)
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperatures[:, None]


def _first_above(weights: torch.Tensor, draws: Sequence[float]) -> torch.Tensor:
    """The first place of each row where the running sum of weights exceeds the draw's share of the whole."""
    sums = weights.cumsum(dim=-1)
    targets = torch.tensor(draws, dtype=torch.float64, device=weights.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True)


def _draw_of_all(logits: torch.Tensor, settings: Sequence[SamplingSettings], draws: Sequence[float]) -> torch.Tensor:
    return _first_above(_scaled(logits, settings).exp(), draws)[:, 0]


def _draw_of_likeliest(
    logits: torch.Tensor, settings: Sequence[SamplingSettings], draws: Sequence[float]
) -> torch.Tensor:
    """Temperature, then `top_k`, then `top_p` of what is left: the order of vLLM."""
    scaled, order = _scaled(logits, settings).sort(dim=-1, descending=True, stable=True)
    weights = scaled.exp()
    size = weights.shape[-1]
    limits = torch.tensor([each.top_k or size for each in settings], device=logits.device)
    weights *= torch.arange(size, device=logits.device) < limits[:, None]
    shares = torch.tensor([each.top_p for each in settings], dtype=torch.float64, device=logits.device)
    sums = weights.cumsum(dim=-1)
    # What stands before a token decides whether it is needed to reach the share; the first one always is.
    weights *= (sums - weights) < shares[:, None] * sums[:, -1:]
    return order.gather(-1, _first_above(weights, draws))[:, 0]


def _logprobs(
    logits: torch.Tensor, settings: Sequence[SamplingSettings], token_ids: torch.Tensor
) -> "dict[int, tuple[torch.Tensor, torch.Tensor | None]]":
    found: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for row, each in enumerate(settings):
        if each.logprobs is None:
            continue
        of_all = torch.log_softmax(logits[row].to(torch.float32), dim=-1)
        top = None
        if each.logprobs:
            values, places = of_all.topk(min(each.logprobs, len(of_all)))
            top = torch.stack([values.to(torch.float64), places.to(torch.float64)])
        found[row] = of_all[token_ids[row]], top
    return found
