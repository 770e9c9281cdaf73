"""Output tokens into text as they come: whole characters only, and nothing behind a stop text."""

from collections.abc import Sequence
from typing import Protocol

# Tokens of the prompt that the first output is read together with: spaces and bytes depend on what stands before.
CONTEXT_TOKENS = 6
# What a decoder shows for bytes that are no character yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        if not new or new.endswith(REPLACEMENT):
            return ""
        del self._tokens[: self._num_read]
        self._num_read = len(self._tokens)
        return new

    def end(self) -> str:
        """What is left when no token follows: bytes that never became a character."""
        return self._unread()

    def _unread(self) -> str:
        read = self._tokenizer.decode(self._tokens[: self._num_read], skip_special_tokens=True)
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)[len(read) :]


class StopTexts:
    """Looks for the first stop text in an output that comes in pieces, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> tuple[str, str | None]:
        """What may be given out, and the stop text that was found, if any; nothing may follow that."""
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            place, stop = min(found)
            return self._held[:place], stop
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        given = self._held[: len(self._held) - keep]
        self._held = self._held[len(given) :]
        return given, None

    def end(self) -> str:
        """What was held back, when no text follows."""
        return self._held

    def _overlap(self, stop: str) -> int:
        """How many characters at the end could be the beginning of this stop text."""
        longest = min(len(stop) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if self._held.endswith(stop[:length])), 0)
