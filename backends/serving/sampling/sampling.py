"""How the next token is chosen: one draw for each output that depends on nothing else.

Output i of a request is drawn with the number `uniform(seed, i)`. So a request produces the same tokens whoever
else is in its batch, and again after it was preempted.
"""

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ...cuda.staging import on_device
from .logit_adjustments import LogitAdjustment, adjusted_logits
from .settings import SamplingSettings

# With so many bits a draw times a sum of probabilities is always below that sum, in double precision.
_DRAW_BITS = 52


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


@attrs.frozen(eq=False)
class NextToken:
    """What one row of logits is to become a token by.

    Attributes:
        settings: of the row's request.
        draw: the `uniform` number of its output; a greedy row uses none.
        adjustment: what the request's settings change in the row before anything is drawn; None: nothing.
    """

    settings: SamplingSettings
    draw: float
    adjustment: LogitAdjustment | None


def choose_tokens(logits: torch.Tensor, wanted: Sequence[NextToken]) -> ChosenTokens:
    """Choose a token for each row; never waits for the device.

    Args:
        logits: `[num_sampled, vocab_size]`, of any floating dtype; stay as they are.
        wanted: of each row.

    What a row becomes depends on that row alone: its logits, its settings, its number. Log probabilities are those of
    the model: before adjustments, temperature and truncation.
    """
    adjusted = adjusted_logits(logits, [each.adjustment for each in wanted])
    token_ids = torch.argmax(adjusted, dim=-1)
    drawn = [row for row, each in enumerate(wanted) if not each.settings.is_greedy]
    plain = [row for row in drawn if not wanted[row].settings.truncates]
    truncated = [row for row in drawn if wanted[row].settings.truncates]
    for rows, draw in ((plain, _draw_of_all), (truncated, _draw_of_likeliest)):
        if rows:
            index = on_device(np.array(rows), logits.device)
            token_ids[index] = draw(adjusted[index], [wanted[row] for row in rows])
    return ChosenTokens(token_ids, _logprobs(logits, [each.settings for each in wanted], token_ids))


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """A value of each row: float64 `[num_rows, 1]`."""
    return on_device(np.array(values, dtype=np.float64), device)[:, None]


def _scaled(logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """Logits over temperature in double precision, the highest of each row at 0 so that none overflows."""
    wide = logits.to(torch.float64)
    temperatures = _column([each.settings.temperature for each in wanted], logits.device)
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperatures


def _first_above(weights: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """The first place of each row where the running sum of weights exceeds the draw's share of the whole."""
    sums = weights.cumsum(dim=-1)
    targets = _column([each.draw for each in wanted], weights.device) * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True)


def _draw_of_all(logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    return _first_above(_scaled(logits, wanted).exp(), wanted)[:, 0]


def _draw_of_likeliest(logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """Temperature, `min_p`, `top_k`, then `top_p` of what is left: the order of vLLM's sampler."""
    scaled, order = _scaled(logits, wanted).sort(dim=-1, descending=True, stable=True)
    weights = scaled.exp()
    size, device = weights.shape[-1], weights.device
    # The likeliest token weighs 1, so weights are shares of its probability.
    weights *= weights >= _column([each.settings.min_p for each in wanted], device)
    limits = on_device(np.array([each.settings.top_k or size for each in wanted]), device)
    weights *= torch.arange(size, device=device) < limits[:, None]
    shares = _column([each.settings.top_p for each in wanted], device)
    sums = weights.cumsum(dim=-1)
    # What stands before a token decides whether it is needed to reach the share; the first one always is.
    weights *= (sums - weights) < shares * sums[:, -1:]
    return order.gather(-1, _first_above(weights, wanted))[:, 0]


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
        # A single element as an index would be read on the host, which waits for it.
        found[row] = of_all.index_select(0, token_ids[row : row + 1]), top
    return found
