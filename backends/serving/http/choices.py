"""The choices of one HTTP request: each is a request of the engine, and all end when the client's request does."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import attrs

from ....core.errors import InputError
from ..engine.live_engine import LiveEngine
from ..engine.request import LiveRequest
from ..engine.token_stream import TokenDelta
from ..errors import EngineFailedError, EngineStoppedError, QueueFullError, SettingError
from ..sampling.settings import NUM_SEEDS, SamplingSettings
from .errors import ApiError, engine_failed, invalid_request, queue_full, shutting_down
from .responses import Piece


@attrs.frozen(eq=False)
class Choice:
    """One output that a client asked for.

    Attributes:
        index: in the answer.
        prompt: which prompt it continues.
        live: the engine's request.
    """

    index: int
    prompt: int
    live: LiveRequest


@attrs.frozen(kw_only=True)
class Wanted:
    """What one HTTP request asks of the engine.

    Attributes:
        name: of the answer; the engine's requests are named `NAME-0`, `NAME-1`, ...
        prompts: token ids of each prompt.
        n: choices of each.
        settings: of every prompt; a given seed is that of its first choice, and each further one adds 1 to it.
        priority, cache_salt: as `LiveEngine.submit` takes them.
        prompt_param: the field that the prompts came from.
    """

    name: str
    prompts: Sequence[Sequence[int]]
    n: int
    settings: Sequence[SamplingSettings]
    priority: int = 0
    cache_salt: str | None = None
    prompt_param: str = "prompt"


def submit_choices(engine: LiveEngine, wanted: Wanted, retry_after_s: Callable[[], int]) -> list[Choice]:
    """Submit all choices or none.

    Raises:
        ApiError: what the engine answered, as a client is told it.
    """
    choices: list[Choice] = []
    try:
        for prompt, (token_ids, settings) in enumerate(zip(wanted.prompts, wanted.settings, strict=True)):
            places = range(len(choices), len(choices) + wanted.n)
            lives = engine.submit_samples(
                token_ids,
                [_of_sample(settings, sample) for sample in range(wanted.n)],
                priority=wanted.priority,
                cache_salt=wanted.cache_salt,
                request_ids=[f"{wanted.name}-{place}" for place in places],
            )
            choices += [Choice(place, prompt, live) for place, live in zip(places, lives, strict=True)]
    except Exception as error:
        cancel_all(choices)
        raise _told(error, wanted, retry_after_s) from error
    return choices


def cancel_all(choices: Sequence[Choice]) -> None:
    """End what has not ended."""
    for choice in choices:
        choice.live.cancel()


async def pieces_of(choice: Choice, on_gap: Callable[[float], None]) -> AsyncGenerator[Piece, None]:
    """The output of a choice in parts that can be shown; the last one has the finish reason.

    Args:
        choice: read by nobody else.
        on_gap: told of the seconds between two tokens.

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
    """The parts of all choices as they come. A part at most of each is taken before the reader wants it."""
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
    """The whole output of each choice."""
    return list(await asyncio.gather(*(_whole(choice, on_gap) for choice in choices)))


async def _whole(choice: Choice, on_gap: Callable[[float], None]) -> Piece:
    pieces = [piece async for piece in pieces_of(choice, on_gap)]
    deltas = tuple(delta for piece in pieces for delta in piece.deltas)
    return Piece("".join(piece.text for piece in pieces), deltas, pieces[-1].finish_reason)


def _of_sample(settings: SamplingSettings, sample: int) -> SamplingSettings:
    if settings.seed is None:
        return settings
    return settings.with_seed((settings.seed + sample) % NUM_SEEDS)


def _told(error: Exception, wanted: Wanted, retry_after_s: Callable[[], int]) -> Exception:
    match error:
        case QueueFullError():
            return queue_full(str(error), retry_after_s())
        case SettingError():
            return invalid_request(str(error), error.setting)
        case InputError():
            return invalid_request(str(error), wanted.prompt_param)
        case EngineStoppedError():
            return shutting_down()
        case EngineFailedError():
            return engine_failed()
        case _:
            return error
