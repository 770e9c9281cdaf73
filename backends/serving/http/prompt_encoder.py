"""Encodes clients' prompts as token ids: texts, token ids, and conversations with the tokenizer's chat template."""

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
from jinja2 import Environment, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ..sampling.detokenizer import NamingTokenizer, TokenSpeller
from .errors import invalid_request, unsupported_parameter
from .requests import ChatCompletionRequest, TokenIds

# Variables that every template gets.
_GIVEN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
    | {"bos_token", "eos_token", "unk_token", "pad_token"}
)


class EncodingTokenizer(NamingTokenizer, Protocol):
    """The tokenizer that encodes prompts; those of transformers fit."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return the token ids of a conversation."""
        ...

    def get_chat_template(self) -> str:
        """Return the template; raise ValueError if there is none."""
        ...


@attrs.define
class PromptEncoder:
    """Encodes the prompts of one model in one thread; another thread may call `spell` meanwhile."""

    _tokenizer: EncodingTokenizer
    spell: TokenSpeller  # returns one token's text and bytes
    vocab_size: int  # all token ids are below it

    @classmethod
    def beside(cls, tokenizer: EncodingTokenizer, vocab_size: int) -> "PromptEncoder":
        """Make an encoder with copies of the tokenizer, which has state and is used by the engine's thread."""
        return cls(copy.deepcopy(tokenizer), TokenSpeller(copy.deepcopy(tokenizer)), vocab_size)

    def of_text(self, prompt: str | TokenIds, name: str = "prompt") -> TokenIds:
        """Return the tokens of a completion's prompt; a text gets the tokenizer's special tokens.

        Raises:
            ApiError: it has no tokens, or one that the model does not have; the error calls the prompt `name`.
        """
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise invalid_request(
                f"{name} holds token {highest}; the model's tokens are 0 to {self.vocab_size - 1}", "prompt"
            )
        if not token_ids:
            raise invalid_request(f"{name} has no token; every prompt needs at least one", "prompt")
        return token_ids

    def of_conversation(self, request: ChatCompletionRequest) -> TokenIds:
        """Return the tokens of a conversation in the model's chat template.

        Raises:
            ApiError: the model has no template, or the template refuses the messages or the variables.
        """
        variables = request.chat_template_kwargs or {}
        self._check_variables(variables)
        opens_answer = request.add_generation_prompt
        if opens_answer is None:
            opens_answer = not request.continue_final_message
        try:
            token_ids = self._tokenizer.apply_chat_template(
                [message.as_template_input() for message in request.messages],
                return_dict=False,
                add_generation_prompt=opens_answer,
                continue_final_message=bool(request.continue_final_message),
                **variables,
            )
        except Exception as error:  # a template is a program, and its only input is the client's
            raise invalid_request(f"the chat template refuses the messages: {error}", "messages") from error
        if not token_ids:
            raise invalid_request("the chat template makes no token of the messages", "messages")
        return token_ids

    def _check_variables(self, given: Mapping[str, Any]) -> None:
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError:
            raise invalid_request(
                "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
            ) from None
        known: set[str] = set()
        if given:
            environment = Environment(extensions=[_GenerationTag, loopcontrols])
            known = meta.find_undeclared_variables(environment.parse(template)) - _GIVEN_VARIABLES
        for name in given:
            if name not in known:
                raise unsupported_parameter(
                    f"chat_template_kwargs.{name}",
                    f"chat_template_kwargs.{name} is no variable of this model's chat template; it has "
                    f"{', '.join(sorted(known)) or 'none'}",
                )


class _GenerationTag(Extension):
    """The tag that marks the assistant's words in transformers' templates; variables inside it count too."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
