"""Which tokens a request has seen, and how often its output holds each: what penalties are counted from."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Distinct tokens in the order in which they were first seen."""

    def __init__(self, prompt_token_ids: Iterable[int], max_output_tokens: int) -> None:
        """Start with a prompt's tokens, none of which is in the output.

        Args:
            prompt_token_ids: those that count as seen.
            max_output_tokens: calls of `add` at most.
        """
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
