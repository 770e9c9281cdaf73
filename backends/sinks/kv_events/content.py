"""What requests say, for the wire: only there are token ids needed, since the allocator works on keys."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from ....core.errors import MisuseError
from ....core.events import Key
from ....core.types import KeySource
from ..log.keys import encode_key

DEFAULT_VOCAB_SIZE = 128_000


class TokenSource(Protocol):
    """The token ids of one request."""

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """The tokens at positions `start <= p < stop`, all of them complete blocks that have a key."""
        ...


@attrs.frozen
class RequestContent:
    """One request, as the wire encoder needs it.

    Attributes:
        tokens: its token ids.
        keys: the keys of its hash blocks, the same that the allocator is given.
        lora_name: its adapter, if any.
        lora_id: the adapter's number, for consumers that still read it.
        extra_keys: (first block, block behind the last, tokens a block) -> what else went into each block's key, or
            None where nothing did.
    """

    tokens: TokenSource
    keys: KeySource
    lora_name: str | None = None
    lora_id: int | None = None
    extra_keys: Callable[[int, int, int], Sequence[Any] | None] | None = None


class RequestContents(Protocol):
    """Where the encoder finds a request."""

    def content_of(self, request_id: str) -> RequestContent:
        """The content of a request that holds blocks."""
        ...


class ContentRegistry:
    """Requests by id: whoever submits one adds it before, and discards it when it has ended."""

    def __init__(self) -> None:
        self._contents: dict[str, RequestContent] = {}

    def add(self, request_id: str, content: RequestContent) -> None:
        """Make a request known."""
        self._contents[request_id] = content

    def discard(self, request_id: str) -> None:
        """Forget a request."""
        self._contents.pop(request_id, None)

    def content_of(self, request_id: str) -> RequestContent:
        """The content of a known request. Raises MisuseError for another."""
        content = self._contents.get(request_id)
        if content is None:
            raise MisuseError(f"request {request_id!r} has blocks to announce, but its content was never added")
        return content


@attrs.frozen
class ListedTokens:
    """The tokens of a request that has them in a list (which may grow)."""

    tokens: Sequence[int]

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """A slice of the list."""
        return self.tokens[start:stop]


@attrs.frozen
class SyntheticTokens:
    """Tokens for prompts of which only block ids are known: the same key always gives the same tokens.

    They are drawn from a generator seeded by the block's key, so that whoever hashes them finds equal blocks where the
    trace has equal ids, and (but for a chance of 1 in vocab_size ** hash_block_size) different ones where it has not.
    """

    keys: KeySource
    hash_block_size: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def token_ids(self, start: int, stop: int) -> list[int]:
        """The tokens of whole hash blocks."""
        size = self.hash_block_size
        if start % size or stop % size:
            raise MisuseError(f"synthetic tokens come in blocks of {size}; asked for are [{start}, {stop})")
        return [token for key in self.keys.keys(start // size, stop // size) for token in self._tokens_of(key)]

    def _tokens_of(self, key: Key) -> list[int]:
        seed = int.from_bytes(hashlib.sha256(encode_key(key)).digest()[:8], "big")
        return np.random.default_rng(seed).integers(0, self.vocab_size, self.hash_block_size).tolist()
