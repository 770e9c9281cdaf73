"""What settings say of single tokens, in the form in which every step asks for it."""

from collections.abc import Collection

import attrs
import numpy as np
from numpy.typing import NDArray

from .sampling_settings import SamplingSettings


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
