"""The bodies that clients send to the completions and the chat endpoint, checked field by field.

Fields are OpenAI's; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`,
`cache_salt`, `priority` and what concerns the chat template are vLLM's extensions. A field that is in neither list
below is refused by name, not ignored. Types and the bounds of this API are checked here, other bounds by
`SamplingSettings`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import attrs
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)

from .errors import ApiError, invalid_request, unsupported_parameter

# Parameters of OpenAI's API (and of vLLM's extensions to it) that this server does not serve.


@attrs.frozen
class Unsupported:
    """Why a parameter is refused, and the values that ask for nothing; null always does."""

    reason: str
    neutral: tuple[Any, ...] = ()


_NO_TOOLS = "this server runs no tools"
_TEXT_ONLY = "this server takes and returns text only"
_NOBODY_READS_IT = "nothing here reads it; to keep a tenant's cached prefixes apart, give cache_salt"
_NO_HOSTED_SERVICE = "it belongs to OpenAI's hosted service"

_OF_BOTH: Mapping[str, Unsupported] = {
    "user": Unsupported(_NOBODY_READS_IT),
    "use_beam_search": Unsupported("this server samples; it searches no beams", (False,)),
    "length_penalty": Unsupported("this server searches no beams", (1,)),
    "echo": Unsupported("this server returns no prompts", (False,)),
    "prompt_logprobs": Unsupported("this server returns no logprobs of prompts"),
    "guided_json": Unsupported("this server constrains no output"),
    "guided_regex": Unsupported("this server constrains no output"),
    "guided_choice": Unsupported("this server constrains no output", ([],)),
    "guided_grammar": Unsupported("this server constrains no output"),
    "structured_outputs": Unsupported("this server constrains no output", ({},)),
}

OF_COMPLETIONS: Mapping[str, Unsupported] = {
    **_OF_BOTH,
    "suffix": Unsupported("this server fills no gaps", ("",)),
    "response_format": Unsupported("this server constrains no output", ({"type": "text"},)),
}

OF_CHAT: Mapping[str, Unsupported] = {
    **_OF_BOTH,
    "tools": Unsupported(_NO_TOOLS, ([],)),
    "tool_choice": Unsupported(_NO_TOOLS, ("none",)),
    "parallel_tool_calls": Unsupported(_NO_TOOLS, (False,)),
    "functions": Unsupported(_NO_TOOLS, ([],)),
    "function_call": Unsupported(_NO_TOOLS, ("none",)),
    "web_search_options": Unsupported(_NO_TOOLS),
    "response_format": Unsupported("this server constrains no output", ({"type": "text"},)),
    "modalities": Unsupported(_TEXT_ONLY, (["text"],)),
    "audio": Unsupported(_TEXT_ONLY),
    "prediction": Unsupported("this server drafts nothing from a given text"),
    "reasoning_effort": Unsupported("set what the chat template knows through chat_template_kwargs", ("none",)),
    "verbosity": Unsupported("say it in the prompt"),
    "metadata": Unsupported(_NO_HOSTED_SERVICE, ({},)),
    "store": Unsupported(_NO_HOSTED_SERVICE, (False,)),
    "service_tier": Unsupported(f"{_NO_HOSTED_SERVICE}; use priority", ("auto", "default")),
    "moderation": Unsupported(_NO_HOSTED_SERVICE),
    "prompt_cache_key": Unsupported(_NOBODY_READS_IT),
    "prompt_cache_options": Unsupported(_NOBODY_READS_IT),
    "prompt_cache_retention": Unsupported("prefixes stay cached until their blocks are needed"),
    "safety_identifier": Unsupported(_NOBODY_READS_IT),
    "chat_template": Unsupported("the template is the tokenizer's own"),
}

OF_MESSAGES: Mapping[str, Unsupported] = {
    "name": Unsupported("chat templates have no place for it; say it in the content"),
    "tool_calls": Unsupported(_NO_TOOLS, ([],)),
    "tool_call_id": Unsupported(_NO_TOOLS),
    "function_call": Unsupported(_NO_TOOLS),
    "audio": Unsupported(_TEXT_ONLY),
    "refusal": Unsupported("put it into the content"),
    "annotations": Unsupported("put them into the content", ([],)),
}


def without_unsupported(given: Mapping[str, Any], unsupported: Mapping[str, Unsupported], place: str) -> dict[str, Any]:
    """What is left of `given` without the parameters that ask for nothing.

    Raises:
        ApiError: one of them asks for something; names it. `place` stands before its name.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        known = unsupported.get(name)
        if known is None:
            kept[name] = value
        elif value is not None and not any(_is_the_same(value, each) for each in known.neutral):
            message = f"{place}{name} is not supported: {known.reason} ({_way_out(known)})"
            raise unsupported_parameter(place + name, message)
    return kept


def _is_the_same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _way_out(known: Unsupported) -> str:
    values = " or ".join(json.dumps(each) for each in known.neutral)
    return f"leave it out, or give {values}" if values else "leave it out"


# What OpenAI's API takes where a client gives none.
DEFAULT_MAX_TOKENS_OF_COMPLETIONS = 16
MAX_LOGPROBS = 20
# Beyond every model's length and vocabulary, and within what counters hold; the engine says what really fits.
MAX_TOKENS = 1 << 31
# One spelling of each, so that no two keys mean the same token.
TOKEN_KEY = re.compile("0|[1-9][0-9]{0,18}")
# Each is looked for in every token's text.
MAX_STOPS = 16


def _one_of(expected: str) -> WrapValidator:
    """Says what was expected in one sentence where a union would complain about each of its members."""

    def check(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"it must be {expected}") from None

    return WrapValidator(check)


def _between(lowest: int, highest: int | None, meaning: str = "") -> AfterValidator:
    expected = f"{lowest:,} or more" if highest is None else f"{lowest:,} to {highest:,}"

    def check(value: float) -> float:
        if value < lowest or (highest is not None and value > highest):
            raise ValueError(f"it must be {expected}{meaning}")
        return value

    return AfterValidator(check)


def _check_token_keys(biases: dict[str, float]) -> dict[str, float]:
    for key in biases:
        if not TOKEN_KEY.fullmatch(key):
            raise ValueError(f'key {key[:20]!r} is no token id; keys are token ids as text, such as "50256"')
    return biases


def _check_utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is a lone surrogate, which no UTF-8 text has") from None
    return text


Text: TypeAlias = Annotated[str, AfterValidator(_check_utf8)]
TokenId: TypeAlias = Annotated[int, Field(ge=0)]
# A list is as long as a body allows, and one thing that is wrong with it is enough to be told.
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[Text], Field(fail_fast=True)]
MaxTokens: TypeAlias = Annotated[int, _between(1, MAX_TOKENS)]
NumLogprobs: TypeAlias = Annotated[int, _between(0, MAX_LOGPROBS)]
Prompt: TypeAlias = Text | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]


def _without(param: str, needed: str) -> ApiError:
    """400: one field has no meaning without another one."""
    return invalid_request(f"{param} has no effect without {needed}: true; leave it out, or give both", param)


class StrictModel(BaseModel):
    """Types as JSON has them, no field that is not listed, no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(StrictModel):
    """What a stream holds besides its text."""

    include_usage: bool | None = None
    # Padding against readers of encrypted traffic, which this server never adds.
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(StrictModel):
    """What both endpoints take."""

    unsupported: ClassVar[dict[str, Unsupported]] = {}
    # The field that holds the prompt.
    prompt_param: ClassVar[str]

    model: Text | None = None
    n: Annotated[int, _between(1, None)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: int | None = None
    temperature: Annotated[float, _between(0, 2)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, _between(-1, MAX_TOKENS, " (0 and -1: all tokens)")] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], AfterValidator(_check_token_keys)] | None = None
    seed: Annotated[int, _between(-(1 << 63), (1 << 63) - 1)] | None = None
    stop: Annotated[Text | Texts | None, _one_of("text or a list of texts (UTF-8 that can be encoded)")] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1)
    priority: Annotated[int, _between(-(1 << 31), (1 << 31) - 1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, given: Any) -> Any:
        return without_unsupported(given, cls.unsupported, "") if isinstance(given, dict) else given

    @field_validator("stop")
    @classmethod
    def _are_few(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if isinstance(stop, list) and len(stop) > MAX_STOPS:
            raise ValueError(f"{len(stop)} texts; at most {MAX_STOPS} are looked for")
        return stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise _without("stream_options", "stream")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def biases(self) -> dict[int, float]:
        """`logit_bias` by token."""
        return {int(key): bias for key, bias in (self.logit_bias or {}).items()}

    @property
    def max_output_tokens(self) -> int | None:
        """Tokens of a choice at most, as given."""
        return self.max_tokens

    @property
    def max_tokens_param(self) -> str | None:
        """The field that gave them; None: none did."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def default_max_tokens(self) -> int | None:
        """Tokens of a choice at most where none are given; None: as many as fit behind the prompt."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token; None: not even its own log probability."""
        return None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    unsupported: ClassVar[dict[str, Unsupported]] = dict(OF_COMPLETIONS)
    prompt_param: ClassVar[str] = "prompt"

    best_of: Annotated[int, _between(1, None)] | None = None
    logprobs: NumLogprobs | None = None
    prompt: Annotated[
        Prompt,
        _one_of(
            "text, a list of texts (UTF-8 that can be encoded), a list of token ids (whole numbers from 0 on) or a "
            "list of such lists"
        ),
    ]

    @field_validator("prompt")
    @classmethod
    def _is_not_empty(cls, prompt: Prompt) -> Prompt:
        if not prompt or (isinstance(prompt, list) and not all(each or each == 0 for each in prompt)):
            raise ValueError("every prompt needs at least one token")
        return prompt

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionRequest":
        """The best of as many as are returned are all of them; the others are never shown."""
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise invalid_request(f"best_of is {self.best_of}; it must be n {n} or more; leave it out", "best_of")
        if self.best_of is not None and self.best_of > n:
            raise unsupported_parameter(
                "best_of",
                f"best_of {self.best_of} with n {n} is not supported: this server returns every choice that it makes "
                f"(leave it out, or give {n})",
            )
        return self

    @property
    def default_max_tokens(self) -> int | None:
        """OpenAI's 16, or what fits."""
        return DEFAULT_MAX_TOKENS_OF_COMPLETIONS

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens are reported with each token; None: not even its own log probability."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """Each prompt as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


class TextPart(StrictModel):
    """A part of a message; images, sounds and files are refused."""

    type: Literal["text"]
    text: Text


TextParts: TypeAlias = Annotated[list[TextPart], Field(fail_fast=True)]


class Message(StrictModel):
    """One message of a conversation. `developer` is what newer clients call `system`, and is rendered as such."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | TextParts, _one_of('text, or a list of {"type": "text", "text": ...}')]

    def as_template_input(self) -> dict[str, str]:
        """Role and text, as chat templates take them; parts are joined as they are."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    unsupported: ClassVar[dict[str, Unsupported]] = dict(OF_CHAT)
    prompt_param: ClassVar[str] = "messages"

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    max_completion_tokens: MaxTokens | None = None
    add_generation_prompt: bool | None = Field(None, description="true unless given")
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the chat template")

    @field_validator("messages", mode="before")
    @classmethod
    def _refuse_unsupported_in_messages(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        return [
            without_unsupported(message, OF_MESSAGES, f"messages.{place}.") if isinstance(message, dict) else message
            for place, message in enumerate(given)
        ]

    @model_validator(mode="after")
    def _check_agreement(self) -> "ChatCompletionRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid_request(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} are the same "
                "thing; give one of them",
                "max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise _without("top_logprobs", "logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid_request(
                "continue_final_message goes on with the last message, and add_generation_prompt opens a new one; give "
                "one of them",
                "add_generation_prompt",
            )
        return self

    @property
    def max_output_tokens(self) -> int | None:
        """As given, under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str | None:
        """The name under which they were given; None: none."""
        return super().max_tokens_param if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """As `CompletionRequest.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None
