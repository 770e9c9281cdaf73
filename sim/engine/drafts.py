"""How many drafts of speculative decoding are accepted: a seeded model with one rate."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError


class DraftAcceptance:
    """Each draft is right with probability `rate` if the one before it was; the first wrong one ends the run.

    The expected number of accepted drafts out of K is `rate + rate^2 + ... + rate^K` (Leviathan et al., 2023).
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        if not 0 <= rate <= 1:
            raise InputError(f"the acceptance rate of drafts is a probability within 0 and 1, not {rate}")
        self._rate = rate
        self._seed = seed
        self._random = np.random.Generator(np.random.PCG64(seed))

    def accepted(self, num_draft_tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Accepted drafts of each request: int64 `[num_reqs]`, the same numbers for the same seed and history."""
        width = int(num_draft_tokens.max(initial=0))
        right = self._random.random((len(num_draft_tokens), width)) < self._rate
        right &= np.arange(width) < num_draft_tokens[:, None]
        return np.cumprod(right, axis=1, dtype=np.int64).sum(axis=1)

    def assumptions(self) -> dict[str, Any]:
        """The rate and the seed."""
        return {"draft_acceptance_rate": self._rate, "draft_seed": self._seed}
