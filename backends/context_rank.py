"""Which part of every block one rank holds under decode context parallelism."""

import attrs

from ..core.errors import InputError


@attrs.frozen
class ContextRank:
    """One rank of decode context parallelism; rank 0 of 1 holds every token.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        interleave_tokens: consecutive tokens that one rank holds before the next rank's turn (a stripe).
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

    def check_divides(self, block_size: int) -> None:
        """Raise `InputError` if blocks of this many tokens do not divide into the stripes of all ranks."""
        stripes = self.size * self.interleave_tokens
        if self.size > 1 and block_size % stripes:
            raise InputError(
                f"blocks of {block_size} tokens do not divide into stripes of {self.interleave_tokens} on {self.size} "
                f"ranks; use a multiple of {stripes}"
            )
