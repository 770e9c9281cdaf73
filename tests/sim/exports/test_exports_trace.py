"""The trace for a viewer: it loads, nothing overlaps, time never runs back, and it tells what happened."""

import gzip
import itertools
import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import AllocatorConfig, FullAttention
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.engine.replay import replay
from kvledger.sim.exports.run_exports import ExportOptions, RunExports
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest

# Steps of 100 ms: tokens of the first request at 0.1, 0.2 and 0.3 s, of the second at 0.2 and 0.3 s.
BY_HAND = [(0.0, 40, 3, (1, 2)), (0.05, 70, 2, (1, 3, 4))]
# Two requests that outgrow five blocks together.
TIGHT = [(0.0, 32, 30, (1,)), (0.0, 32, 30, (2,))]


def trace_of(requests, path: Path, num_blocks: int = 101, **options):
    allocator = AllocatorConfig(num_blocks, [FullAttention(16)], max_model_len=1000, max_num_reqs=8)
    with RunExports(ExportOptions(perfetto_out=str(path)), allocator, {}) as exports:
        report = replay(
            (
                TraceRequest(at, prompt, output, ids, place)
                for place, (at, prompt, output, ids) in enumerate(requests, 1)
            ),
            allocator=allocator,
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
            latency=options.pop("latency", LinearLatency(0.1, 0.0, 0.0)),
            trace_block_size=32,
            listeners=exports.listeners,
            **options,
        )
        exports.publish(report)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text, parse_float=Decimal)["traceEvents"], report


def of_phase(events, *phases: str) -> list:
    return [event for event in events if event["ph"] in phases]


def phases_of(events, request_id: str) -> list[tuple[str, Decimal, Decimal]]:
    """(phase, start, end) in microseconds of the slices inside a request's own."""
    number = next(e["id"] for e in events if e.get("name") == f"request {request_id}")
    own = [e for e in of_phase(events, "b", "e") if e["id"] == number and not e["name"].startswith("request")]
    return [(b["name"], b["ts"], e["ts"]) for b, e in zip(own[::2], own[1::2], strict=True)]


def assert_is_well_formed(events) -> None:
    times = [Decimal(event["ts"]) for event in events]
    assert times == sorted(times)
    steps = of_phase(events, "X")
    for earlier, later in itertools.pairwise(steps):
        assert Decimal(earlier["ts"]) + Decimal(earlier["dur"]) <= Decimal(later["ts"])
    assert [step["args"]["step"] for step in steps] == list(range(len(steps)))
    open_slices: dict[int, list[str]] = {}
    for event in of_phase(events, "b", "e"):
        stack = open_slices.setdefault(event["id"], [])
        if event["ph"] == "b":
            stack.append(event["name"])
        else:
            # nested: what ends is what began last
            assert stack.pop() == event["name"]
    assert not any(open_slices.values())


def test_every_step_is_a_slice_with_its_tokens_requests_and_blocks(tmp_path: Path) -> None:
    events, report = trace_of(BY_HAND, tmp_path / "t.json")
    assert_is_well_formed(events)
    steps = of_phase(events, "X")
    assert len(steps) == report.steps == 3
    assert [(step["ts"], step["dur"], step["name"]) for step in steps] == [
        (0, 100_000, "prefill"),
        (100_000, 100_000, "mixed"),
        (200_000, 100_000, "decode"),
    ]
    # 70 tokens of which 32 are found: 38 to compute. 3 blocks, then 5 more of which 2 are shared.
    shown = ("num_requests", "num_tokens", "num_prefill_tokens", "num_decode_tokens", "num_held_blocks")
    assert [tuple(step["args"][name] for name in shown) for step in steps] == [
        (1, 40, 40, 0, 3),
        (2, 39, 38, 1, 6),
        (2, 2, 0, 2, 6),
    ]


def test_a_request_goes_from_queued_over_prefill_to_decode(tmp_path: Path) -> None:
    events, _ = trace_of(BY_HAND, tmp_path / "t.json")
    assert phases_of(events, "1") == [("queued", 0, 0), ("prefill", 0, 100_000), ("decode", 100_000, 300_000)]
    second = [("queued", 50_000, 100_000), ("prefill", 100_000, 200_000), ("decode", 200_000, 300_000)]
    assert phases_of(events, "2") == second
    ended = [e["args"] for e in of_phase(events, "e") if e["name"] == "request 2"]
    assert ended == [{"outcome": "finished", "num_output_tokens": 2, "num_cached_tokens": 32, "num_preemptions": 0}]


def test_the_counters_show_usage_running_and_waiting_where_they_change(tmp_path: Path) -> None:
    events, _ = trace_of(BY_HAND, tmp_path / "t.json")
    counters = of_phase(events, "C")
    usage = [(e["ts"], float(e["args"]["share"])) for e in counters if e["name"] == "kv_cache_usage"]
    assert usage == [(0, 0.0), (0, 0.03), (100_000, 0.06), (300_000, 0.0)]
    numbers = [(e["ts"], e["args"]) for e in counters if e["name"] == "num_requests"]
    assert numbers == [
        (0, {"running": 0, "waiting": 0}),
        (0, {"running": 1, "waiting": 0}),
        (100_000, {"running": 2, "waiting": 0}),
        (300_000, {"running": 0, "waiting": 0}),
    ]


def test_a_preemption_is_seen_and_what_follows_it(tmp_path: Path) -> None:
    events, report = trace_of(TIGHT, tmp_path / "t.json", num_blocks=6)
    assert_is_well_formed(events)
    phases = [name for request in ("1", "2") for name, _, _ in phases_of(events, request)]
    assert phases.count("preempted") == report.preemptions["total"] > 0
    victim = next(request for request in ("1", "2") if len(phases_of(events, request)) > 3)
    assert [name for name, _, _ in phases_of(events, victim)][:6] == [
        *("queued", "prefill", "decode", "preempted", "prefill", "decode")
    ]


def test_a_macro_step_shows_each_of_its_steps_as_single_steps_would(tmp_path: Path) -> None:
    requests = [(0.0, 10, 60, (1,)), (0.25, 30, 45, (2,)), (4.0, 20, 10, (3,))]
    together, _ = trace_of(requests, tmp_path / "macro.json", latency=LinearLatency(0.1, 1e-4, 1e-3))
    single, _ = trace_of(requests, tmp_path / "s.json", latency=LinearLatency(0.1, 1e-4, 1e-3), macro_steps=False)
    assert of_phase(together, "X") == of_phase(single, "X")
    assert of_phase(together, "b", "e") == of_phase(single, "b", "e")


def test_a_name_that_ends_in_gz_is_compressed_and_says_the_same(tmp_path: Path) -> None:
    assert trace_of(BY_HAND, tmp_path / "t.json.gz")[0] == trace_of(BY_HAND, tmp_path / "t.json")[0]
    assert (tmp_path / "t.json.gz").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.parametrize("async_scheduling", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 90), st.integers(1, 40), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    ),
    num_blocks=st.integers(12, 40),
)
def test_any_run_gives_a_well_formed_trace(tmp_path_factory, async_scheduling, requests, num_blocks: int) -> None:
    at = sorted(hundredths / 100 for hundredths, *_ in requests)
    trace = [
        (time, prompt, output, tuple([shared, *range(100 * i, 100 * i + prompt // 32)][: -(-prompt // 32)]))
        for i, (time, (_, prompt, output, shared)) in enumerate(zip(at, requests, strict=True), 1)
    ]
    path = tmp_path_factory.mktemp("trace") / "t.json"
    events, report = trace_of(trace, path, num_blocks, async_scheduling=async_scheduling)
    assert_is_well_formed(events)
    assert len(of_phase(events, "X")) == report.steps
    finished = [e for e in of_phase(events, "e") if e.get("args", {}).get("outcome") == "finished"]
    assert len(finished) == report.requests["finished"] == len(trace)
    for event in finished:
        arrived = trace[int(event["name"].split()[1]) - 1][0]
        assert phases_of(events, event["name"].split()[1])[0][1] == round(Decimal(str(arrived)) * 1_000_000, 3)
