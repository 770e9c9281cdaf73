"""Output tokens into text as they come: whole characters only."""

import re
from collections.abc import Sequence
from typing import Final, Protocol

import attrs

# Tokens of the prompt that the first output is read together with: spaces and bytes depend on what stands before.
CONTEXT_TOKENS = 6
# What a decoder shows for bytes that are no character yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has four bytes at most, so at most so many of its tokens can be there before its last one.
MAX_TOKENS_OF_HALF_A_CHARACTER = 3
# With more tokens than this unread, those that can become nothing any more are given out: each token reads them all.
MAX_UNREAD_TOKENS = 16


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers fit."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of some tokens."""
        ...


class Detokenizer:
    """The text of one request's output, as far as it is certain."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        """`prompt_token_ids`: at least its last few."""
        self._tokenizer = tokenizer
        # Tokens that may still change what the next one reads as; the first `_num_read` of them were given out.
        self._tokens = [int(token_id) for token_id in prompt_token_ids[-CONTEXT_TOKENS:]]
        self._num_read = len(self._tokens)

    def add(self, token_id: int) -> str:
        """The text that this token makes certain; empty while a character is incomplete."""
        self._tokens.append(token_id)
        new = self._unread()
        if new and not new.endswith(REPLACEMENT):
            self._give_out(len(self._tokens))
            return new
        return self._certain(new) if len(self._tokens) - self._num_read > MAX_UNREAD_TOKENS else ""

    def end(self) -> str:
        """What is left when no token follows: bytes that never became a character."""
        return self._unread()

    def _certain(self, unread: str) -> str:
        """Of bytes that are no character, and of tokens without text, what no further token changes."""
        for num_kept in range(MAX_TOKENS_OF_HALF_A_CHARACTER, 2 * MAX_TOKENS_OF_HALF_A_CHARACTER + 1):
            num_certain = len(self._tokens) - num_kept
            certain = self._text(num_certain)[len(self._text(self._num_read)) :]
            if unread.startswith(certain):  # else the cut goes through a character
                if certain:
                    self._give_out(num_certain)
                else:  # what was read before them still decides about a space behind them
                    del self._tokens[self._num_read : num_certain]
                return certain
        return ""

    def _give_out(self, num_tokens: int) -> None:
        """So many of the tokens count as read from now on, and those that did before are needed no more."""
        del self._tokens[: self._num_read]
        self._num_read = num_tokens - self._num_read

    def _unread(self) -> str:
        return self._text(len(self._tokens))[len(self._text(self._num_read)) :]

    def _text(self, num_tokens: int) -> str:
        return self._tokenizer.decode(self._tokens[:num_tokens], skip_special_tokens=True)


# How one token reads by itself: its text, and its bytes, which alone need not be whole characters.

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
