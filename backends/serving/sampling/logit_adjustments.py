"""Adjusts the logits of a request's next token as its settings say, before temperature and truncation.

In the order of vLLM's sampler: tokens that are not allowed yet (`min_tokens`), then `logit_bias`, then penalties.
Penalties follow OpenAI's definition (presence and frequency, over the output) and that of the CTRL paper,
arXiv:1909.05858, as vLLM's `SamplingParams` applies it (repetition, over prompt and output):

    logit / repetition if logit > 0 else logit * repetition,    for tokens of prompt or output
    logit - frequency * (times in the output) - presence * (1 if in the output else 0)
"""

from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ...cuda.staging import on_device
from .settings import SamplingSettings, TokenRules

# Most logits changed at once, which bounds the device memory for it, however many tokens a batch has seen.
MAX_ENTRIES = 1 << 20

_NONE = np.zeros(0, dtype=np.int64)


class SeenTokens:
    """The distinct tokens that a request has seen, in order, and how often its output holds each, for penalties."""

    def __init__(self, prompt_token_ids: Iterable[int], max_output_tokens: int) -> None:
        """Start with the prompt's tokens, none of them in the output; `add` may be called `max_output_tokens` times."""
        distinct = list(dict.fromkeys(int(token_id) for token_id in prompt_token_ids))
        self._place_of = {token_id: place for place, token_id in enumerate(distinct)}
        self._token_ids = np.zeros(len(distinct) + max_output_tokens, dtype=np.int64)
        self._token_ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._token_ids), dtype=np.int64)

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place_of.setdefault(token_id, len(self._place_of))
        self._token_ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """int64 `[num_distinct]`, a view."""
        return self._token_ids[: len(self._place_of)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """How often the output holds each of them: int64 `[num_distinct]`, a view."""
        return self._counts[: len(self._place_of)]


@attrs.frozen(eq=False)
class LogitAdjustment:
    """The changes to one row of logits."""

    settings: SamplingSettings  # the settings with the penalties
    never: NDArray[np.int64]  # int64 `[num_tokens]`, tokens that are not allowed
    biased: NDArray[np.int64]  # int64 `[num_biased]`, tokens whose logits are biased
    biases: NDArray[np.float64]  # float64 `[num_biased]`
    seen: SeenTokens | None  # tokens for the penalties; None: there are no penalties

    @property
    def num_entries(self) -> int:
        """Number of changes; a logit that is changed twice counts twice."""
        return len(self.never) + len(self.biased) + (0 if self.seen is None else len(self.seen.token_ids))


class LogitAdjuster:
    """Makes one request's adjustment for each output. It depends on the tokens only, so preemption is harmless."""

    def __init__(self, settings: SamplingSettings, prompt_token_ids: NDArray[np.int64], rules: TokenRules) -> None:
        """Start with an empty output; `prompt_token_ids`: int64 `[num_prompt_tokens]`."""
        self._settings = settings
        self._prompt_token_ids = prompt_token_ids
        self._rules = rules
        self._seen: SeenTokens | None = None

    def add(self, token_id: int) -> None:
        """Append one output token."""
        if self._settings.penalizes:
            self._tokens_seen().add(token_id)

    def next(self, num_output_tokens: int) -> LogitAdjustment | None:
        """Return the adjustment for the token after `num_output_tokens` output tokens; None: no change."""
        rules = self._rules
        never = rules.held_back if num_output_tokens < self._settings.min_tokens else _NONE
        seen = self._tokens_seen() if self._settings.penalizes else None
        found = LogitAdjustment(self._settings, never, rules.biased, rules.biases, seen)
        return found if found.num_entries else None

    def _tokens_seen(self) -> SeenTokens:
        """Return the seen tokens, made on first use: a queued request needs none."""
        if self._seen is None:
            prompt = self._prompt_token_ids.tolist() if self._settings.repetition_penalty != 1 else ()
            self._seen = SeenTokens(prompt, self._settings.max_tokens)
        return self._seen


def adjusted_logits(logits: torch.Tensor, adjustments: Sequence[LogitAdjustment | None]) -> torch.Tensor:
    """Apply each row's adjustment without waiting for the device.

    Args:
        logits: `[num_sampled, vocab_size]`, of any floating dtype; unchanged.
        adjustments: the adjustment of each row, or None.

    Returns:
        float64 `[num_sampled, vocab_size]`; `logits` themselves if nothing is adjusted.
    """
    if all(each is None for each in adjustments):
        return logits
    wide = logits.to(torch.float64, copy=True)
    for rows in _parts(adjustments):
        _forbid(wide, rows)
        _bias(wide, rows)
        _penalize(wide, rows)
    return wide


def _parts(adjustments: Sequence[LogitAdjustment | None]) -> Iterator[dict[int, LogitAdjustment]]:
    """Yield rows with an adjustment, as many at once as `MAX_ENTRIES` allows but at least one."""
    part: dict[int, LogitAdjustment] = {}
    num_entries = 0
    for row, each in enumerate(adjustments):
        if each is None:
            continue
        if part and num_entries + each.num_entries > MAX_ENTRIES:
            yield part
            part, num_entries = {}, 0
        part[row] = each
        num_entries += each.num_entries
    if part:
        yield part


class _Entries:
    """Positions in the logits: some tokens of some rows."""

    def __init__(self, token_ids: dict[int, NDArray[np.int64]], device: torch.device) -> None:
        """Copy the positions to the device. `token_ids`: row -> its tokens, int64."""
        self._counts = [len(each) for each in token_ids.values()]
        self._device = device
        rows = np.repeat(np.fromiter(token_ids, dtype=np.int64, count=len(token_ids)), self._counts)
        self.places = on_device(rows, device), on_device(np.concatenate([_NONE, *token_ids.values()]), device)

    @property
    def is_empty(self) -> bool:
        return not sum(self._counts)

    def of_rows(self, values: Sequence[float]) -> torch.Tensor:
        """Repeat each row's value for every position in the row: float64 `[num_entries]`."""
        return on_device(np.repeat(np.array(values, dtype=np.float64), self._counts), self._device)


def _forbid(wide: torch.Tensor, rows: dict[int, LogitAdjustment]) -> None:
    entries = _Entries({row: each.never for row, each in rows.items()}, wide.device)
    if not entries.is_empty:
        wide[entries.places] = -torch.inf


def _bias(wide: torch.Tensor, rows: dict[int, LogitAdjustment]) -> None:
    entries = _Entries({row: each.biased for row, each in rows.items()}, wide.device)
    if not entries.is_empty:
        wide[entries.places] += on_device(np.concatenate([each.biases for each in rows.values()]), wide.device)


def _penalize(wide: torch.Tensor, rows: dict[int, LogitAdjustment]) -> None:
    seen = {row: each.seen for row, each in rows.items() if each.seen is not None}
    entries = _Entries({row: each.token_ids for row, each in seen.items()}, wide.device)
    if entries.is_empty:
        return
    settings = [rows[row].settings for row in seen]
    counts = on_device(np.concatenate([each.output_counts for each in seen.values()]), wide.device)
    repetition = entries.of_rows([each.repetition_penalty for each in settings])
    logits = wide[entries.places]
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits -= entries.of_rows([each.frequency_penalty for each in settings]) * counts
    logits -= entries.of_rows([each.presence_penalty for each in settings]) * (counts > 0)
    wide[entries.places] = logits
