"""A request as the engine sees it: its tokens, the keys of its blocks and its end; and their way through a step."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ....core.keys.token_keys import TokenKeySource
from ....core.types import Request, ScheduledStep
from ...cuda.staging import on_device
from ...cuda.step_runner import FinishStep, StepOutputs
from ..model.runner import StepTokens
from ..sampling.detokenizer import CONTEXT_TOKENS, Detokenizer, Tokenizer
from ..sampling.logit_adjustments import LogitAdjuster
from ..sampling.sampling import ChosenToken, ChosenTokens, NextToken, choose_tokens, uniform
from ..sampling.settings import SamplingSettings, TokenRules
from ..sampling.stop_texts import StopTexts
from .request import LiveRequest, TokenDelta


class Generation:
    """The tokens of one request. Only the engine's thread changes it once it has been submitted.

    Attributes:
        request: the scheduler's request.
        live: the request of the caller who submitted it.
        keys: the keys of its blocks, extended by every output token, so that the next turn of a chat finds them.
        num_tokens: tokens of prompt and output so far.
        num_output_tokens: tokens of the output so far.
        has_started: whether a step has computed part of it, or of the prompt that it shares.
        samples: further outputs of the same prompt, which start once the prompt is computed; empty from then on.
        lead: the request that computes the prompt for this sample; None if there is none, or once the output starts.
    """

    def __init__(
        self,
        request: Request,
        live: LiveRequest,
        keys: TokenKeySource,
        prompt_token_ids: NDArray[np.int64],
        seed: int,
        rules: TokenRules,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Start with the prompt, int64 `[num_prompt_tokens]`; `LiveEngine.submit` makes it."""
        self.request = request
        self.live = live
        self.keys = keys
        self.num_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self.has_started = False
        self.samples: list[Generation] = []
        self.lead: Generation | None = None
        self._seed = seed
        # Room for all tokens; the last output token is kept although it is never computed.
        self._token_ids = np.empty(self.num_tokens + request.max_tokens, dtype=np.int64)
        self._token_ids[: self.num_tokens] = prompt_token_ids
        self._ends = rules.ends
        self._adjuster = LogitAdjuster(self.settings, prompt_token_ids, rules)
        context = prompt_token_ids[-CONTEXT_TOKENS:].tolist()
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, context)
        self._stop_texts = StopTexts(self.settings.stop)

    @property
    def settings(self) -> SamplingSettings:
        """The sampling settings, as submitted."""
        return self.live.settings

    def token_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens at positions `start <= p < stop`: int64, a view."""
        return self._token_ids[start:stop]

    def next_token(self) -> NextToken:
        """Return how to choose the next output token."""
        draw = 0.0 if self.settings.is_greedy else uniform(self._seed, self.num_output_tokens)
        return NextToken(self.settings, draw, self._adjuster.next(self.num_output_tokens))

    def output_keys(self) -> Sequence[bytes]:
        """Return the keys of complete blocks after those of the prompt alone; none if caching is off."""
        return self.keys.keys(self.request.num_prompt_tokens // self.keys.hash_block_size, self.keys.num_blocks)

    def add(self, chosen: ChosenToken, time_ns: int) -> TokenDelta:
        """Append the next output token and decide whether it is the last one."""
        self._token_ids[self.num_tokens] = chosen.token_id
        self.keys.append([chosen.token_id])
        self._adjuster.add(chosen.token_id)
        self.num_tokens += 1
        self.num_output_tokens += 1
        text, stop_reason = self._read(chosen.token_id)
        self.live.stop_reason = stop_reason
        reason = None
        if stop_reason is not None:
            reason = "stop"
        elif self.num_output_tokens == self.request.max_tokens:
            reason = "length"
        return TokenDelta(chosen.token_id, text, reason, chosen.logprob, chosen.top_logprobs, time_ns)

    def _read(self, token_id: int) -> tuple[str | None, int | str | None]:
        """Return the text that a token completes, and the token or text that stops the output with it, if any."""
        stops = token_id in self._ends
        decoder = self._detokenizer
        if decoder is None:
            return None, token_id if stops else None
        text, stop_text = self._until_stop("" if stops else decoder.add(token_id))
        if stop_text is not None:
            return text, stop_text
        if stops or self.num_output_tokens == self.request.max_tokens:
            rest, stop_text = self._until_stop(decoder.end())
            text += rest
            if stop_text is not None:
                return text, stop_text
            text += self._stop_texts.end()
        return text, token_id if stops else None

    def _until_stop(self, text: str) -> tuple[str, str | None]:
        """Return the text before a stop text, and the stop text, if any. The first `min_tokens` tokens have none."""
        if self.num_output_tokens <= self.settings.min_tokens:
            return text, None
        return self._stop_texts.add(text)


@attrs.frozen
class Output:
    """One output token of a step."""

    generation: Generation  # the request that it belongs to
    delta: TokenDelta
    samples: "tuple[Output, ...]" = ()  # the first tokens of the generation's samples, chosen from the same logits


class StepSampler:
    """The `RequestTokens` of an engine: gives a step its tokens, and chooses the next ones."""

    def __init__(
        self, generation_in: Callable[[int], Generation], now_ns: Callable[[], int], max_num_seqs: int
    ) -> None:
        """Make the sampler; `generation_in` returns the running generation in a row, `now_ns` the engine's time."""
        self._generation_in = generation_in
        self._now_ns = now_ns
        self._max_num_seqs = max_num_seqs

    def step_tokens(self, step: ScheduledStep) -> StepTokens:
        """Return the tokens of a step's batch. A request whose last known token is among them gets a next one."""
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
        """Choose the next tokens from logits `[num_sampled, vocab_size]` on their device, without waiting for it.

        A lead and its samples share one row of the logits.
        """
        rows = step.batch.rows[tokens.sampled].tolist()
        families = [(lead, *lead.samples) for lead in map(self._generation_in, rows)]
        wanted = [each.next_token() for family in families for each in family]
        if len(wanted) == len(families):
            return partial(self._finish, rows, families, [choose_tokens(logits, wanted)])
        # A prompt may have more samples than a step has requests. Memory was planned for the latter, so no more rows
        # are processed at once.
        places = np.repeat(np.arange(len(families)), [len(family) for family in families])
        parts = [slice(start, start + self._max_num_seqs) for start in range(0, len(wanted), self._max_num_seqs)]
        chosen = [choose_tokens(logits[on_device(places[part], logits.device)], wanted[part]) for part in parts]
        return partial(self._finish, rows, families, chosen)

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
