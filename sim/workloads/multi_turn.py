"""Multi-turn chat sessions over shared system prompts, with fixed lengths and rates that change in stages.

Load generators such as inference-perf send this, and golden/measured_serving.jsonl describes it:
`unique_system_prompts x users_per_system_prompt` sessions take turns, one request of each after the other.
"""

from collections.abc import Iterator
from itertools import count

import attrs

from ...core.errors import InputError, one_of, positive
from ..random_draws import Draws
from .stream import BlockIds, SessionRequest

TURNS = ("repeated", "fresh", "resent")
ARRIVALS = ("random", "even")


@attrs.frozen
class Stage:
    """A period with one request rate."""

    duration_s: float
    requests_per_s: float

    def __attrs_post_init__(self) -> None:
        for name, value in (("duration_s", self.duration_s), ("requests_per_s", self.requests_per_s)):
            if not 0 < value < float("inf"):
                raise InputError(f"a stage's {name} is {value}; it must be above 0")

    @property
    def num_requests(self) -> int:
        """Whole requests of the stage."""
        return int(self.duration_s * self.requests_per_s)


@attrs.frozen
class MultiTurnParameters:
    """Sessions, lengths in tokens, and stages.

    Attributes:
        block_size: tokens per block id of a prompt.
        turns: the content of a session's next request. "repeated": the same system prompt and question again;
            "fresh": the system prompt and a new question; "resent": all earlier questions and answers, and a new
            question; when that exceeds `max_input_length`, the session starts over.
        arrivals: "random": the stage's number of requests at independent uniform times (a Poisson process of known
            count, which is the same as exponential gaps scaled to the stage's duration); "even": equal gaps.
        max_input_length: longest prompt of "resent" turns.
    """

    unique_system_prompts: int = attrs.field(default=9, validator=positive)
    users_per_system_prompt: int = attrs.field(default=5, validator=positive)
    system_prompt_tokens: int = attrs.field(default=100, validator=positive)
    question_tokens: int = attrs.field(default=447, validator=positive)
    output_tokens: int = attrs.field(default=248, validator=positive)
    stages: tuple[Stage, ...] = (Stage(600.0, 2.5), Stage(600.0, 6.0))
    block_size: int = attrs.field(default=16, validator=positive)
    turns: str = attrs.field(default="repeated", validator=one_of(*TURNS))
    arrivals: str = attrs.field(default="random", validator=one_of(*ARRIVALS))
    max_input_length: int = attrs.field(default=4_096, validator=positive)

    def __attrs_post_init__(self) -> None:
        if not self.stages:
            raise InputError("a staged workload needs at least one stage")
        first = self.system_prompt_tokens + self.question_tokens
        if self.turns == "resent" and first > self.max_input_length:
            raise InputError(f"a first prompt of {first} tokens exceeds max_input_length {self.max_input_length}")

    @property
    def duration_s(self) -> float:
        """Seconds of all stages."""
        return sum(stage.duration_s for stage in self.stages)


def multi_turn_requests(parameters: MultiTurnParameters, seed: int) -> Iterator[SessionRequest]:
    """The requests of all stages, in order of arrival from 0 s on; sessions take turns in a random order."""
    draws, ids = Draws(seed), BlockIds()
    sessions = _shuffled(_open_sessions(parameters, ids), draws)
    turns = count()
    start_s = 0.0
    for stage in parameters.stages:
        for arrival_s in _arrivals(stage, parameters.arrivals, draws):
            session = sessions[next(turns) % len(sessions)]
            num_input, hash_ids = next(session)
            yield start_s + arrival_s, num_input, parameters.output_tokens, hash_ids
        start_s += stage.duration_s


def _arrivals(stage: Stage, kind: str, draws: Draws) -> list[float]:
    number = stage.num_requests
    if kind == "even":
        return [index * stage.duration_s / number for index in range(number)]
    return sorted(draws.uniform() * stage.duration_s for _ in range(number))


_Prompt = tuple[int, tuple[int, ...]]


def _open_sessions(parameters: MultiTurnParameters, ids: BlockIds) -> list[Iterator[_Prompt]]:
    shared_blocks = parameters.system_prompt_tokens // parameters.block_size
    sessions: list[Iterator[_Prompt]] = []
    for _ in range(parameters.unique_system_prompts):
        system_ids = ids.new(shared_blocks)
        sessions.extend(_session(parameters, ids, system_ids) for _ in range(parameters.users_per_system_prompt))
    return sessions


def _session(p: MultiTurnParameters, ids: BlockIds, system_ids: list[int]) -> Iterator[_Prompt]:
    """The session's prompts, in an endless stream."""
    first_tokens = p.system_prompt_tokens + p.question_tokens
    shared_ids, shared_tokens, num_tokens = system_ids, p.system_prompt_tokens, first_tokens
    while True:
        prompt_ids = ids.grown(shared_ids, shared_tokens, num_tokens, p.block_size)
        yield num_tokens, tuple(prompt_ids)
        if p.turns == "repeated":
            shared_ids, shared_tokens = prompt_ids, num_tokens
            while True:
                yield num_tokens, tuple(prompt_ids)
        if p.turns == "resent" and num_tokens + p.output_tokens + p.question_tokens <= p.max_input_length:
            shared_ids, shared_tokens = prompt_ids, num_tokens
            num_tokens += p.output_tokens + p.question_tokens
        else:
            shared_ids, shared_tokens, num_tokens = system_ids, p.system_prompt_tokens, first_tokens


def _shuffled(sessions: list[Iterator[_Prompt]], draws: Draws) -> list[Iterator[_Prompt]]:
    keyed = [(draws.uniform(), place) for place in range(len(sessions))]
    return [sessions[place] for _, place in sorted(keyed)]
