"""The benchmark question without a trace: lengths, arrivals and users as `vllm bench serve` has them."""

import math
from itertools import pairwise

import pytest
from kvledger.core import AllocatorConfig, FullAttention, InputError
from kvledger.core.errors import KVLedgerError
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.engine.arrivals import TraceArrivals
from kvledger.sim.engine.engine import RunListener
from kvledger.sim.engine.replay import replay
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.scenario.scenario import Scenario
from kvledger.sim.scenario.traffic import open_traffic
from kvledger.sim.workloads.benchmark import BenchmarkParameters, open_benchmark


def benchmark(seed: int = 0, **parameters):
    return open_benchmark(BenchmarkParameters(**{"input_len": 100, "output_len": 20, **parameters}), seed=seed)


def test_without_a_range_all_lengths_are_the_ones_given():
    rows = list(benchmark(num_prompts=30))
    assert {(row.input_length, row.output_length, row.arrival_s, row.hash_ids) for row in rows} == {(100, 20, 0, None)}
    assert [row.place for row in rows] == list(range(1, 31))


def test_lengths_are_uniform_within_the_range_that_vllm_draws_from():
    """floor(len * (1 - r)) to ceil(len * (1 + r)), both included: get_sampling_params of vLLM 0.32."""
    rows = list(benchmark(input_len=10, output_len=3, range_ratio=0.25, num_prompts=4_000))
    for lengths, expected in (
        ([row.input_length for row in rows], range(7, 14)),
        ([row.output_length for row in rows], range(2, 5)),
    ):
        counts = [lengths.count(length) for length in expected]
        assert sum(counts) == 4_000
        assert min(counts) > 0.8 * 4_000 / len(expected)
    assert {row.output_length for row in benchmark(output_len=1, range_ratio=0.9)} == {1, 2}


def test_the_last_request_comes_when_the_rate_says_and_gaps_are_those_of_a_poisson_process():
    rows = list(benchmark(request_rate=4.0, num_prompts=2_000))
    times = [row.arrival_s for row in rows]
    assert times[-1] == pytest.approx(500, abs=1.5)  # after the first one, which comes at 0
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
    assert [row.arrival_s for row in benchmark(request_rate=4.0, seed=0)] != [
        row.arrival_s for row in benchmark(request_rate=4.0, seed=1)
    ]


def test_prompts_share_the_whole_blocks_of_their_prefix_and_nothing_else():
    rows = list(benchmark(prefix_len=40, num_prompts=5))
    assert {(row.input_length, len(row.hash_ids or ())) for row in rows} == {(140, 9)}
    assert len({(row.hash_ids or ())[:2] for row in rows}) == 1
    rest = [block for row in rows for block in (row.hash_ids or ())[2:]]
    assert len(set(rest)) == len(rest)


@pytest.mark.parametrize(("users", "expected"), [(None, 1_000), (8, 1_000), (512, 5_120)])
def test_the_number_of_prompts_follows_the_users(users: int | None, expected: int):
    assert BenchmarkParameters(input_len=1, output_len=1, max_concurrency=users).num_prompts == expected


class Counting(RunListener):
    """Remembers how many requests were under way whenever one was sent, and when requests were sent and ended."""

    def __init__(self) -> None:
        self.num_under_way = 0
        self.seen: list[int] = []
        self.sent_s: list[float] = []
        self.ended_s: list[float] = []

    def submitted(self, now_ns, request) -> None:
        self.num_under_way += 1
        self.seen.append(self.num_under_way)
        self.sent_s.append(request.arrival)

    def observe(self, now_ns, step, result, outcome) -> None:
        self.num_under_way -= len(outcome.finished_requests)
        self.ended_s.extend([now_ns / 1e9] * len(outcome.finished_requests))


def served(trace, **options):
    counting = Counting()
    report = replay(
        trace,
        allocator=AllocatorConfig(num_blocks=200, groups=[FullAttention(16)], max_model_len=512, max_num_reqs=32),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512),
        latency=LinearLatency(0.005, 25e-6, 20e-6),
        trace_block_size=trace.info.trace_block_size,
        listeners=[counting],
        **options,
    )
    return report, counting


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_each_user_sends_the_next_request_when_one_ends(async_scheduling: bool):
    report, counting = served(
        benchmark(max_concurrency=6, range_ratio=0.5, num_prompts=90), async_scheduling=async_scheduling
    )
    assert report.requests["finished"] == 90
    assert max(counting.seen) == 6
    assert counting.sent_s == [0.0] * 6 + counting.ended_s[:-6]
    assert "at most 6 requests under way" in str(report.assumptions["arrivals"])


def test_a_client_that_waits_for_a_place_does_not_count_the_wait():
    alone, _ = served(benchmark(max_concurrency=1, num_prompts=5))
    assert alone.latencies["ttft_s"]["max"] == pytest.approx(alone.latencies["ttft_s"]["p50"], rel=1e-2)
    assert alone.simulated_seconds == pytest.approx(5 * alone.latencies["e2e_s"]["mean"], rel=1e-6)


def test_a_rate_and_users_together_are_a_rate_with_a_limit():
    slow, _ = served(benchmark(request_rate=0.5, max_concurrency=2, num_prompts=20))
    assert slow.simulated_seconds == pytest.approx(40, rel=0.1)
    _, counting = served(benchmark(request_rate=1e6, max_concurrency=2, num_prompts=20))
    assert max(counting.seen) == 2


@pytest.mark.parametrize("macro_steps", [True, False])
def test_macro_steps_change_nothing(macro_steps: bool):
    report, _ = served(benchmark(max_concurrency=5, range_ratio=0.4, num_prompts=60), macro_steps=macro_steps)
    other, _ = served(benchmark(max_concurrency=5, range_ratio=0.4, num_prompts=60))
    assert report.latencies == other.latencies


def test_engines_that_stop_with_work_left_are_an_error():
    """No engine answers: a replay that served nothing of what it read never reports zero requests."""
    import simpy

    env = simpy.Environment()
    arrivals = TraceArrivals(env, lambda request, session: None, 16, None)
    with pytest.raises(KVLedgerError, match="30 of 30 requests were never answered"):
        arrivals.run(benchmark(num_prompts=30), None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_len": 5}, "--input-len 5 needs --output-len too"),
        ({"output_len": 5}, "--output-len 5 needs --input-len too"),
        ({"max_concurrency": 5}, "--max-concurrency 5 needs --input-len too"),
        ({"input_len": 5, "output_len": 5, "workload": "code"}, "not more than one of them"),
        ({"max_concurrency": 5, "trace": ("a.csv",)}, "not more than one of them"),
        ({"input_len": 5, "output_len": 5, "closed_loop": True}, "--closed-loop has no effect on a benchmark"),
        ({"input_len": 5, "output_len": 5, "tokenizer": "chars:4"}, "--tokenizer chars:4 has no effect on a benchmark"),
        ({"input_len": 5, "output_len": 5, "rate_scale": 2}, "rate_scale 2 has no effect without a request_rate"),
        ({"input_len": 5, "output_len": 5, "range_ratio": 1}, r"range_ratio is 1.0; it must be 0 or more, and below 1"),
        ({"input_len": 0, "output_len": 5}, "input_len 0 allows a prompt without a token"),
        ({"input_len": 5, "output_len": 0}, "output_len is 0; it must be a whole number of at least 1"),
        ({"input_len": 5, "output_len": 5, "request_rate": 0}, "request_rate is 0.0; it must be above 0"),
        ({"input_len": 5, "output_len": 5, "request_rate": math.nan}, "request_rate is nan"),
    ],
)
def test_half_a_question_and_what_has_no_effect_are_refused(fields: dict, message: str):
    with pytest.raises(InputError, match=message):
        open_traffic(Scenario(**fields))


def test_a_scenario_with_an_infinite_rate_survives_json():
    scenario = Scenario(input_len=5, output_len="1k", request_rate=math.inf)
    assert Scenario.from_dict(scenario.to_dict()) == scenario
    assert scenario.to_dict()["request_rate"] == "inf"
