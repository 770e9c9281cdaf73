"""A chat service: many conversations over one system prompt, most of them about a long document.

The shape and the parameters were fitted by hand to the public Mooncake conversation trace (FAST'25): its lengths, its
arrivals every three seconds, and its hit rate at every LRU capacity. No row of that trace is stored here.
"""

import math
from collections.abc import Iterator
from itertools import count

import attrs

from ..random_draws import Draws
from ..traces.sessions import TurnRecord
from .stream import BlockIds, TurnRequest, merge_sessions


@attrs.frozen
class ChatParameters:
    """The model. Lengths in tokens, times in seconds; a lognormal is given as (median, sigma)."""

    block_size: int = 512
    max_input_length: int = 126_000
    max_output_length: int = 2_000
    arrival_tick_s: float = 3.0
    """Arrivals are recorded at the next multiple of this, so that many share a timestamp."""
    conversations_per_s: float = 2.02
    warm_up_s: float = 1_800.0
    """Conversations begin this long before the window, so that it opens on a service in full swing."""
    system_prompt_tokens: int = 890
    """The beginning of every prompt."""
    document_share: float = 0.70
    """Conversations that open with a document; the others open with a question alone."""
    document_tokens: tuple[float, float] = (8_200.0, 1.05)
    question_tokens: tuple[float, float] = (45.0, 2.0)
    go_on: tuple[float, float] = (1.65, 3.4)
    """The chance of another turn is drawn once a conversation, from a beta distribution with these parameters."""
    time_between_turns_s: tuple[float, float] = (150.0, 1.1)
    """From one request to the next of the same conversation: service and think time together."""
    min_time_between_turns_s: float = 12.0
    rewrite_share: float = 0.14
    """Later turns that do not append but replace the end of the prompt (an edited message, another document)."""
    rewrite_keeps: tuple[float, float] = (0.8, 1.8)
    """The share of the prompt that a rewrite keeps: a beta distribution."""
    rewrite_length: tuple[float, float] = (1.0, 0.35)
    """The length after a rewrite, over the length before."""
    follow_up_document_share: float = 0.28
    follow_up_document_tokens: tuple[float, float] = (2_500.0, 1.1)
    follow_up_tokens: tuple[float, float] = (18.0, 1.0)
    short_answer_share: float = 0.25
    short_answer_tokens: tuple[float, float] = (40.0, 1.3)
    long_answer_share: float = 0.04
    long_answer_tokens: tuple[float, float] = (850.0, 0.45)
    answer_tokens: tuple[float, float] = (400.0, 140.0)
    """All other answers: a Gaussian (mean, deviation)."""


def chat_requests(parameters: ChatParameters, seed: int) -> Iterator[TurnRequest]:
    """Requests for ever, in order of arrival from 0 s on."""
    draws, ids = Draws(seed), BlockIds()
    system_ids = ids.new(parameters.system_prompt_tokens // parameters.block_size)
    tick = parameters.arrival_tick_s

    names = count()

    def open_session(start: float) -> Iterator[TurnRequest]:
        return _conversation(start, parameters, draws, ids, system_ids, next(names))

    for arrival, num_input, num_output, hash_ids, turn in merge_sessions(_starts(parameters, draws), open_session):
        if arrival > -tick:
            yield math.ceil(arrival / tick) * tick, num_input, num_output, hash_ids, turn


def _starts(parameters: ChatParameters, draws: Draws) -> Iterator[float]:
    now = -parameters.warm_up_s
    while True:
        now += draws.exponential(1 / parameters.conversations_per_s)
        yield now


def _conversation(
    now: float, parameters: ChatParameters, draws: Draws, block_ids: BlockIds, system_ids: list[int], name: int
) -> Iterator[TurnRequest]:
    p = parameters
    go_on = draws.beta(*p.go_on)
    message = p.document_tokens if draws.happens(p.document_share) else p.question_tokens
    num_tokens = min(p.system_prompt_tokens + _at_least_one(draws.lognormal(*message)), p.max_input_length)
    ids = block_ids.grown(system_ids, p.system_prompt_tokens, num_tokens, p.block_size)
    # Service and thinking are drawn as one time, so that only the gap between turns is known.
    turn = TurnRecord(key=name, after=(name,), keeps_own_gap=True)
    while True:
        answer = _answer_length(p, draws)
        yield now, num_tokens, answer, tuple(ids), turn
        if not draws.happens(go_on):
            return
        now += max(p.min_time_between_turns_s, draws.lognormal(*p.time_between_turns_s))
        if draws.happens(p.rewrite_share):
            shared = max(p.system_prompt_tokens, int(draws.beta(*p.rewrite_keeps) * num_tokens))
            num_tokens = max(shared + 1, int(num_tokens * draws.lognormal(*p.rewrite_length)))
        else:
            shared = num_tokens
            is_document = draws.happens(p.follow_up_document_share)
            message = p.follow_up_document_tokens if is_document else p.follow_up_tokens
            num_tokens += answer + _at_least_one(draws.lognormal(*message))
        if num_tokens > p.max_input_length:
            return
        ids = block_ids.grown(ids, shared, num_tokens, p.block_size)


def _answer_length(p: ChatParameters, draws: Draws) -> int:
    kind = draws.uniform()
    if kind < p.short_answer_share:
        length = draws.lognormal(*p.short_answer_tokens)
    elif kind < p.short_answer_share + p.long_answer_share:
        length = draws.lognormal(*p.long_answer_tokens)
    else:
        length = draws.normal(*p.answer_tokens)
    return min(_at_least_one(length), p.max_output_length)


def _at_least_one(length: float) -> int:
    return max(1, round(length))
