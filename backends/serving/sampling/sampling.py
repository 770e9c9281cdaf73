"""Chooses next tokens with one draw for each output.

Output i of a request is drawn with the number `uniform(seed, i)`. A request therefore produces the same tokens in any
batch, and again after a preemption.
"""

import hashlib
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from ...cuda.staging import on_device
from .logit_adjustments import LogitAdjustment, adjusted_logits
from .settings import SamplingSettings

# With this many bits a draw times a sum of probabilities is always below that sum, in double precision.
_DRAW_BITS = 52


@attrs.frozen
class ChosenToken:
    """One output token."""

    token_id: int
    logprob: float | None = None  # its log probability, if requested
    # (token, log probability) of the likeliest tokens, in descending order, if requested.
    top_logprobs: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, index: int) -> float:
    """Return the draw for output `index` of a request: a number in [0, 1), the same on every machine."""
    return (seed_of_request(seed, index) >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def seed_of_request(engine_seed: int, ordinal: int) -> int:
    """Hash an engine's seed and a number to 64 bits: the seed of the `ordinal`-th request, if it has none."""
    digest = hashlib.blake2b(engine_seed.to_bytes(8, "little") + ordinal.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class ChosenTokens:
    """The chosen tokens of one step, still on the device."""

    def __init__(
        self, token_ids: torch.Tensor, logprobs: "dict[int, tuple[torch.Tensor, torch.Tensor | None]]"
    ) -> None:
        self._token_ids = token_ids
        # Row -> log probability of its token, and of the likeliest tokens.
        self._logprobs = logprobs

    def wait(self) -> list[ChosenToken]:
        """Wait for the device and return the tokens, one for each row of the logits."""
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
    """How to choose the token of one row of logits."""

    settings: SamplingSettings  # settings of the row's request
    draw: float  # the `uniform` number of its output; unused in a greedy row
    adjustment: LogitAdjustment | None  # changes to the row before the draw; None: none


def choose_tokens(logits: torch.Tensor, wanted: Sequence[NextToken]) -> ChosenTokens:
    """Choose a token for each row without waiting for the device.

    Args:
        logits: `[num_sampled, vocab_size]`, of any floating dtype; unchanged.
        wanted: how to choose the token of each row.

    The token of a row depends on that row only: its logits, settings and draw. Log probabilities are the model's:
    before adjustments, temperature and truncation.
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
    """Return one value per row: float64 `[num_rows, 1]`."""
    return on_device(np.array(values, dtype=np.float64), device)[:, None]


def _scaled(logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """Divide logits by temperature in double precision, the highest of each row at 0 so that none overflows."""
    wide = logits.to(torch.float64)
    temperatures = _column([each.settings.temperature for each in wanted], logits.device)
    return (wide - wide.amax(dim=-1, keepdim=True)) / temperatures


def _first_above(weights: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """Return the first position of each row where the running sum of weights exceeds the draw times their sum."""
    sums = weights.cumsum(dim=-1)
    targets = _column([each.draw for each in wanted], weights.device) * sums[:, -1:]
    return torch.searchsorted(sums, targets, right=True)


def _draw_of_all(logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    return _first_above(_scaled(logits, wanted).exp(), wanted)[:, 0]


def _draw_of_likeliest(logits: torch.Tensor, wanted: Sequence[NextToken]) -> torch.Tensor:
    """Apply temperature, `min_p`, `top_k`, then `top_p` to the rest, in the order of vLLM's sampler, and draw."""
    scaled, order = _scaled(logits, wanted).sort(dim=-1, descending=True, stable=True)
    weights = scaled.exp()
    size, device = weights.shape[-1], weights.device
    # The likeliest token has weight 1, so weights are relative to its probability.
    weights *= weights >= _column([each.settings.min_p for each in wanted], device)
    limits = on_device(np.array([each.settings.top_k or size for each in wanted]), device)
    weights *= torch.arange(size, device=device) < limits[:, None]
    shares = _column([each.settings.top_p for each in wanted], device)
    sums = weights.cumsum(dim=-1)
    # The sum before a token decides whether the token is needed to reach the share; the first one always is.
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
        # Indexing by a single element would read it on the host, which waits for the device.
        found[row] = of_all.index_select(0, token_ids[row : row + 1]), top
    return found
