"""The request bodies of the completions and the chat endpoint, checked field by field.

Fields are OpenAI's; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`,
`cache_salt`, `priority` and those of the chat template are vLLM's extensions. An unknown field is refused by name, not
ignored. Types and the bounds of this API are checked here, other bounds by `SamplingSettings`.
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

MAX_LOGPROBS = 20
# Beyond every model's length and vocabulary, and within the range of counters; the engine checks what fits.
MAX_TOKENS = 1 << 31
# One spelling of each token id, so that no two keys mean the same token.
TOKEN_KEY = re.compile("0|[1-9][0-9]{0,18}")
# Every token's text is searched for each of them.
MAX_STOPS = 16


@attrs.frozen
class Unsupported:
    """A parameter of OpenAI's API (or vLLM's extensions) that is not served: why, and values that have no effect.

    null never has an effect.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


_NO_TOOLS = "this server runs no tools"
_TEXT_ONLY = "this server takes and returns text only"
_NOT_READ = "nothing here reads it; to keep a tenant's cached prefixes apart, give cache_salt"
_NO_HOSTED_SERVICE = "it belongs to OpenAI's hosted service"

_OF_BOTH: Mapping[str, Unsupported] = {
    "user": Unsupported(_NOT_READ),
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
    "prompt_cache_key": Unsupported(_NOT_READ),
    "prompt_cache_options": Unsupported(_NOT_READ),
    "prompt_cache_retention": Unsupported("prefixes stay cached until their blocks are needed"),
    "safety_identifier": Unsupported(_NOT_READ),
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
    """Return `given` without unsupported parameters whose value has no effect.

    Raises:
        ApiError: the value of one has an effect; names the parameter, with `place` before its name.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        known = unsupported.get(name)
        if known is None:
            kept[name] = value
        elif value is not None and not any(
            isinstance(value, bool) == isinstance(each, bool) and value == each for each in known.neutral
        ):
            values = " or ".join(json.dumps(each) for each in known.neutral)
            hint = f"leave it out, or give {values}" if values else "leave it out"
            raise unsupported_parameter(place + name, f"{place}{name} is not supported: {known.reason} ({hint})")
    return kept


def _one_of(expected: str) -> WrapValidator:
    """Replace a union's complaints about each of its members by one sentence about what was expected."""

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
# A list may be as long as a body allows, so only its first mistake is reported.
TokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True)]
Texts: TypeAlias = Annotated[list[Text], Field(fail_fast=True)]
MaxTokens: TypeAlias = Annotated[int, _between(1, MAX_TOKENS)]
NumLogprobs: TypeAlias = Annotated[int, _between(0, MAX_LOGPROBS)]
Prompt: TypeAlias = Text | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]


def _without(param: str, needed: str) -> ApiError:
    """Return 400: one field has no effect without another."""
    return invalid_request(f"{param} has no effect without {needed}: true; leave it out, or give both", param)


class StrictModel(BaseModel):
    """A body with JSON's types, no unlisted fields and no infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(StrictModel):
    """The options of a stream."""

    include_usage: bool | None = None
    # Padding that hides text lengths in encrypted traffic, which this server never adds.
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(StrictModel):
    """The fields of both endpoints."""

    unsupported: ClassVar[dict[str, Unsupported]] = {}
    prompt_param: ClassVar[str]  # the field with the prompt
    # Most tokens of a choice if none are given; None: as many as fit after the prompt.
    default_max_tokens: ClassVar[int | None] = None

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
    def _check_number_of_stops(cls, stop: str | list[str] | None) -> str | list[str] | None:
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
        """Most tokens of a choice, as given."""
        return self.max_tokens

    @property
    def max_tokens_param(self) -> str | None:
        """The field that gives `max_output_tokens`; None: none."""
        return None if self.max_tokens is None else "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens reported with each token and its log probability; None: report neither."""
        return None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    unsupported: ClassVar[dict[str, Unsupported]] = dict(OF_COMPLETIONS)
    prompt_param: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16  # OpenAI's

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
    def _check_not_empty(cls, prompt: Prompt) -> Prompt:
        if not prompt or (isinstance(prompt, list) and not all(each or each == 0 for each in prompt)):
            raise ValueError("every prompt needs at least one token")
        return prompt

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionRequest":
        """Refuse `best_of` above `n`; if they are equal, all choices are returned."""
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
    def num_logprobs(self) -> int | None:
        """Likeliest tokens reported with each token and its log probability; None: report neither."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """The prompts, each as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return self.prompt  # pyright: ignore[reportReturnType]


class TextPart(StrictModel):
    """A text part of a message; images, audio and files are refused."""

    type: Literal["text"]
    text: Text


TextParts: TypeAlias = Annotated[list[TextPart], Field(fail_fast=True)]


class Message(StrictModel):
    """One message of a conversation. Newer clients call the role `system` `developer`; it is rendered as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | TextParts, _one_of('text, or a list of {"type": "text", "text": ...}')]

    def as_template_input(self) -> dict[str, str]:
        """Return role and text for a chat template; parts are joined without a separator."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

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
        """Most tokens of a choice, given under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_param(self) -> str | None:
        """The name under which `max_output_tokens` is given; None: not given."""
        return super().max_tokens_param if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """See `CompletionRequest.num_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None
