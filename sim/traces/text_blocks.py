"""Block ids of prompts that are known as text: a chain of digests over their tokens, so that equal prefixes match."""

import hashlib
from collections.abc import Sequence

from .bad_rows import MAX_HASH_ID


class TextBlocks:
    """The tokens of a growing text and the ids of its blocks.

    An id binds the tokens of its block, all before them, and the salt (as a cache salt does, it enters the first
    block and the chain carries it; field report B03). The last block may be partial; its id then stands for exactly
    these tokens, as in Mooncake's traces.
    """

    def __init__(self, block_size: int, salt: str | None = None) -> None:
        self._block_size = block_size
        self._chain = hashlib.blake2b(repr(salt).encode(), digest_size=16).digest()
        self._full_ids: list[int] = []
        self._tail: list[int | str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._full_ids) * self._block_size + len(self._tail)

    def extend(self, tokens: Sequence[int] | Sequence[str]) -> None:
        """Append tokens; blocks that become full get their final id."""
        self._tail.extend(tokens)
        num_full = len(self._tail) // self._block_size * self._block_size
        for start in range(0, num_full, self._block_size):
            self._chain = self._digest(self._tail[start : start + self._block_size])
            self._full_ids.append(_id_of(self._chain))
        del self._tail[:num_full]

    def ids(self) -> tuple[int, ...]:
        """An id for every block, `ceil(num_tokens / block_size)` of them."""
        if not self._tail:
            return tuple(self._full_ids)
        return (*self._full_ids, _id_of(self._digest(self._tail)))

    def _digest(self, tokens: list[int | str]) -> bytes:
        return hashlib.blake2b(self._chain + repr(tokens).encode(), digest_size=16).digest()


def _id_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big") & MAX_HASH_ID
