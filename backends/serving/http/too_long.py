"""What the API answers where a prompt and the output that is asked for are longer than any request may be."""

from collections.abc import Sequence

from ....core.errors import DoesNotFitError
from ....core.types import Request
from ..engine.lengths import RequestLengths
from .errors import ApiError, invalid_request


def name_of_prompt(param: str, place: int, num_prompts: int) -> str:
    """What an error calls a prompt: its field, and of several its place."""
    return param if num_prompts == 1 else f"{param}[{place}]"


def check_lengths(
    lengths: RequestLengths,
    num_prompt_tokens: Sequence[int],
    max_tokens: Sequence[int],
    prompt_param: str,
    max_tokens_param: str | None,
) -> None:
    """Refuse all prompts of a request if one of them is too long, and count it as rejected.

    Args:
        lengths: of the engine.
        num_prompt_tokens: of each prompt.
        max_tokens: output tokens of each, at most.
        prompt_param: the field that the prompts came from.
        max_tokens_param: the field that said how many output tokens there may be; None: none did.

    Raises:
        ApiError: 400 that names the field to change: the prompt where it is too long alone, else `max_tokens_param`.
    """
    for place, (num_tokens, most_wanted) in enumerate(zip(num_prompt_tokens, max_tokens, strict=True)):
        try:
            lengths.check(Request("", num_tokens, most_wanted))
        except DoesNotFitError as error:
            prompt = name_of_prompt(prompt_param, place, len(num_prompt_tokens))
            raise _too_long(lengths, num_tokens, most_wanted, prompt, prompt_param, max_tokens_param) from error


def _too_long(
    lengths: RequestLengths,
    num_prompt_tokens: int,
    max_tokens: int,
    prompt: str,
    prompt_param: str,
    max_tokens_param: str | None,
) -> ApiError:
    output = max_tokens_param or "the least"
    most = lengths.most_output_tokens(num_prompt_tokens)
    if most:
        param = max_tokens_param
        way_out = f"{most:,} fit behind this prompt; set {output} to {most:,} at most, or shorten {prompt}"
    else:
        param = prompt_param
        way_out = f"a prompt may have {lengths.num_prompt_tokens:,}; shorten it"
        if max_tokens > 1:
            way_out += f", and set {output} to what is left"
    return invalid_request(
        f"{num_prompt_tokens:,} tokens in {prompt} and {max_tokens:,} of output ({output}) are too many: {way_out}",
        param,
        "context_length_exceeded",
    )
