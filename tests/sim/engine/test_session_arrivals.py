"""Closed loop: turns wait for answers and think, whether the simulated server is slower or faster than the recorded."""

import json
import tracemalloc

import attrs
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import AllocatorConfig, FullAttention, InputError
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.types import Request
from kvledger.sim.engine.arrivals import NANOSECONDS, SessionArrivals
from kvledger.sim.engine.replay import replay
from kvledger.sim.engine.sampling import DraftAcceptance
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest, Turn, open_trace


class Server:
    """Answers every request `seconds` after it came; remembers when each came. Refuses prompts over `longest`."""

    def __init__(self, env: simpy.Environment, seconds: float, longest: int = 1 << 30) -> None:
        self.env = env
        self.seconds = seconds
        self.longest = longest
        self.came: dict[str, float] = {}
        self.on_ended = None

    def submit(self, request: Request) -> bool:
        self.came[request.request_id] = self.env.now / NANOSECONDS
        if request.num_prompt_tokens > self.longest:
            self.on_ended(request)
            return False
        timer = self.env.timeout(round(self.seconds * NANOSECONDS))
        timer.callbacks.append(lambda _: self.on_ended(request))
        return True


def make_request(row: TraceRequest, ordinal: int, now: float) -> Request:
    return Request(str(row.place), row.input_length, max(row.output_length, 1), arrival=now)


def served(rows, seconds: float, looks_ahead: bool = False, longest: int = 1 << 30):
    env = simpy.Environment()
    server = Server(env, seconds, longest)
    arrivals = SessionArrivals(env, lambda request, _: server.submit(request), rows, make_request, looks_ahead)
    server.on_ended = arrivals.ended
    arrivals.start()
    env.run()
    return server.came, arrivals


def row(place: int, arrival_s: float, *waits_for: int, prompt: int = 10, **turn) -> TraceRequest:
    return TraceRequest(arrival_s, prompt, 1, None, place, Turn("s", 1 + len(waits_for), waits_for, **turn))


# Answered after 2 s, thought for 8 s, answered after 3 s, thought for 1 s.
SESSION = [
    row(1, 0.0, answered_s=2.0),
    row(2, 10.0, 1, think_s=8.0, gap_s=10.0, answered_s=3.0),
    row(3, 14.0, 2, think_s=1.0, gap_s=4.0, is_last=True),
]


@pytest.mark.parametrize(
    ("seconds", "came"),
    [(2.0, [0.0, 10.0, 13.0]), (30.0, [0.0, 38.0, 69.0]), (0.5, [0.0, 8.5, 10.0])],
    ids=["as-recorded", "slower", "faster"],
)
def test_a_turn_comes_its_think_time_after_the_answer(seconds, came):
    assert list(served(SESSION, seconds)[0].values()) == came


def test_a_faster_server_is_not_held_back_by_rows_that_are_not_due():
    others = [TraceRequest(float(at), 10, 1, None, 10 * at) for at in range(1, 14)]
    turns = [attrs.evolve(each, place=place) for each, place in zip(SESSION, (1, 95, 135), strict=True)]
    turns[1] = attrs.evolve(turns[1], turn=attrs.evolve(turns[1].turn, waits_for=(1,)))
    turns[2] = attrs.evolve(turns[2], turn=attrs.evolve(turns[2].turn, waits_for=(95,)))
    rows = sorted([*turns, *others], key=lambda each: each.place)
    came, arrivals = served(rows, 0.5)
    assert [came[str(each.place)] for each in turns] == [0.0, 8.5, 10.0]
    assert [came[str(each.place)] for each in others] == [each.arrival_s for each in others]
    assert arrivals.num_late == 0


def test_without_think_times_the_recorded_gap_counts_and_the_answer_is_waited_for():
    rows = [row(1, 0.0), row(2, 10.0, 1, gap_s=10.0), row(3, 14.0, 2, gap_s=4.0)]
    assert list(served(rows, 2.0)[0].values()) == [0.0, 10.0, 14.0]
    assert list(served(rows, 7.0)[0].values()) == [0.0, 10.0, 17.0]


def test_a_turn_waits_for_the_last_of_several_answers():
    rows = [row(1, 0.0), row(2, 1.0), row(3, 4.0), row(4, 20.0, 1, 2, 3, think_s=2.0, gap_s=16.0)]
    assert served(rows, 5.0, looks_ahead=True)[0]["4"] == 4.0 + 5.0 + 2.0


def test_requests_without_turns_come_at_their_times_in_the_order_of_the_trace():
    rows = [TraceRequest(at, 10, 1, None, place) for place, at in enumerate((0.0, 0.0, 1.5, 1.5, 4.0), 1)]
    came, _ = served(rows, 100.0)
    assert list(came.items()) == [("1", 0.0), ("2", 0.0), ("3", 1.5), ("4", 1.5), ("5", 4.0)]


def test_a_turn_whose_predecessor_is_not_part_of_the_run_comes_at_its_recorded_time():
    assert served([row(7, 3.0, 2, think_s=1.0, gap_s=2.0)], 1.0)[0] == {"7": 3.0}
    assert served([row(5, 0.0), row(8, 3.0, 6, think_s=1.0, gap_s=2.0)], 1.0)[0] == {"5": 0.0, "8": 3.0}


def test_a_refused_turn_counts_as_answered_at_once_however_long_the_session():
    rows = [row(1, 0.0, answered_s=1.0)]
    rows += [
        row(place, float(place), place - 1, prompt=99, think_s=0.0, gap_s=1.0, answered_s=1.0)
        for place in range(2, 3_000)
    ]
    came, arrivals = served(rows, 2.0, longest=50)
    assert len(came) == 2_999
    assert set(came.values()) == {0.0, 2.0}
    assert arrivals.last_ns == 2 * NANOSECONDS


def test_an_unknown_answer_time_is_looked_ahead_for_only_when_asked():
    rows = [row(1, 0.0), row(2, 100.0, 1, think_s=5.0, gap_s=100.0)]
    came, arrivals = served(rows, 1.0, looks_ahead=True)
    assert (came["2"], arrivals.num_late) == (6.0, 0)
    came, arrivals = served(rows, 1.0, looks_ahead=False)
    assert (came["2"], arrivals.num_late) == (100.0, 1)


def test_rows_are_read_when_they_are_due_and_not_held():
    def rows():
        for place in range(1, 10_001):
            at = place * 0.01
            before = (place - 4,) if place > 4 else ()
            yield TraceRequest(at, 10, 1, None, place, Turn("s", place, before, 0.01 if before else None, 0.04, 0.03))

    tracemalloc.start()
    try:
        came, arrivals = served_counting(rows())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert came == 10_000
    assert arrivals.num_late == 0
    assert peak_bytes < 10_000 * 40 + 100_000, "16 bytes a request, twice while a table grows, and little else"


def served_counting(rows):
    class Counter(Server):
        def submit(self, request: Request) -> bool:
            super().submit(request)
            self.count = getattr(self, "count", 0) + 1
            self.came.clear()
            return True

    env = simpy.Environment()
    server = Counter(env, 0.03)
    arrivals = SessionArrivals(env, lambda request, _: server.submit(request), rows, make_request)
    server.on_ended = arrivals.ended
    arrivals.start()
    env.run()
    return server.count, arrivals


@st.composite
def sessions(draw):
    """Rows of a few sessions on a recorded server, in order of arrival, and each row's think time."""
    rows: list[tuple[float, int, float | None, float]] = []
    for session in range(draw(st.integers(1, 4))):
        now, think = draw(st.integers(0, 20)) * 0.5, None
        for _ in range(draw(st.integers(1, 5))):
            answered = draw(st.integers(0, 20)) * 0.25
            rows.append((now, session, think, answered))
            think = draw(st.integers(0, 20)) * 0.25
            now += answered + think
    rows.sort(key=lambda each: each[0])
    last: dict[int, int] = {}
    out: list[TraceRequest] = []
    for place, (now, session, think, answered) in enumerate(rows, 1):
        before = (last[session],) if session in last and think is not None else ()
        last[session] = place
        gap = now - out[before[0] - 1].arrival_s if before else None
        out.append(TraceRequest(now, 10, 1, None, place, Turn(str(session), 1, before, think, gap, answered)))
    return out


@settings(max_examples=200)
@given(sessions(), st.integers(0, 20).map(lambda quarter: quarter * 0.25), st.booleans())
def test_every_turn_comes_exactly_its_think_time_after_the_answer(rows, seconds, knows_answers):
    if not knows_answers:
        rows = [
            TraceRequest(
                r.arrival_s, 10, 1, None, r.place, Turn("s", 1, r.turn.waits_for, r.turn.think_s, r.turn.gap_s)
            )
            for r in rows
        ]
    came, arrivals = served(rows, seconds, looks_ahead=True)
    assert arrivals.num_late == 0
    assert len(came) == len(rows)
    for each in rows:
        if each.turn.waits_for:
            assert came[str(each.place)] == came[str(each.turn.waits_for[0])] + seconds + each.turn.think_s
        else:
            assert came[str(each.place)] == each.arrival_s


# -- in the engine ---------------------------------------------------------------------------------------------------


def run(trace, closed_loop=None, macro_steps=True, async_scheduling=False, num_blocks=200):
    return replay(
        trace,
        allocator=AllocatorConfig(
            num_blocks=num_blocks, groups=[FullAttention(16)], max_model_len=4096, max_num_reqs=8
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        latency=LinearLatency(0.5, 0.0, 0.0),
        trace_block_size=64,
        closed_loop=closed_loop,
        macro_steps=macro_steps,
        async_scheduling=async_scheduling,
    ).to_json()


def conversations(path, num: int, num_turns: int):
    documents = [
        {
            "id": f"c{i}",
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [
                {
                    "t": 20.0 * k + i,
                    "in": 70 + 64 * k,
                    "out": 5,
                    "hash_ids": list(range(k + 1)),
                    "api_time": 10.0,
                    "think_time": 10.0,
                }
                for k in range(num_turns)
            ],
        }
        for i in range(num)
    ]
    path.write_text("\n".join(json.dumps(each) for each in documents))
    return open_trace(path)


def test_a_trace_with_think_times_is_replayed_in_a_closed_loop_and_says_so(tmp_path):
    trace = conversations(tmp_path / "c.jsonl", 1, 3)
    closed = run(trace)
    assert closed["assumptions"]["arrivals"].startswith("closed loop: ")
    assert closed["simulated_seconds"] == pytest.approx(3 * 2.5 + 2 * 10.0), "five steps of 0.5 s and 10 s of thinking"
    opened = run(trace, closed_loop=False)
    assert opened["assumptions"]["arrivals"].startswith("open loop: ")
    assert opened["simulated_seconds"] == pytest.approx(42.5)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_macro_steps_change_nothing_in_a_closed_loop(tmp_path, async_scheduling):
    trace = conversations(tmp_path / "c.jsonl", 5, 6)
    reports = [run(trace, macro_steps=macro, async_scheduling=async_scheduling) for macro in (True, False)]
    for report in reports:
        del report["timing"], report["series"]
    assert reports[0] == reports[1]
    assert reports[0]["requests"]["finished"] == 30


def test_refused_turns_and_windows_keep_every_request_accounted_for(tmp_path):
    path = tmp_path / "c.jsonl"
    conversations(path, 4, 12)
    report = run(open_trace(path, skip_first=5, limit=30), num_blocks=34)
    assert report["requests"]["total"] == 30
    assert report["requests"]["rejected"] > 0
    assert report["requests"]["finished"] + report["requests"]["rejected"] == 30


def test_a_rate_scale_shortens_think_times_too(tmp_path):
    path = tmp_path / "c.jsonl"
    conversations(path, 1, 3)
    assert run(open_trace(path, rate_scale=2.0))["simulated_seconds"] == pytest.approx(3 * 2.5 + 2 * 5.0)


def test_a_closed_loop_is_refused_where_no_turns_are_linked(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}))
    with pytest.raises(InputError, match=r"--closed-loop has no effect on t\.jsonl"):
        run(open_trace(path, trace_block_size=64), closed_loop=True)
    assert run(open_trace(path, trace_block_size=64))["assumptions"]["arrivals"].startswith("open loop")


@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
@pytest.mark.parametrize("later_s", [(), (100.0,)])
def test_a_closed_loop_that_starts_at_once_is_served_under_asynchronous_scheduling(
    num_speculative_tokens: int, later_s: tuple[float, ...]
):
    """The first request is sent before the engine has run; it was forgotten until something else came, or for good."""
    rows = [row(place, when, prompt=100) for place, when in enumerate((0.0, *later_s), start=1)]
    report = replay(
        rows,
        allocator=AllocatorConfig(num_blocks=50, groups=[FullAttention(16)], max_model_len=512, max_num_reqs=4),
        scheduler=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=512, num_speculative_tokens=num_speculative_tokens
        ),
        latency=LinearLatency(0.005, 25e-6, 20e-6),
        drafts=DraftAcceptance(0.5, 0) if num_speculative_tokens else None,
        trace_block_size=None,
        closed_loop=True,
        async_scheduling=True,
    )
    assert report.requests["finished"] == len(rows)
    assert report.latencies["ttft_s"]["max"] == pytest.approx(0.0075, rel=1e-2)
