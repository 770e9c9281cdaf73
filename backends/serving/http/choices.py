"""The choices of one HTTP request. Each is a request of the engine, and all end when the client's request ends."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import attrs

from ....core.errors import DoesNotFitError, InputError
from ....core.types import Request
from ..engine.live_engine import LiveEngine
from ..engine.request import LiveRequest, TokenDelta
from ..engine.request_checks import RequestLengths
from ..errors import EngineFailedError, EngineStoppedError, QueueFullError, SettingError
from ..sampling.settings import NUM_SEEDS, SamplingSettings
from .errors import ApiError, engine_failed, invalid_request, queue_full, shutting_down
from .requests import GenerationRequest, TokenIds
from .responses import Piece


@attrs.frozen(eq=False)
class Choice:
    """One requested output."""

    index: int  # index of the choice in the answer
    prompt: int  # index of the prompt that it continues
    live: LiveRequest  # the engine's request


def submit_choices(
    engine: LiveEngine,
    body: GenerationRequest,
    answer_id: str,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SamplingSettings],
    cache_salt: str | None,
    retry_after_s: Callable[[], int],
) -> list[Choice]:
    """Submit all choices of an HTTP request, or none.

    The engine's requests are named `ID-0`, `ID-1`, ... after `answer_id`. The first choice of a prompt gets the seed of
    its settings, each further choice the next one. The salt is that of `LiveEngine.submit`.

    Raises:
        ApiError: the engine's error, as it is sent to the client.
    """
    choices: list[Choice] = []
    n = body.n or 1
    try:
        for prompt, (token_ids, of_prompt) in enumerate(zip(prompts, settings, strict=True)):
            places = range(len(choices), len(choices) + n)
            seed = of_prompt.seed
            lives = engine.submit_samples(
                token_ids,
                [of_prompt if seed is None else of_prompt.with_seed((seed + i) % NUM_SEEDS) for i in range(n)],
                priority=body.priority or 0,
                cache_salt=cache_salt,
                request_ids=[f"{answer_id}-{place}" for place in places],
            )
            choices += [Choice(place, prompt, live) for place, live in zip(places, lives, strict=True)]
    except Exception as error:
        cancel_all(choices)
        raise _as_api_error(error, body.prompt_param, retry_after_s) from error
    return choices


def cancel_all(choices: Sequence[Choice]) -> None:
    """Cancel the choices that have not ended."""
    for choice in choices:
        choice.live.cancel()


async def pieces_of(choice: Choice, on_gap: Callable[[float], None]) -> AsyncGenerator[Piece, None]:
    """Yield the output of a choice, as its only reader, in pieces that can be shown; the last has the finish reason.

    `on_gap` is called with the seconds between two tokens.

    Raises:
        ApiError: the engine was shut down, or failed, before the end.
    """
    keeps_deltas = choice.live.settings.logprobs is not None
    held: list[TokenDelta] = []
    num_characters = 0
    last_ns: int | None = None
    try:
        async for delta in choice.live:
            if last_ns is not None:
                on_gap((delta.time_ns - last_ns) / 1e9)
            last_ns = delta.time_ns
            if keeps_deltas:
                held.append(delta)
            text = delta.text or ""
            if text or delta.finish_reason is not None:
                yield Piece(text, tuple(held), delta.finish_reason, num_characters)
                num_characters += len(text)
                held.clear()
            if delta.finish_reason is not None:
                return
    except EngineFailedError as error:
        raise engine_failed() from error
    raise shutting_down()


async def merged(
    choices: Sequence[Choice], on_gap: Callable[[float], None]
) -> AsyncGenerator[tuple[Choice, Piece], None]:
    """Yield the pieces of all choices as they arrive. At most one piece of each is read ahead."""
    ready: asyncio.Queue[tuple[Choice, Piece | ApiError | None]] = asyncio.Queue(maxsize=1)

    async def read(choice: Choice) -> None:
        end: ApiError | None = None
        try:
            async with aclosing(pieces_of(choice, on_gap)) as pieces:
                async for piece in pieces:
                    await ready.put((choice, piece))
        except ApiError as error:
            end = error
        await ready.put((choice, end))

    readers = [asyncio.create_task(read(choice)) for choice in choices]
    try:
        num_open = len(readers)
        while num_open:
            choice, piece = await ready.get()
            if isinstance(piece, ApiError):
                raise piece
            if piece is None:
                num_open -= 1
            else:
                yield choice, piece
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def collected(choices: Sequence[Choice], on_gap: Callable[[float], None]) -> list[Piece]:
    """Return the whole output of each choice."""

    async def whole(choice: Choice) -> Piece:
        pieces = [piece async for piece in pieces_of(choice, on_gap)]
        deltas = tuple(delta for piece in pieces for delta in piece.deltas)
        return Piece("".join(piece.text for piece in pieces), deltas, pieces[-1].finish_reason)

    return list(await asyncio.gather(*map(whole, choices)))


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Count the tokens of an answer. A prompt counts once for all choices, with its first choice's cached tokens."""
    stats = [choice.live.stats for choice in choices]
    first_of_prompt = {choice.prompt: each for choice, each in zip(reversed(choices), reversed(stats), strict=True)}
    prompt_tokens = sum(each.num_prompt_tokens for each in first_of_prompt.values())
    completion_tokens = sum(each.num_output_tokens for each in stats)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(each.num_cached_tokens or 0 for each in first_of_prompt.values())
        },
    }


def _as_api_error(error: Exception, prompt_param: str, retry_after_s: Callable[[], int]) -> Exception:
    match error:
        case QueueFullError():
            return queue_full(str(error), retry_after_s())
        case SettingError():
            return invalid_request(str(error), error.setting)
        case InputError():
            return invalid_request(str(error), prompt_param)
        case EngineStoppedError():
            return shutting_down()
        case EngineFailedError():
            return engine_failed()
        case _:
            return error


def name_of_prompt(param: str, place: int, num_prompts: int) -> str:
    """Return a prompt's name in errors: its field, with its index if there are several."""
    return param if num_prompts == 1 else f"{param}[{place}]"


def check_lengths(
    lengths: RequestLengths, body: GenerationRequest, prompts: Sequence[TokenIds], max_tokens: Sequence[int]
) -> None:
    """Refuse all prompts of a request if one of them is too long, and count it as rejected.

    Raises:
        ApiError: 400 that names the field to change: the prompt if it is too long alone, else that of `max_tokens`.
    """
    for place, (prompt, most_wanted) in enumerate(zip(prompts, max_tokens, strict=True)):
        try:
            lengths.check(Request("", len(prompt), most_wanted))
        except DoesNotFitError as error:
            name = name_of_prompt(body.prompt_param, place, len(prompts))
            raise _too_long(lengths, body, len(prompt), most_wanted, name) from error


def _too_long(
    lengths: RequestLengths, body: GenerationRequest, num_prompt_tokens: int, max_tokens: int, prompt: str
) -> ApiError:
    output = body.max_tokens_param or "the least"
    most = lengths.most_output_tokens(num_prompt_tokens)
    if most:
        param = body.max_tokens_param
        way_out = f"{most:,} fit behind this prompt; set {output} to {most:,} at most, or shorten {prompt}"
    else:
        param = body.prompt_param
        way_out = f"a prompt may have {lengths.num_prompt_tokens:,}; shorten it"
        if max_tokens > 1:
            way_out += f", and set {output} to what is left"
    return invalid_request(
        f"{num_prompt_tokens:,} tokens in {prompt} and {max_tokens:,} of output ({output}) are too many: {way_out}",
        param,
        "context_length_exceeded",
    )
