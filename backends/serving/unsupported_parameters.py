"""Parameters of OpenAI's API (and of vLLM's extensions to it) that this server does not serve.

Each is refused by name unless it is given the value that asks for nothing: a client may state a default, but never has
something ignored that it asked for.
"""

import json
from collections.abc import Mapping
from typing import Any

import attrs

from .openai_errors import unsupported_parameter


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
