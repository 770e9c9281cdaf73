"""Computes the block hashes of one request from its tokens, each once, when it is first asked for."""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ..errors import MisuseError, non_negative, positive
from .block_hash import BlockHasher, TokenIds, token_array
from .extra_keys import BlockExtraKeys, ExtraKeys


@attrs.define(eq=False)
class TokenKeySource:
    """A `KeySource` that hashes one request's tokens and extra keys.

    Tokens are copied in, appended as they are decoded and truncated when drafts are rejected. Block i covers tokens
    [i * hash_block_size, (i + 1) * hash_block_size). A block is hashed when its key is first asked for.

    With `num_lookahead_tokens` a key also covers that many tokens behind its block, because what a drafter stores at
    the block's end depends on them (vLLM 0.33 with EAGLE or MTP): a block has its key only once they are there.

    If the extra keys are malformed, the request is not cached (field report B04): `reason` says why, and `keys`
    returns nothing, so that its blocks are neither found nor registered. `reason` is None if the request may be cached.

    Example::

        source = TokenKeySource(prompt, block_hasher("sha256"), 16, ExtraKeys(cache_salt="tenant-a"))
        source.keys(0, source.num_blocks)

    Raises InputError for token ids that are not whole numbers of 64 bits and for a block size below 1.
    """

    _tokens: NDArray[np.signedinteger[Any]] = attrs.field(
        alias="token_ids", converter=token_array, on_setattr=attrs.setters.NO_OP, repr=False
    )
    hasher: BlockHasher = attrs.field(repr=lambda hasher: hasher.name)
    hash_block_size: int = attrs.field(validator=positive)
    extra_keys: ExtraKeys = attrs.field(factory=ExtraKeys)
    num_lookahead_tokens: int = attrs.field(default=0, validator=non_negative)
    num_tokens: int = attrs.field(init=False)
    reason: str | None = attrs.field(init=False)
    _chain: list[bytes] = attrs.field(init=False, factory=list[bytes], repr=False)

    def __attrs_post_init__(self) -> None:
        self._tokens = self._tokens.copy()  # the caller's array may change; a key must not change with it
        self.num_tokens = len(self._tokens)
        self.reason = self.extra_keys.reason_not_cacheable(self.num_tokens)
        if self.reason is None:
            self._look_for_bare_placeholders(0)

    @property
    def num_blocks(self) -> int:
        """Count the hash blocks so far that are complete and have a key."""
        return max(self.num_tokens - self.num_lookahead_tokens, 0) // self.hash_block_size

    def keys(self, start: int, stop: int) -> list[bytes]:
        """Return the keys of complete blocks [start, stop); nothing for a request that is not cached (see `reason`).

        Raises MisuseError for a range that is not within the complete blocks.
        """
        if not 0 <= start <= stop <= self.num_tokens // self.hash_block_size:
            raise MisuseError(
                f"keys of blocks [{start}, {stop}) were asked for: the {self.num_tokens} tokens so far make "
                f"{self.num_tokens // self.hash_block_size} complete blocks of {self.hash_block_size}"
            )
        if self.reason is not None:
            return []
        stop = min(stop, self.num_blocks)
        if stop > len(self._chain):
            self._extend_chain(stop)
        return self._chain[start:stop]

    def append(self, token_ids: TokenIds) -> None:
        """Add tokens at the end: the outputs of a step, or the next turn of a session."""
        added = token_array(token_ids)
        old, new = self.num_tokens, self.num_tokens + len(added)
        dtype = np.promote_types(self._tokens.dtype, added.dtype)
        if new > len(self._tokens) or dtype != self._tokens.dtype:
            grown = np.empty(max(new, 2 * old), dtype)  # doubling keeps a long decode linear
            grown[:old] = self._tokens[:old]
            self._tokens = grown
        self._tokens[old:new] = added
        self.num_tokens = new
        if self.reason is None:
            self._look_for_bare_placeholders(old)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens; blocks that lose a token lose their keys.

        Raises MisuseError for more tokens than there are.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise MisuseError(f"cannot truncate {self.num_tokens} tokens to {num_tokens}")
        self.num_tokens = num_tokens
        del self._chain[self.num_blocks :]
        if self.reason is None:
            self.extra_keys = self.extra_keys.truncated(num_tokens)

    def take_over(self, other: "TokenKeySource") -> None:
        """Copy the keys that another source has hashed already, as far as both begin with the same tokens.

        Raises MisuseError if the other source has another hasher, block size or extra keys: its keys would differ.
        """
        mine, theirs = (
            (source.hasher, source.hash_block_size, source.extra_keys, source.num_lookahead_tokens)
            for source in (self, other)
        )
        if mine != theirs:
            raise MisuseError("keys of another hasher, block size or extra keys cannot be taken over")
        num_hashed, size = min(len(other._chain), self.num_blocks), self.hash_block_size
        ahead = self.num_lookahead_tokens
        if num_hashed <= len(self._chain):
            return
        compared = num_hashed * size + ahead
        differs = self._tokens[:compared] != other._tokens[:compared]
        num_alike = max(int(differs.argmax()) - ahead, 0) // size if differs.any() else num_hashed
        if num_alike > len(self._chain):
            self._chain = other._chain[:num_alike]

    def _extend_chain(self, stop: int) -> None:
        start, size = len(self._chain), self.hash_block_size
        extra_keys = self.extra_keys.for_blocks(start, stop, size)
        if self.num_lookahead_tokens:
            extra_keys = self._with_lookahead(start, extra_keys or [()] * (stop - start))
        self._chain += self.hasher.chain(
            self._tokens[start * size : stop * size],
            size,
            parent=self._chain[-1] if start else None,
            extra_keys=extra_keys,
        )

    def _with_lookahead(self, start: int, extra_keys: Sequence[BlockExtraKeys]) -> list[BlockExtraKeys]:
        """Add to each block's extra keys the tokens behind it, and what content of items they stand for."""
        size, ahead = self.hash_block_size, self.num_lookahead_tokens
        out: list[BlockExtraKeys] = []
        for index, own in enumerate(extra_keys, start):
            end = (index + 1) * size
            items = tuple(
                ("multimodal", item.content_id, item.offset - end, min(item.stop, end + ahead) - max(item.offset, end))
                for item in self.extra_keys.multimodal
                if item.offset < end + ahead and item.stop > end
            )
            tokens = tuple(self._tokens[end : end + ahead].tolist())
            out.append((*(own or ()), ("lookahead", *tokens), *items))
        return out

    def _look_for_bare_placeholders(self, first: int) -> None:
        """Set `reason` if a placeholder token is covered by no item: it stands for content that is unknown."""
        placeholders = self.extra_keys.placeholder_token_ids
        if not placeholders:
            return
        bare = np.isin(self._tokens[first : self.num_tokens], placeholders)
        for item in self.extra_keys.multimodal:
            bare[max(item.offset - first, 0) : max(item.stop - first, 0)] = False
        if bare.any():
            position = first + int(bare.argmax())
            self.reason = (
                f"token {position} is the placeholder {int(self._tokens[position])}, and no multimodal item covers it"
            )
