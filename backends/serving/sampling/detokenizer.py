"""Turns output tokens into text as they arrive, in whole characters, and spells single tokens."""

import re
from collections.abc import Sequence
from typing import Final, Protocol

import attrs

# Prompt tokens that are decoded together with the first output: spaces and bytes depend on the tokens before.
CONTEXT_TOKENS = 6
# What a decoder shows for bytes that are no character yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes, so at most this many of its tokens come before its last one.
MAX_TOKENS_OF_HALF_A_CHARACTER = 3
# With more unread tokens than this, those that cannot become a character are returned: each new token decodes them all.
MAX_UNREAD_TOKENS = 16
# The name of a byte in vocabularies with byte fallback.
_NAMED_BYTE: Final = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """The tokenizer that turns outputs into text; those of transformers fit."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""
        ...


class Detokenizer:
    """Decodes one request's output as soon as its text can no longer change."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        """Start after a prompt, of which `prompt_token_ids` are at least the last `CONTEXT_TOKENS`."""
        self._tokenizer = tokenizer
        # Tokens that may still change how the next one decodes; the text of the first `_num_read` was returned.
        self._tokens = [int(token_id) for token_id in prompt_token_ids[-CONTEXT_TOKENS:]]
        self._num_read = len(self._tokens)

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        self._tokens.append(token_id)
        new = self._unread()
        if new and not new.endswith(REPLACEMENT):
            self._mark_read(len(self._tokens))
            return new
        return self._certain(new) if len(self._tokens) - self._num_read > MAX_UNREAD_TOKENS else ""

    def end(self) -> str:
        """Return the rest when no token follows: bytes that never became a character."""
        return self._unread()

    def _certain(self, unread: str) -> str:
        """Return the text that no further token changes, of bytes that are no character and of tokens without text."""
        for num_kept in range(MAX_TOKENS_OF_HALF_A_CHARACTER, 2 * MAX_TOKENS_OF_HALF_A_CHARACTER + 1):
            num_certain = len(self._tokens) - num_kept
            certain = self._text(num_certain)[len(self._text(self._num_read)) :]
            if unread.startswith(certain):  # else the cut goes through a character
                if certain:
                    self._mark_read(num_certain)
                else:  # the text before them still decides about a space after them
                    del self._tokens[self._num_read : num_certain]
                return certain
        return ""

    def _mark_read(self, num_tokens: int) -> None:
        """Mark the first `num_tokens` as read, and drop those that were read before."""
        del self._tokens[: self._num_read]
        self._num_read = num_tokens - self._num_read

    def _unread(self) -> str:
        return self._text(len(self._tokens))[len(self._text(self._num_read)) :]

    def _text(self, num_tokens: int) -> str:
        return self._tokenizer.decode(self._tokens[:num_tokens], skip_special_tokens=True)


@attrs.frozen
class TokenSpelling:
    """The text and bytes of one token, which need not be whole characters."""

    text: str  # text that the token adds; incomplete characters are shown as replacement characters
    utf8: bytes | None  # its bytes; None: the tokenizer does not tell them


class NamingTokenizer(Tokenizer, Protocol):
    """The tokenizer that spells single tokens; those of transformers fit."""

    def convert_ids_to_tokens(self, ids: int) -> str:
        """Return the name of a token in the vocabulary."""
        ...


class TokenSpeller:
    """Spells the tokens of one tokenizer. Use it in one thread only."""

    def __init__(self, tokenizer: NamingTokenizer) -> None:
        self._tokenizer = tokenizer
        # The alphabet of byte-level BPE (GPT-2's): printable bytes of Latin-1 are their own characters, the others in
        # order are the characters from 256 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(0x100) if byte not in printable]
        self._byte_of = {chr(byte): byte for byte in printable}
        self._byte_of |= {chr(0x100 + place): byte for place, byte in enumerate(others)}

    def __call__(self, token_id: int) -> TokenSpelling:
        """Return the spelling of a token of the model."""
        alone = self._tokenizer.decode([token_id])
        if REPLACEMENT in alone:
            return TokenSpelling(alone, self._named_bytes(token_id, alone))
        # A tokenizer may drop the space at the start of a text; the second of two tokens keeps it.
        twice = self._tokenizer.decode([token_id, token_id])
        text = twice[len(alone) :] if twice.startswith(alone) else alone
        return TokenSpelling(text, text.encode())

    def _named_bytes(self, token_id: int, text: str) -> bytes | None:
        """Return the bytes in the vocabulary's name of a token, if they decode to this text."""
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        named_byte = _NAMED_BYTE.fullmatch(name)
        if named_byte is not None:
            return bytes.fromhex(named_byte[1])
        if any(character not in self._byte_of for character in name):
            return None
        found = bytes(self._byte_of[character] for character in name)
        return found if found.decode(errors="replace") == text else None
