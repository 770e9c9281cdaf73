"""Output tokens into text as they come: whole characters only."""

from collections.abc import Sequence
from typing import Protocol

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
