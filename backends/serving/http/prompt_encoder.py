"""From what clients send to token ids: texts, token ids, and conversations through the tokenizer's chat template."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
from jinja2 import Environment, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ..sampling.detokenizer import NamingTokenizer, TokenSpeller
from .errors import invalid_request, unsupported_parameter
from .requests import ChatCompletionRequest, TokenIds

# What a template is given anyway.
_OF_THE_SERVER = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    | {"bos_token", "eos_token", "unk_token", "pad_token"}
)


class EncodingTokenizer(NamingTokenizer, Protocol):
    """What is needed of a tokenizer; those of transformers fit."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The token ids of a conversation."""
        ...

    def get_chat_template(self) -> str:
        """The template; ValueError if there is none."""
        ...


@attrs.define
class PromptEncoder:
    """Makes prompts of one model, in one thread; another one may ask for the text of tokens meanwhile.

    Attributes:
        spell: one token's text and bytes.
        vocab_size: token ids lie below it.
    """

    _tokenizer: EncodingTokenizer
    spell: TokenSpeller
    vocab_size: int

    @classmethod
    def beside(cls, tokenizer: EncodingTokenizer, vocab_size: int) -> "PromptEncoder":
        """An encoder with copies of the tokenizer, which keeps state while it works: the engine's thread decodes with
        the original.
        """
        return cls(copy.deepcopy(tokenizer), TokenSpeller(copy.deepcopy(tokenizer)), vocab_size)

    def of_text(self, prompt: str | TokenIds, name: str = "prompt") -> TokenIds:
        """The tokens of a completion's prompt, the tokenizer's special tokens around a text included. An error calls it
        by this name.

        Raises:
            ApiError: no text, none of the model's tokens, or no token at all.
        """
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._check_token_ids(token_ids, name)
        if not token_ids:
            raise invalid_request(f"{name} has no token; every prompt needs at least one", "prompt")
        return token_ids

    def of_conversation(self, request: ChatCompletionRequest) -> TokenIds:
        """The tokens of a conversation as the model's chat template spells it.

        Raises:
            ApiError: the model has no template, or the template refuses the messages or the variables.
        """
        variables = request.chat_template_kwargs or {}
        self._check_variables(variables)
        try:
            token_ids = self._tokenizer.apply_chat_template(
                [message.as_template_input() for message in request.messages],
                return_dict=False,
                add_generation_prompt=_opens_answer(request),
                continue_final_message=bool(request.continue_final_message),
                **variables,
            )
        except Exception as error:  # templates are programs, and all that they run on here is what the client sent
            raise invalid_request(f"the chat template refuses the messages: {error}", "messages") from error
        if not token_ids:
            raise invalid_request("the chat template makes no token of the messages", "messages")
        return token_ids

    def _check_token_ids(self, token_ids: Sequence[int], name: str) -> None:
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise invalid_request(
                f"{name} holds token {highest}; the model's tokens are 0 to {self.vocab_size - 1}", "prompt"
            )

    def _check_variables(self, given: Mapping[str, Any]) -> None:
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError:
            raise invalid_request(
                "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
            ) from None
        known = _template_variables(template) - _OF_THE_SERVER if given else set()
        for name in given:
            if name not in known:
                raise unsupported_parameter(
                    f"chat_template_kwargs.{name}",
                    f"chat_template_kwargs.{name} is no variable of this model's chat template; it has "
                    f"{', '.join(sorted(known)) or 'none'}",
                )


class _GenerationTag(Extension):
    """The tag with which templates of transformers mark the assistant's words; its inside counts here."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_variables(template: str) -> set[str]:
    environment = Environment(extensions=[_GenerationTag, loopcontrols])
    return meta.find_undeclared_variables(environment.parse(template))


def _opens_answer(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt
