"""Extra keys: content that a block's key covers besides its tokens, so that equal tokens never share unequal content.

A request gives its `ExtraKeys` once. `for_blocks` turns them into one value per hash block, and `encode_extra_keys`
turns such a value into bytes. A request whose extra keys cannot identify its content is not cached at all:
`reason_not_cacheable` says why (field reports B03 and B04).
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

import attrs

from ..errors import InputError

ExtraKeyValue: TypeAlias = "str | bytes | int | tuple[ExtraKeyValue, ...] | None"
"""One extra key, or several: text, bytes, whole numbers, None, and tuples of them."""

BlockExtraKeys: TypeAlias = tuple[ExtraKeyValue, ...] | None
"""The extra keys of one block; None and () both mean that it has none."""


def _is_whole_number(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_name(value: object) -> bool:
    """Non-empty bytes, or non-empty text that UTF-8 can carry (a lone surrogate cannot be encoded)."""
    if isinstance(value, str):
        try:
            value = value.encode("utf-8")
        except UnicodeEncodeError:
            return False
    return isinstance(value, bytes) and len(value) > 0


@attrs.frozen
class LoraIdentity:
    """A LoRA adapter by name *and* content: a reloaded adapter keeps its name but not its fingerprint (B03).

    `fingerprint` is any stable digest or version of the weights. `ExtraKeys.reason_not_cacheable` checks it.
    """

    name: str
    fingerprint: str | bytes


@attrs.frozen
class MultimodalItem:
    """An image, a clip or another item whose placeholders occupy `num_tokens` tokens of the prompt from `offset` on.

    `content_id` identifies the content itself (for example a digest of the pixels); the key covers all of it, however
    long. `ExtraKeys.reason_not_cacheable` checks it.
    """

    content_id: str | bytes | int
    offset: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """Return the position after the item's last token."""
        return self.offset + self.num_tokens


def _items(value: object) -> tuple[Any, ...]:
    """Return a tuple of items. A value that is not iterable becomes one item, which is then reported as malformed."""
    if value is None:
        return ()
    return tuple(cast("Iterable[Any]", value)) if isinstance(value, Iterable) else (value,)


def _check_cache_salt(_instance: object, _field: object, value: object) -> None:
    if value is not None and not (isinstance(value, str) and _is_name(value)):
        raise InputError(
            f"cache_salt is {value!r}: it must be non-empty text that UTF-8 can encode; leave it out to share the "
            "prefix cache with other requests that have none"
        )


@attrs.frozen
class ExtraKeys:
    """The extra keys of one request.

    `cache_salt` isolates a tenant: only requests with the same salt share blocks. An empty one is refused
    (InputError), because it would isolate no one. `multimodal` lists the items in any order.
    `placeholder_token_ids` are the token ids that stand for multimodal content in this model's vocabulary: a
    placeholder that no item covers makes the request uncacheable, because its true content is unknown.
    """

    cache_salt: str | None = attrs.field(default=None, validator=_check_cache_salt)
    lora: LoraIdentity | None = None
    multimodal: Sequence[MultimodalItem] = attrs.field(default=(), converter=_items)
    placeholder_token_ids: Sequence[int] = attrs.field(default=(), converter=_items)

    def reason_not_cacheable(self, num_tokens: int) -> str | None:
        """Return why a request of `num_tokens` tokens with these extra keys must not be cached; None: it may be."""
        lora = self.lora
        if lora is not None and not (isinstance(_opaque(lora), LoraIdentity) and _is_name(lora.name)):
            return f"lora is {lora!r}: a LoraIdentity with a non-empty name is needed"
        if lora is not None and not _is_name(lora.fingerprint):
            return (
                f"lora {lora.name!r} has the fingerprint {lora.fingerprint!r}: a non-empty digest or version is needed"
            )
        for index, item in enumerate(self.multimodal):
            reason = _reason_item_is_malformed(item, num_tokens)
            if reason is not None:
                return f"multimodal item {index}: {reason}"
        return None

    def for_blocks(self, start: int, stop: int, block_size: int) -> list[BlockExtraKeys] | None:
        """Return the extra keys of blocks [start, stop) of `block_size` tokens; None if the request has none at all.

        The salt enters block 0 only, because the chain carries it into every later block. The adapter enters every
        block. A multimodal item enters the blocks that it overlaps, with its position in them.
        """
        if self.cache_salt is None and self.lora is None and not self.multimodal:
            return None
        of_all: tuple[ExtraKeyValue, ...] = ()
        if self.lora is not None:
            of_all = (("lora", self.lora.name, self.lora.fingerprint),)
        blocks: list[BlockExtraKeys] = [of_all] * (stop - start)
        for index, own in self._multimodal_keys(start, stop, block_size).items():
            blocks[index - start] = of_all + own
        if self.cache_salt is not None and start == 0 < stop:
            blocks[0] = (*(blocks[0] or ()), ("cache_salt", self.cache_salt))
        return blocks

    def _multimodal_keys(self, start: int, stop: int, block_size: int) -> dict[int, tuple[ExtraKeyValue, ...]]:
        """Map block index -> ("multimodal", content id, first token relative to the block, tokens inside the block)."""
        keys: dict[int, tuple[ExtraKeyValue, ...]] = {}
        for item in sorted(self.multimodal, key=lambda item: (item.offset, item.num_tokens, repr(item.content_id))):
            first = max(start, item.offset // block_size)
            last = min(stop, -(-item.stop // block_size))
            for index in range(first, last):
                block_start = index * block_size
                # The number of tokens inside the block tells an item from the same item cut short and continued with
                # bare placeholder tokens.
                inside = min(item.stop, block_start + block_size) - max(item.offset, block_start)
                entry = ("multimodal", item.content_id, item.offset - block_start, inside)
                keys[index] = (*keys.get(index, ()), entry)
        return keys

    def truncated(self, num_tokens: int) -> "ExtraKeys":
        """Return the extra keys of the first `num_tokens` tokens: drop later items, cut one across the end."""
        if all(item.stop <= num_tokens for item in self.multimodal):
            return self
        kept = [
            attrs.evolve(item, num_tokens=min(item.stop, num_tokens) - item.offset)
            for item in self.multimodal
            if item.offset < num_tokens
        ]
        return attrs.evolve(self, multimodal=kept)


def _opaque(value: object) -> object:
    """Return the value without its declared type: callers from untyped code may have passed anything."""
    return value


def _reason_item_is_malformed(item: object, num_tokens: int) -> str | None:
    if not isinstance(item, MultimodalItem):
        return f"{item!r} is not a MultimodalItem"
    if not _is_name(item.content_id) and (isinstance(item.content_id, bool) or not isinstance(item.content_id, int)):
        return f"content_id is {item.content_id!r}: non-empty text, bytes or a whole number is needed"
    if not _is_whole_number(item.offset, minimum=0):
        return f"offset is {item.offset!r}: a whole number of at least 0 is needed"
    if not _is_whole_number(item.num_tokens, minimum=1):
        return f"num_tokens is {item.num_tokens!r}: a whole number of at least 1 is needed"
    if item.stop > num_tokens:
        return f"it covers tokens [{item.offset}, {item.stop}) of a prompt of {num_tokens} tokens"
    return None


def encode_extra_keys(value: ExtraKeyValue) -> bytes:
    """Encode an extra key as a tag, a length and the content, so that no two values share an encoding.

    Tags: `n` None, `i` whole number (decimal digits), `s` text (UTF-8), `b` bytes, `t` tuple. Behind every tag but `n`
    stands a little-endian uint32: the length of the content in bytes, for a tuple the number of its items.
    Raises InputError for any other type.
    """
    if value is None:
        return b"n"
    if isinstance(value, tuple):
        return b"t" + struct.pack("<I", len(value)) + b"".join(encode_extra_keys(item) for item in value)
    if isinstance(value, str):
        tag, content = b"s", value.encode("utf-8")
    elif isinstance(value, bytes):
        tag, content = b"b", value
    elif _is_whole_number(value, minimum=value):
        tag, content = b"i", str(value).encode("ascii")
    else:
        raise InputError(f"extra key {value!r} is a {type(value).__name__}: use text, bytes, int, None or a tuple")
    return tag + struct.pack("<I", len(content)) + content
