"""One request as the engine sees it: every token so far, the keys of its blocks, and where its output ends."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ....core.keys.token_keys import TokenKeySource
from ....core.types import Request
from ..sampling.detokenizer import CONTEXT_TOKENS, Detokenizer, Tokenizer
from ..sampling.logit_adjustments import LogitAdjuster
from ..sampling.sampling import ChosenToken, NextToken, uniform
from ..sampling.settings import SamplingSettings, TokenRules
from ..sampling.stop_texts import StopTexts
from .request import LiveRequest
from .token_stream import TokenDelta


class Generation:
    """The tokens of one request. Only the engine's thread changes it once it has been submitted.

    Attributes:
        request: the scheduler's.
        live: its reader's.
        keys: the keys of its blocks, extended by every output token, so that a next turn finds them.
        num_tokens: tokens of prompt and output so far.
        num_output_tokens: those of the output.
        has_started: a step has computed part of it, or of the prompt that it shares.
        samples: further outputs of the same prompt, which begin when its end is computed; none from then on.
        lead: whose sample this is; None: nobody's, and from the beginning of its output on.
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
        """See `LiveEngine.submit`.

        Args:
            request: the scheduler's.
            live: its reader's.
            keys: over the same prompt.
            prompt_token_ids: int64 `[num_prompt_tokens]`.
            seed: of its draws.
            rules: of its settings.
            tokenizer: makes text of it; None: there is none.
        """
        self.request = request
        self.live = live
        self.keys = keys
        self.num_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self.has_started = False
        self.samples: list[Generation] = []
        self.lead: Generation | None = None
        self._seed = seed
        # All that can ever come; the last output is never computed but kept all the same.
        self._token_ids = np.empty(self.num_tokens + request.max_tokens, dtype=np.int64)
        self._token_ids[: self.num_tokens] = prompt_token_ids
        self._ends = rules.ends
        self._adjuster = LogitAdjuster(self.settings, prompt_token_ids, rules)
        context = prompt_token_ids[-CONTEXT_TOKENS:].tolist()
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, context)
        self._stop_texts = StopTexts(self.settings.stop)

    @property
    def settings(self) -> SamplingSettings:
        """As submitted."""
        return self.live.settings

    def token_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """The tokens at positions `start <= p < stop`: int64, a view."""
        return self._token_ids[start:stop]

    def next_token(self) -> NextToken:
        """What the next output token is chosen by."""
        draw = 0.0 if self.settings.is_greedy else uniform(self._seed, self.num_output_tokens)
        return NextToken(self.settings, draw, self._adjuster.next(self.num_output_tokens))

    def output_keys(self) -> Sequence[bytes]:
        """The keys of complete blocks behind those of the prompt alone; none where nothing is cached."""
        return self.keys.keys(self.request.num_prompt_tokens // self.keys.hash_block_size, self.keys.num_blocks)

    def add(self, chosen: ChosenToken, time_ns: int) -> TokenDelta:
        """Take the next output token, and say whether it is the last one."""
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
        """The text that a token makes certain, and the token or text that ends the output with it, if any."""
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
        """What of new text may be given out, and the stop text in it, if any; none in the first `min_tokens` tokens."""
        if self.num_output_tokens <= self.settings.min_tokens:
            return text, None
        return self._stop_texts.add(text)
