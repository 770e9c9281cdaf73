"""The commands of a history: plain data, printed as the program that plays them and saved as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import attrs

TokenRuns: TypeAlias = tuple[tuple[int, int], ...]


def _runs(value: Sequence[Sequence[int]]) -> TokenRuns:
    return tuple([(int(token), int(count)) for token, count in value])


def _strings(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


def _ints(value: Iterable[int]) -> tuple[int, ...]:
    return tuple(value)


@attrs.frozen
class New:
    """A request arrives. `prompt` is its tokens as (token, how often) runs: ((0, 8), (1, 3)) is 8 zeros and 3 ones."""

    request: str
    prompt: TokenRuns = attrs.field(converter=_runs)


@attrs.frozen
class Match:
    """Look up the longest cached prefix; what is found is kept for a later `Allocate(adopt=True)`, stale or not."""

    request: str


@attrs.frozen
class Allocate:
    """Slots for the next tokens of one request; tokens behind the known ones are drafts.

    `adopt` hands in what the last `Match` found; `back` goes on that many tokens before the last valid one; the content
    of `external` tokens behind the hit comes from elsewhere.
    """

    request: str
    num_new_tokens: int
    adopt: bool = False
    back: int = 0
    lookahead: int = 0
    reserved: int = 0
    use_watermark: bool = False
    external: int = 0


@attrs.frozen
class Append:
    """A decode step.

    Every request that has computed all it knows accepts `accepted` of its drafts and outputs a token (`output` the
    first request, the next number the second one, ...). Then each gets slots for what it has not computed yet and for
    `drafts` new drafts.
    """

    requests: tuple[str, ...] = attrs.field(converter=_strings)
    output: int = 0
    accepted: int = 0
    drafts: int = 0
    lookahead: int = 0
    reserved: int = 0


@attrs.frozen
class Gate:
    """Ask whether the whole known sequence could be admitted now."""

    request: str
    adopt: bool = False
    use_watermark: bool = False
    reserved: int = 0


@attrs.frozen
class ReleaseOutOfWindow:
    """Give back what no later token of the request attends to."""

    request: str


@attrs.frozen
class Truncate:
    """Keep the first `num_tokens` placed tokens; with `forget` the tokens behind them are no longer known either."""

    request: str
    num_tokens: int
    forget: bool = False


@attrs.frozen
class Fork:
    """A child shares everything that the parent has placed."""

    parent: str
    child: str


@attrs.frozen
class Free:
    """The request has finished."""

    request: str


@attrs.frozen
class Preempt:
    """The request gives its blocks back and will be allocated anew."""

    request: str


@attrs.frozen
class Abort:
    """The request is gone; a second abort does nothing."""

    request: str


@attrs.frozen
class Evict:
    """Drop the keys of blocks by id."""

    blocks: tuple[int, ...] = attrs.field(converter=_ints)


@attrs.frozen
class Reset:
    """Drop every key; refused while blocks are in use."""


@attrs.frozen
class ReleaseBlocks:
    """Misuse of the pool: release these blocks, although they are not held (so often)."""

    blocks: tuple[int, ...] = attrs.field(converter=_ints)


Command: TypeAlias = (
    New
    | Match
    | Allocate
    | Append
    | Gate
    | ReleaseOutOfWindow
    | Truncate
    | Fork
    | Free
    | Preempt
    | Abort
    | Evict
    | Reset
    | ReleaseBlocks
)

COMMANDS: dict[str, type[Any]] = {
    command.__name__: command
    for command in (
        New,
        Match,
        Allocate,
        Append,
        Gate,
        ReleaseOutOfWindow,
        Truncate,
        Fork,
        Free,
        Preempt,
        Abort,
        Evict,
        Reset,
        ReleaseBlocks,
    )
}


def to_source(command: Command) -> str:
    """The Python expression that makes the command, without arguments that have their default."""
    arguments: list[str] = []
    for field in attrs.fields(type(command)):
        value = getattr(command, field.name)
        if field.default is attrs.NOTHING:
            arguments.append(repr(value))
        elif value != field.default:
            arguments.append(f"{field.name}={value!r}")
    return f"{type(command).__name__}({', '.join(arguments)})"


def to_json(command: Command) -> dict[str, Any]:
    """The command as JSON values."""
    return {"command": type(command).__name__, **attrs.asdict(command)}


def from_json(data: dict[str, Any]) -> Command:
    """The command that `to_json` wrote."""
    fields = dict(data)
    return COMMANDS[fields.pop("command")](**fields)
