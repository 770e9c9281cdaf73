"""Encodes block keys as bytes and decodes them, so that every key comes back with its type."""

import operator
import struct
from collections.abc import Sequence
from typing import Any, cast

from ....core.errors import InputError
from ....core.events import Key

_LENGTH = struct.Struct("<I")
_INT, _STR, _BYTES, _TUPLE = b"isbt"


def encode_key(key: Key) -> bytes:
    """Return a letter for the type and the key's text; see docs/event_log.md.

    Raises:
        InputError: the key is not (or does not consist of) int, str, bytes or tuples of them.
    """
    if type(key) is int:
        return b"i%d" % key
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, tuple):
        items = [encode_key(item) for item in cast("tuple[Key, ...]", key)]
        return b"t" + b"".join([_LENGTH.pack(len(item)) + item for item in items])
    if type(key) is not bool:
        try:
            return b"i%d" % operator.index(key)  # pyright: ignore[reportArgumentType]
        except TypeError:
            pass
    raise InputError(
        f"key {key!r} is a {type(key).__name__}, which a log does not keep; keys are int, str, bytes or tuples of them"
    )


def decode_key(data: bytes) -> Key:
    """Return the key that `encode_key` was given. Raises ValueError for bytes that it never returns."""
    kind = data[0] if data else None
    if kind == _BYTES:
        return data[1:]
    if kind == _INT:
        return int(data[1:])
    if kind == _STR:
        return data[1:].decode("utf-8", "surrogatepass")
    if kind == _TUPLE:
        return tuple(_decoded_items(data))
    raise ValueError(f"{data!r} is no key of a log: its type is not one of i, s, b, t")


def encode_keys(keys: Sequence[Key | None]) -> list[bytes | None]:
    """Encode many keys; None stays None."""
    return [None if key is None else b"b" + key if type(key) is bytes else encode_key(key) for key in keys]


def decode_keys(data: Sequence[bytes | None]) -> tuple[Any, ...]:
    """Decode many keys; None stays None."""
    return tuple([None if each is None else each[1:] if each[:1] == b"b" else decode_key(each) for each in data])


def _decoded_items(data: bytes) -> list[Key]:
    items: list[Key] = []
    start = 1
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        if start + length > len(data):
            raise ValueError(f"{data!r} is no key of a log: an item ends behind it")
        items.append(decode_key(data[start : start + length]))
        start += length
    return items
