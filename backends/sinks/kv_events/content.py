"""The token ids of requests, which only KV events need: the allocator works on block keys."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from ....core.errors import MisuseError
from ....core.types import KeySource
from ..log.keys import encode_key

DEFAULT_VOCAB_SIZE = 128_000


class TokenSource(Protocol):
    """The token ids of one request."""

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """Return the tokens at positions `start <= p < stop`, which are complete blocks with keys."""
        ...


@attrs.frozen
class RequestContent:
    """One request, as the KV event encoder needs it.

    Attributes:
        tokens: its token ids.
        keys: the keys of its hash blocks, the same that the allocator is given.
        lora_name: its LoRA adapter, if any.
        lora_id: the adapter's number, for consumers that still read it.
        extra_keys: (first block, block after the last, tokens per block) -> the extra keys that went into each block's
            key, or None if there are none.
    """

    tokens: TokenSource
    keys: KeySource
    lora_name: str | None = None
    lora_id: int | None = None
    extra_keys: Callable[[int, int, int], Sequence[Any] | None] | None = None


class ContentRegistry:
    """Request contents by id. Add a request before it is submitted, and discard it once it has ended."""

    def __init__(self) -> None:
        self._contents: dict[str, RequestContent] = {}

    def add(self, request_id: str, content: RequestContent) -> None:
        """Add a request."""
        self._contents[request_id] = content

    def discard(self, request_id: str) -> None:
        """Forget a request."""
        self._contents.pop(request_id, None)

    def content_of(self, request_id: str) -> RequestContent:
        """Return the content of a request that was added. Raises MisuseError for any other."""
        content = self._contents.get(request_id)
        if content is None:
            raise MisuseError(f"request {request_id!r} has blocks to announce, but its content was never added")
        return content


@attrs.frozen
class ListedTokens:
    """The tokens of a request as a list, which may grow."""

    tokens: Sequence[int]

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """Return a slice of the list."""
        return self.tokens[start:stop]


@attrs.frozen
class SyntheticTokens:
    """Invented tokens for prompts with known block ids only: the same key always gives the same tokens.

    A generator seeded by the block's key draws them. Hashing them therefore gives equal blocks where the trace has
    equal ids, and different blocks elsewhere (but for a chance of 1 in vocab_size ** hash_block_size).
    """

    keys: KeySource
    hash_block_size: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return the tokens of complete hash blocks."""
        size = self.hash_block_size
        if start % size or stop % size:
            raise MisuseError(f"synthetic tokens come in blocks of {size}; positions [{start}, {stop}) cut one")
        tokens: list[int] = []
        for key in self.keys.keys(start // size, stop // size):
            seed = int.from_bytes(hashlib.sha256(encode_key(key)).digest()[:8], "big")
            tokens += np.random.default_rng(seed).integers(0, self.vocab_size, size).tolist()
        return tokens
