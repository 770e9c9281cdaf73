"""How one token reads by itself: its text, and its bytes, which alone need not be whole characters."""

import re
from typing import Final, Protocol

import attrs

from .detokenizer import REPLACEMENT, Tokenizer

# How vocabularies with a fallback to bytes name a byte.
_NAMED_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


@attrs.frozen
class TokenSpelling:
    """One token.

    Attributes:
        text: what it adds to a text; bytes that are no whole characters are shown as replacement characters.
        utf8: its bytes; None: its tokenizer does not tell them.
    """

    text: str
    utf8: bytes | None


class NamingTokenizer(Tokenizer, Protocol):
    """What is needed of a tokenizer; those of transformers fit."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """The name of a token in the vocabulary."""
        ...


class TokenSpeller:
    """Spells the tokens of one tokenizer; for one thread."""

    def __init__(self, tokenizer: NamingTokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _bytes_by_character()

    def __call__(self, token_id: int) -> TokenSpelling:
        """The spelling of a token of the model."""
        alone = self._tokenizer.decode([token_id])
        if REPLACEMENT in alone:
            return TokenSpelling(alone, self._named_bytes(token_id, alone))
        # A tokenizer may drop the space that a text begins with; the second of two keeps it.
        twice = self._tokenizer.decode([token_id, token_id])
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        return TokenSpelling(text, text.encode())

    def _named_bytes(self, token_id: int, text: str) -> bytes | None:
        """The bytes by which the vocabulary names a token, if they read as this text."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        named_byte = _NAMED_BYTE.fullmatch(name)
        if named_byte is not None:
            return bytes.fromhex(named_byte[1])
        if any(character not in self._byte_of for character in name):
            return None
        found = bytes(self._byte_of[character] for character in name)
        return found if found.decode(errors="replace") == text else None


def _bytes_by_character() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2's): printable bytes of Latin-1 stand for themselves, the others in their
    order for the characters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
