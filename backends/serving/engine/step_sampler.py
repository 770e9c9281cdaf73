"""Tokens into a step and out of it: which ones the model computes, which come next, and whose output ends."""

from collections.abc import Callable
from functools import partial
from itertools import chain

import attrs
import numpy as np
import torch

from ....core.types import ScheduledStep
from ...cuda.staging import on_device
from ...cuda.step_runner import FinishStep, StepOutputs
from ..model.runner import StepTokens
from ..sampling.sampling import ChosenTokens, choose_tokens
from .generation import Generation
from .token_stream import TokenDelta


@attrs.frozen
class Output:
    """One output token of a step, and whose it is.

    Attributes:
        generation: whose.
        delta: the token.
        samples: the first tokens of the generation's samples, chosen from the same logits.
    """

    generation: Generation
    delta: TokenDelta
    samples: "tuple[Output, ...]" = ()


class StepSampler:
    """`RequestTokens` over the generations of an engine."""

    def __init__(
        self, generation_in: Callable[[int], Generation], now_ns: Callable[[], int], max_num_seqs: int
    ) -> None:
        """Start.

        Args:
            generation_in: the running generation in a row.
            now_ns: the engine's clock, in nanoseconds.
            max_num_seqs: requests of a step at most.
        """
        self._generation_in = generation_in
        self._now_ns = now_ns
        self._max_num_seqs = max_num_seqs

    def step_tokens(self, step: ScheduledStep) -> StepTokens:
        """The tokens of a step's batch; a request whose last known token is among them gets a next one."""
        batch = step.batch
        pieces: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        sampled: list[int] = []
        rows, firsts, counts = batch.rows.tolist(), batch.first_positions.tolist(), batch.counts.tolist()
        for place, (row, first, count) in enumerate(zip(rows, firsts, counts, strict=True)):
            generation = self._generation_in(row)
            pieces.append(generation.token_ids(first, first + count))
            if first + count == generation.num_tokens:
                sampled.append(place)
        return StepTokens(np.concatenate(pieces), np.array(sampled, dtype=np.int64))

    def sample(self, step: ScheduledStep, tokens: StepTokens, logits: torch.Tensor) -> FinishStep:
        """Choose the next tokens from logits `[num_sampled, vocab_size]` on their device, without waiting for it."""
        rows = step.batch.rows[tokens.sampled].tolist()
        families = [(lead, *lead.samples) for lead in map(self._generation_in, rows)]
        return partial(self._finish, rows, families, self._chosen(logits, families))

    def _chosen(self, logits: torch.Tensor, families: list[tuple[Generation, ...]]) -> list[ChosenTokens]:
        """The next token of each member of each family, whose row of the logits they share.

        A prompt may have more samples than a step has requests, and memory was planned for the rows of these. So no
        more rows are worked on at once.
        """
        wanted = [each.next_token() for family in families for each in family]
        if len(wanted) == len(families):
            return [choose_tokens(logits, wanted)]
        places = np.repeat(np.arange(len(families)), [len(family) for family in families])
        parts = [slice(start, start + self._max_num_seqs) for start in range(0, len(wanted), self._max_num_seqs)]
        return [choose_tokens(logits[on_device(places[part], logits.device)], wanted[part]) for part in parts]

    def _finish(
        self, rows: list[int], families: list[tuple[Generation, ...]], chosen: list[ChosenTokens]
    ) -> StepOutputs:
        token_ids = chain.from_iterable(part.wait() for part in chosen)
        now_ns = self._now_ns()
        outputs: list[Output] = []
        for family in families:
            lead, *samples = [Output(each, each.add(next(token_ids), now_ns)) for each in family]
            outputs.append(attrs.evolve(lead, samples=tuple(samples)) if samples else lead)
        stopped = [row for row, output in zip(rows, outputs, strict=True) if output.delta.finish_reason == "stop"]
        return StepOutputs(outputs=outputs, stopped=tuple(stopped))
