"""The whole engine on traces: figures that are exact, the same from run to run, and the same with macro-steps."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import (
    AllocatorConfig,
    ChunkedLocal,
    EventLog,
    FullAttention,
    SequenceState,
    SlidingWindow,
)
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.engine.replay import replay
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest, open_trace

TRACES = os.environ.get("KVLEDGER_TRACES")
needs_traces = pytest.mark.skipif(not TRACES, reason="KVLEDGER_TRACES is not set: no public traces to replay")


def rows(*requests: tuple[float, int, int], ids: bool = False) -> list[TraceRequest]:
    return [
        TraceRequest(arrival, prompt, output, tuple(range(-(-prompt // 32))) if ids else None, place)
        for place, (arrival, prompt, output) in enumerate(requests, 1)
    ]


def run(trace, num_blocks: int = 100, *, groups=None, macro_steps: bool = True, log=None, latency=None, **limits):
    return replay(
        trace,
        allocator=AllocatorConfig(
            num_blocks=num_blocks,
            groups=groups or [FullAttention(16)],
            max_model_len=4096,
            max_num_reqs=limits.get("max_num_seqs", 16),
            retention_interval=0,
        ),
        scheduler=SchedulerConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 256, **limits}),
        latency=latency or LinearLatency(0.1, 0.0, 0.0),
        trace_block_size=32,
        macro_steps=macro_steps,
        sinks=[log] if log is not None else [],
    ).to_json()


def test_arrivals_wait_for_the_step_in_flight_and_idle_time_passes() -> None:
    report = run(rows((0.0, 10, 2), (0.05, 10, 1), (5.0, 10, 1)))
    assert report["ttft_s"]["max"] == pytest.approx(0.15)  # arrived at 0.05, the step it joined ended at 0.2
    assert report["simulated_seconds"] == 5.1
    assert report["steps"] == 3


def test_every_request_ends_finished_or_rejected() -> None:
    report = run(rows((0.0, 5000, 1), (0.0, 10, 1), (0.1, 3000, 10)), num_blocks=100)
    assert report["requests"] == {"total": 3, "finished": 1, "rejected": 2, "aborted": 0}
    assert "5,000 tokens is longer than max_model_len 4,096" in report["rejections"][0]
    assert "needs 189 blocks" in report["rejections"][1]


def test_usage_is_weighted_by_time() -> None:
    # one block of 9 usable for 0.1 s of work in 1.0 s, then another request the same
    report = run(rows((0.0, 10, 1), (0.9, 10, 1)), num_blocks=10)
    assert report["kv_cache_usage"]["max"] == pytest.approx(1 / 9)
    assert report["kv_cache_usage"]["mean"] == pytest.approx(0.2 / 1.0 / 9)


def without_timing(report: dict) -> dict:
    return {key: value for key, value in report.items() if key not in ("timing", "series")}


traces = st.lists(
    st.tuples(st.integers(0, 300), st.integers(1, 200), st.integers(1, 60), st.lists(st.integers(0, 2), max_size=4)),
    min_size=1,
    max_size=15,
)


def as_trace(requests: list[tuple[int, int, int, list[int]]]) -> list[TraceRequest]:
    out, now = [], 0.0
    for place, (gap, prompt, output, choices) in enumerate(requests):
        now += gap / 100
        ids, node = [], 0
        for choice in choices:
            node = node * 3 + choice + 1
            ids.append(node)
        ids += [1000 + 20 * place + j for j in range(10)]
        out.append(TraceRequest(now, prompt, output, tuple(ids[: -(-prompt // 32)]), place + 1))
    return out


@given(
    requests=traces,
    num_blocks=st.integers(18, 60),
    max_num_seqs=st.integers(1, 6),
    block_size=st.sampled_from([8, 16, 32]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
@settings(max_examples=120, deadline=None)
def test_macro_steps_change_no_figure_and_no_block_id(requests, num_blocks, max_num_seqs, block_size, policy) -> None:
    def outcome(macro_steps: bool):
        log = EventLog()
        report = run(
            as_trace(requests),
            num_blocks,
            groups=[FullAttention(block_size)],
            macro_steps=macro_steps,
            log=log,
            latency=LinearLatency(0.05, 1e-4, 1e-3),
            max_num_seqs=max_num_seqs,
            policy=policy,
        )
        return without_timing(report), {**log.replay().snapshot(), "next_sequence": None}

    assert outcome(True) == outcome(False)


GROUPS = [
    [FullAttention(16), SlidingWindow(16, 48)],
    [FullAttention(16), SlidingWindow(16, 48), SlidingWindow(16, 48)],
    [FullAttention(16), ChunkedLocal(16, 64)],
    [SlidingWindow(32, 40)],
    [FullAttention(16), SequenceState(64)],
    [FullAttention(16), SlidingWindow(32, 96), ChunkedLocal(16, 128)],
]


@given(requests=traces, groups=st.sampled_from(GROUPS), num_blocks=st.integers(60, 160))
@settings(max_examples=60, deadline=None)
def test_hybrid_groups_are_served_to_the_end_and_the_log_rebuilds_the_pool(requests, groups, num_blocks) -> None:
    log = EventLog()
    report = run(as_trace(requests), num_blocks, groups=groups, log=log)
    counts = report["requests"]
    assert counts["finished"] + counts["rejected"] == len(requests) == counts["total"]
    state = log.replay()
    assert state.pool.usage == 0
    assert not state.row_of


def test_the_same_trace_gives_the_same_bytes() -> None:
    trace = as_trace([(3, 100, 20, [1, 2]), (1, 90, 30, [1, 2]), (0, 150, 5, [])])
    assert without_timing(run(trace)) == without_timing(run(trace))


CONVERSATION = Path(TRACES or ".") / "mooncake" / "conversation_trace.jsonl.gz"


def replay_conversation(num_blocks: int, limit: int | None = None) -> dict:
    trace = open_trace(CONVERSATION, limit=limit)
    return replay(
        trace,
        allocator=AllocatorConfig(
            num_blocks=num_blocks, groups=[FullAttention(512)], max_model_len=min((num_blocks - 1) * 512, 1 << 20)
        ),
        scheduler=SchedulerConfig(),
        latency=LinearLatency(),
        trace_block_size=512,
    ).to_json()


@needs_traces
@pytest.mark.parametrize("num_blocks", [1000, 5859, 50000])
def test_the_whole_conversation_trace_is_served(num_blocks: int) -> None:
    report = replay_conversation(num_blocks)
    requests = report["requests"]
    assert requests["total"] == 12_031
    assert requests["finished"] + requests["rejected"] == 12_031
    assert requests["rejected"] == 0
    assert report["ttft_s"]["count"] == 12_031
    assert report["preemptions"]["max_per_request"] <= 4
    assert report["prefix_cache"]["queries_tokens"] == 144_793_823
    if num_blocks == 50000:
        assert report["prefix_cache"]["hit_rate"] == pytest.approx(0.361, abs=0.01)
        assert report["preemptions"]["total"] == 0


@needs_traces
def test_512_token_ids_on_blocks_of_16_find_at_least_what_blocks_of_512_find() -> None:
    def hits(block_size: int) -> int:
        return replay(
            open_trace(CONVERSATION, limit=400),
            allocator=AllocatorConfig(
                num_blocks=50_000 * 512 // block_size, groups=[FullAttention(block_size)], max_model_len=1 << 18
            ),
            scheduler=SchedulerConfig(),
            latency=LinearLatency(),
            trace_block_size=512,
        ).prefix_cache["hits_tokens"]

    coarse, fine = hits(512), hits(16)
    assert coarse <= fine <= coarse * 1.02
