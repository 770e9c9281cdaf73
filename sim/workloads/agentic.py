"""Coding agents: long sessions of many turns, each resending everything before it, over a few shared tool prompts.

The parameters were fitted by hand to two dozen public coding-agent sessions (kv-cache-tester; blocks of 64 tokens):
lengths, turns, growth, and the time that tools and people take. No row of them is stored here. The public sessions
do not say what they share with each other; here sessions of one client version share its tool prompt.
"""

from collections.abc import Iterator
from itertools import count

import attrs

from ..random_draws import Draws
from ..traces.sessions import TurnRecord
from .stream import BlockIds, TurnRequest, merge_sessions


@attrs.frozen
class AgenticParameters:
    """The model. Lengths in tokens, times in seconds; a lognormal is given as (median, sigma)."""

    block_size: int = 64
    sessions_per_s: float = 1 / 60
    warm_up_s: float = 3_600.0
    """Sessions begin this long before the window, so that it opens on agents at work."""
    tool_prompt_tokens: tuple[int, ...] = (12_439, 12_597, 9_537, 8_315)
    """One a client version, all equally common; the beginning of every prompt of its sessions."""
    system_tokens: int = 2_770
    """What follows the tools and differs from session to session (project, date, instructions)."""
    task_tokens: tuple[float, float] = (700.0, 1.2)
    resumed_share: float = 0.5
    """Sessions that open with a history."""
    history_tokens: tuple[float, float] = (80_000.0, 0.7)
    go_on: float = 30 / 31
    """The chance of another turn: 31 turns on average."""
    output_tokens: tuple[float, float] = (257.0, 1.25)
    max_output_length: int = 10_500
    tool_result_tokens: tuple[float, float] = (320.0, 1.6)
    """What a turn adds beyond the answer before it."""
    max_input_length: int = 200_000
    """A prompt that would be longer is compacted: tools, system and a summary remain."""
    summary_tokens: tuple[float, float] = (8_000.0, 0.5)
    serving_s: float = 3.0
    serving_s_per_output_token: float = 1 / 60
    """The recorded service's time to answer, a part of the time between two requests."""
    human_share: float = 0.4
    """Turns that wait for a person; the others wait for a tool."""
    human_s: tuple[float, float] = (80.0, 1.6)
    tool_s: tuple[float, float] = (7.0, 0.6)


def agentic_requests(parameters: AgenticParameters, seed: int) -> Iterator[TurnRequest]:
    """Requests for ever, in order of arrival from 0 s on."""
    draws, ids = Draws(seed), BlockIds()
    tool_ids = [ids.new(num_tokens // parameters.block_size) for num_tokens in parameters.tool_prompt_tokens]

    names = count()

    def open_session(start: float) -> Iterator[TurnRequest]:
        return _session(start, parameters, draws, ids, tool_ids, next(names))

    for request in merge_sessions(_starts(parameters, draws), open_session):
        if request[0] >= 0:
            yield request


def _starts(parameters: AgenticParameters, draws: Draws) -> Iterator[float]:
    now = -parameters.warm_up_s
    while True:
        yield now
        now += draws.exponential(1 / parameters.sessions_per_s)


def _session(
    now: float, parameters: AgenticParameters, draws: Draws, block_ids: BlockIds, tool_ids: list[list[int]], name: int
) -> Iterator[TurnRequest]:
    p = parameters
    version = int(draws.uniform() * len(tool_ids))
    shared = p.tool_prompt_tokens[version]
    base_tokens = shared + p.system_tokens
    num_tokens = base_tokens + _at_least_one(draws.lognormal(*p.task_tokens))
    if draws.happens(p.resumed_share):
        num_tokens = min(num_tokens + round(draws.lognormal(*p.history_tokens)), p.max_input_length)
    ids = block_ids.grown(tool_ids[version], shared, num_tokens, p.block_size)
    think_s: float | None = None
    while True:
        output = min(_at_least_one(draws.lognormal(*p.output_tokens)), p.max_output_length)
        answered_s = p.serving_s + output * p.serving_s_per_output_token
        turn = TurnRecord(key=name, after=(name,), think_s=think_s, answered_s=answered_s)
        yield now, num_tokens, output, tuple(ids), turn
        if not draws.happens(p.go_on):
            return
        waits_for = p.human_s if draws.happens(p.human_share) else p.tool_s
        think_s = draws.lognormal(*waits_for)
        now += answered_s + think_s
        shared = num_tokens
        num_tokens += output + _at_least_one(draws.lognormal(*p.tool_result_tokens))
        if num_tokens > p.max_input_length:
            shared = base_tokens
            num_tokens = base_tokens + _at_least_one(draws.lognormal(*p.summary_tokens))
        ids = block_ids.grown(ids, shared, num_tokens, p.block_size)


def _at_least_one(length: float) -> int:
    return max(1, round(length))
