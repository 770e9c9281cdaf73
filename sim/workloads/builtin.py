"""Built-in workloads: seeded request streams that resemble public traces, so that a study needs no download.

No row of a public trace is stored here. Parameters give lengths in tokens and times in seconds, and a lognormal as
(median, sigma). Every generator yields requests without end, in order of arrival from 0 s on.
"""

import math
from collections.abc import Callable, Iterator

import attrs

from ...core.registry import Registry
from ..random_draws import Draws
from ..traces.rows import RowTrace, TurnRecord, merge_sessions
from .multi_turn import MultiTurnParameters, multi_turn_requests
from .stream import BlockIds, SessionRequest, TurnRequest, WorkloadModel, open_stream

workloads: Registry[Callable[[], WorkloadModel]] = Registry("workload", "kvledger.workloads")


def open_workload(
    name: str,
    *,
    seed: int = 0,
    duration_s: float | None = None,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> RowTrace:
    """A `Trace` by name; two with one seed are identical, in every process and on every Python version.

    The stream ends after `duration_s` on its own clock (unless given: the length of the trace that it resembles) or
    after `limit` requests, whichever comes first. Raises `InputError` for an unknown name or an option out of range.
    """
    return open_stream(
        workloads.get(name)(),
        seed=seed,
        duration_s=duration_s,
        skip_first=skip_first,
        limit=limit,
        rate_scale=rate_scale,
    )


def _at_least_one(length: float) -> int:
    return max(1, round(length))


def _starts(now: float, mean_gap_s: float, draws: Draws) -> Iterator[float]:
    """The times at which sessions begin: a Poisson process whose first is `now`."""
    while True:
        yield now
        now += draws.exponential(mean_gap_s)


# A chat service: many conversations over one system prompt, most of them about a long document.


@attrs.frozen
class ChatParameters:
    """A chat service.

    Fitted by hand to the public Mooncake conversation trace (FAST'25): its lengths, its arrivals every three seconds,
    and its hit rate at every LRU capacity.
    """

    block_size: int = 512
    max_input_length: int = 126_000
    max_output_length: int = 2_000
    arrival_tick_s: float = 3.0  # Arrivals are rounded up to a multiple of this, so that many share a timestamp
    conversations_per_s: float = 2.02
    warm_up_s: float = 1_800.0  # Conversations begin this long before the window, which opens on a busy service
    system_prompt_tokens: int = 890  # The beginning of every prompt
    document_share: float = 0.70  # Share of conversations that open with a document, not with a question alone
    document_tokens: tuple[float, float] = (8_200.0, 1.05)
    question_tokens: tuple[float, float] = (45.0, 2.0)
    go_on: tuple[float, float] = (1.65, 3.4)
    """The chance of another turn is drawn once a conversation, from a beta distribution with these parameters."""
    time_between_turns_s: tuple[float, float] = (150.0, 1.1)  # From request to request: service and think time
    min_time_between_turns_s: float = 12.0
    rewrite_share: float = 0.14  # Share of later turns that replace the prompt's end (edited, another document)
    rewrite_keeps: tuple[float, float] = (0.8, 1.8)  # The share of the prompt that a rewrite keeps: a beta distribution
    rewrite_length: tuple[float, float] = (1.0, 0.35)  # The length after a rewrite divided by the length before
    follow_up_document_share: float = 0.28
    follow_up_document_tokens: tuple[float, float] = (2_500.0, 1.1)
    follow_up_tokens: tuple[float, float] = (18.0, 1.0)
    short_answer_share: float = 0.25
    short_answer_tokens: tuple[float, float] = (40.0, 1.3)
    long_answer_share: float = 0.04
    long_answer_tokens: tuple[float, float] = (850.0, 0.45)
    answer_tokens: tuple[float, float] = (400.0, 140.0)  # All other answers: a Gaussian (mean, deviation)


@workloads.register("conversation")
def conversation() -> WorkloadModel:
    """Chats over long documents."""
    chat = ChatParameters()
    return WorkloadModel(
        "conversation",
        "the Mooncake conversation trace (FAST'25)",
        chat,
        chat_requests,
        3_537.0,
        chat.block_size,
        links_turns=True,
    )


def chat_requests(parameters: ChatParameters, seed: int) -> Iterator[TurnRequest]:
    """Conversations that start at random times, merged."""
    draws, ids = Draws(seed), BlockIds()
    system_ids = ids.new(parameters.system_prompt_tokens // parameters.block_size)
    tick = parameters.arrival_tick_s

    def open_session(number: int, start: float) -> Iterator[TurnRequest]:
        return _conversation(start, parameters, draws, ids, system_ids, number)

    gap_s = 1 / parameters.conversations_per_s
    starts = _starts(draws.exponential(gap_s) - parameters.warm_up_s, gap_s, draws)
    for arrival, num_input, num_output, hash_ids, turn in merge_sessions(starts, open_session):
        if arrival > -tick:
            yield math.ceil(arrival / tick) * tick, num_input, num_output, hash_ids, turn


def _conversation(
    now: float, parameters: ChatParameters, draws: Draws, block_ids: BlockIds, system_ids: list[int], name: int
) -> Iterator[TurnRequest]:
    p = parameters
    go_on = draws.beta(*p.go_on)
    message = p.document_tokens if draws.happens(p.document_share) else p.question_tokens
    num_tokens = min(p.system_prompt_tokens + _at_least_one(draws.lognormal(*message)), p.max_input_length)
    ids = block_ids.grown(system_ids, p.system_prompt_tokens, num_tokens, p.block_size)
    # Service and think time are drawn as one number, so only the gap between turns is known.
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


# Single requests: lengths and arrivals only.


@attrs.frozen
class ShareGPTParameters:
    """ShareGPT conversations as the PagedAttention paper (SOSP'23) samples them: mean 161.31 tokens in, 337.99 out."""

    requests_per_s: float = 2.0  # The rate of the paper's Fig. 13; arrivals are Poisson.
    prompt_tokens: tuple[float, float] = (101.0, 1.0)  # Lognormal (median, sigma)
    max_input_length: int = 1_024
    output_shape: float = 1.32
    output_mean_tokens: float = 338.3  # Gamma
    max_total_tokens: int = 2_048


@workloads.register("sharegpt")
def sharegpt() -> WorkloadModel:
    """Short chats, lengths only."""
    parameters = ShareGPTParameters()
    name = "ShareGPT at 2 requests/s (SOSP'23)"
    return WorkloadModel("sharegpt", name, parameters, sharegpt_requests, 3_600.0, None)


def sharegpt_requests(parameters: ShareGPTParameters, seed: int) -> Iterator[SessionRequest]:
    """Single requests that share nothing."""
    p, draws, now = parameters, Draws(seed), 0.0
    while True:
        num_input = min(max(1, round(draws.lognormal(*p.prompt_tokens))), p.max_input_length)
        num_output = max(1, round(draws.gamma(p.output_shape, p.output_mean_tokens)))
        yield now, num_input, min(num_output, p.max_total_tokens - num_input), None
        now += draws.exponential(1 / p.requests_per_s)


@attrs.frozen
class CodeParameters:
    """Code completion in an editor, fitted by hand to the public Azure 2023 code trace: long prompts, short answers.

    Arrivals come in bursts with pauses between them.
    """

    burst_s: float = 5.0
    pause_s: float = 13.6  # Means of two exponentials
    burst_requests_per_s: float = 9.6
    burst_shape: float = 2.0  # A burst's rate is gamma with this mean and shape; its arrivals are Poisson
    prompt_shape: float = 0.92
    prompt_mean_tokens: float = 2_120.0  # Gamma, cut at the longest prompt
    min_input_length: int = 3
    max_input_length: int = 7_437
    min_output_length: int = 6
    output_tokens: tuple[float, float] = (7.8, 1.45)  # Beyond the shortest: lognormal (median, sigma)
    max_output_length: int = 1_900


@workloads.register("code")
def code() -> WorkloadModel:
    """Code completion, lengths only."""
    return WorkloadModel("code", "the Azure 2023 code trace", CodeParameters(), code_requests, 3_436.0, None)


def code_requests(parameters: CodeParameters, seed: int) -> Iterator[SessionRequest]:
    """Single requests that share nothing."""
    p, draws = parameters, Draws(seed)
    for now in _bursts(p, draws):
        num_input = round(draws.gamma(p.prompt_shape, p.prompt_mean_tokens))
        num_output = p.min_output_length + int(draws.lognormal(*p.output_tokens))
        yield (
            now,
            min(max(num_input, p.min_input_length), p.max_input_length),
            min(num_output, p.max_output_length),
            None,
        )


def _bursts(p: CodeParameters, draws: Draws) -> Iterator[float]:
    begin = 0.0
    while True:
        end = begin + draws.exponential(p.burst_s)
        mean_gap = 1 / draws.gamma(p.burst_shape, p.burst_requests_per_s)
        now = begin
        while now < end:
            yield now
            now += draws.exponential(mean_gap)
        begin = end + draws.exponential(p.pause_s)


# Coding agents.


@attrs.frozen
class AgenticParameters:
    """Coding agents: long sessions of many turns; each prompt holds everything before it.

    Fitted by hand to two dozen public coding-agent sessions (kv-cache-tester; blocks of 64 tokens): lengths, turns,
    growth, and the time that tools and people take. The public sessions do not say what they share with each other;
    here sessions of one client version share its tool prompt.
    """

    block_size: int = 64
    sessions_per_s: float = 1 / 60
    warm_up_s: float = 3_600.0  # Sessions begin this long before the window, so that agents are at work when it opens
    tool_prompt_tokens: tuple[int, ...] = (12_439, 12_597, 9_537, 8_315)
    """One per client version, all equally common; every prompt of its sessions begins with it."""
    system_tokens: int = 2_770  # The part after the tools that differs between sessions (project, date, instructions)
    task_tokens: tuple[float, float] = (700.0, 1.2)
    resumed_share: float = 0.5  # Share of sessions that open with a history
    history_tokens: tuple[float, float] = (80_000.0, 0.7)
    go_on: float = 30 / 31  # The chance of another turn: 31 turns on average
    output_tokens: tuple[float, float] = (257.0, 1.25)
    max_output_length: int = 10_500
    tool_result_tokens: tuple[float, float] = (320.0, 1.6)  # Tokens that a turn adds after the answer before it
    max_input_length: int = 200_000  # A longer prompt is compacted to tools, system and a summary
    summary_tokens: tuple[float, float] = (8_000.0, 0.5)
    serving_s: float = 3.0
    serving_s_per_output_token: float = 1 / 60  # The recorded time to answer, a part of that between two requests
    human_share: float = 0.4  # Share of turns that wait for a person; the others wait for a tool
    human_s: tuple[float, float] = (80.0, 1.6)
    tool_s: tuple[float, float] = (7.0, 0.6)


@workloads.register("agentic")
def agentic() -> WorkloadModel:
    """Coding agents."""
    agents = AgenticParameters()
    return WorkloadModel(
        "agentic",
        "24 public coding-agent sessions",
        agents,
        agentic_requests,
        3_600.0,
        agents.block_size,
        links_turns=True,
        records_think_times=True,
    )


def agentic_requests(parameters: AgenticParameters, seed: int) -> Iterator[TurnRequest]:
    """Sessions that start at random times, merged."""
    draws, ids = Draws(seed), BlockIds()
    tool_ids = [ids.new(num_tokens // parameters.block_size) for num_tokens in parameters.tool_prompt_tokens]

    def open_session(number: int, start: float) -> Iterator[TurnRequest]:
        return _agent_session(start, parameters, draws, ids, tool_ids, number)

    for request in merge_sessions(_starts(-parameters.warm_up_s, 1 / parameters.sessions_per_s, draws), open_session):
        if request[0] >= 0:
            yield request


def _agent_session(
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


@workloads.register("multi-turn")
def multi_turn() -> WorkloadModel:
    """Load-generator sessions; see multi_turn.py."""
    parameters = MultiTurnParameters()
    return WorkloadModel(
        "multi-turn",
        "chat sessions over shared system prompts at rates in stages, as load generators send them",
        parameters,
        multi_turn_requests,
        parameters.duration_s,
        parameters.block_size,
    )
