"""Which part of every block one rank holds under decode context parallelism."""

import attrs

from ..core.errors import InputError


@attrs.frozen
class ContextRank:
    """One rank of decode context parallelism.

    Attributes:
        rank: which one, from 0.
        size: how many there are.
        interleave_tokens: consecutive tokens that one rank holds before the next one's turn.
    """

    rank: int = 0
    size: int = 1
    interleave_tokens: int = 1

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.size or self.interleave_tokens < 1:
            raise InputError(
                f"rank {self.rank} of {self.size} with stripes of {self.interleave_tokens} tokens: ranks are 0 to size "
                "- 1, stripes at least 1"
            )
