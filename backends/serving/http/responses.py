"""The answers to clients: whole ones and the chunks of a stream, in the shapes of OpenAI's two endpoints."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs

from ..engine.request import TokenDelta
from ..sampling.detokenizer import REPLACEMENT, TokenSpelling

Speller = Callable[[int], TokenSpelling]

# OpenAI's value for almost impossible tokens; JSON has no infinity for impossible ones.
LEAST_LOGPROB = -9999.0


@attrs.frozen
class Piece:
    """A piece of one choice's output: the text completed since the last piece."""

    text: str
    deltas: tuple[TokenDelta, ...] = ()  # its tokens, if log probabilities were requested
    finish_reason: str | None = None  # the finish reason, in the last piece
    num_characters_before: int = 0  # characters of the choice's text before this piece


@attrs.frozen
class Answer:
    """The fields that all parts of one answer share."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> "Answer":
        """Make an answer with a unique id."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model)

    def document(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return an object of OpenAI's API, without usage."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": list(choices)}


@attrs.frozen
class CompletionShape:
    """The choices of `/v1/completions`. `spell` is set if log probabilities were requested."""

    id_prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    chunk: ClassVar[str] = "text_completion"

    spell: Speller | None = None

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a complete choice: `{"index", "text", "logprobs", "finish_reason"}`."""
        logprobs = None if self.spell is None else _completion_logprobs(piece, self.spell)
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def opening(self, index: int) -> None:
        """Return None: a stream has no chunk before the first text of a choice."""

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a piece of a choice in a stream, shaped like a complete choice."""
        return self.choice(index, piece)


@attrs.frozen
class ChatShape:
    """The choices of `/v1/chat/completions`. `spell` is set if log probabilities were requested."""

    id_prefix: ClassVar[str] = "chatcmpl"
    whole: ClassVar[str] = "chat.completion"
    chunk: ClassVar[str] = "chat.completion.chunk"

    spell: Speller | None = None

    def choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a complete choice: `{"index", "message": {"role", "content"}, "logprobs", "finish_reason"}`."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, **self._end(piece)}

    def opening(self, index: int) -> dict[str, Any]:
        """Return the role, which a stream sends before the first text of a choice."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, **self._end(Piece(""))}

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return a piece of a choice in a stream: `{"index", "delta": {"content"}, "logprobs", "finish_reason"}`."""
        return {"index": index, "delta": {"content": piece.text} if piece.text else {}, **self._end(piece)}

    def _end(self, piece: Piece) -> dict[str, Any]:
        logprobs = None
        if self.spell is not None and piece.deltas:
            logprobs = {"content": [_chat_logprob(delta, self.spell) for delta in piece.deltas], "refusal": None}
        return {"logprobs": logprobs, "finish_reason": piece.finish_reason}


AnswerShape: TypeAlias = CompletionShape | ChatShape


def model_list(names: Iterable[str], created: int, max_model_len: int) -> dict[str, Any]:
    """Return the answer of `/v1/models`; `max_model_len` is vLLM's extension."""
    return {"object": "list", "data": [model_card(name, created, max_model_len) for name in names]}


def model_card(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """Return the answer of `/v1/models/{name}`."""
    return {"id": name, "object": "model", "created": created, "owned_by": "kvledger", "max_model_len": max_model_len}


def _completion_logprobs(piece: Piece, spell: Speller) -> dict[str, Any]:
    tokens: list[str] = []
    likeliest: list[dict[str, float] | None] = []
    offsets: list[int] = []
    place = piece.num_characters_before
    for delta in piece.deltas:
        text = _distinct_text(spell(delta.token_id))
        tokens.append(text)
        offsets.append(place)
        place += len(delta.text or "")
        by_text: dict[str, float] = {}
        for token_id, logprob in delta.top_logprobs:
            by_text.setdefault(_distinct_text(spell(token_id)), _shown(logprob))
        if delta.logprob is not None:
            by_text.setdefault(text, _shown(delta.logprob))
        likeliest.append(by_text if delta.top_logprobs else None)
    return {
        "tokens": tokens,
        "token_logprobs": [None if delta.logprob is None else _shown(delta.logprob) for delta in piece.deltas],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


def _distinct_text(spelling: TokenSpelling) -> str:
    r"""Return a token's text; with replacement characters, its bytes in OpenAI's spelling (`bytes:\xe2\x82`)."""
    if REPLACEMENT not in spelling.text or spelling.utf8 is None:
        return spelling.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling.utf8)


def _chat_logprob(delta: TokenDelta, spell: Speller) -> dict[str, Any]:
    top = [_token_logprob(spell(token_id), logprob) for token_id, logprob in delta.top_logprobs]
    return {**_token_logprob(spell(delta.token_id), delta.logprob), "top_logprobs": top}


def _token_logprob(spelling: TokenSpelling, logprob: float | None) -> dict[str, Any]:
    utf8 = None if spelling.utf8 is None else list(spelling.utf8)
    return {"token": spelling.text, "logprob": None if logprob is None else _shown(logprob), "bytes": utf8}


def _shown(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
