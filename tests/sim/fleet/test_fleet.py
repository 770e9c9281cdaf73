"""Fleets: one replica is a replay, N replicas add up, and a router knows what the events have told."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import AllocatorConfig, EventLog, FullAttention, InputError, SlidingWindow
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.engine.replay import replay
from kvledger.sim.fleet.fleet import EngineParts, Fleet, FleetShape, replay_fleet
from kvledger.sim.fleet.routing import make_router, routers
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest, open_trace
from kvledger.sim.workloads.builtin import open_workload

TRACES = os.environ.get("KVLEDGER_TRACES")
needs_traces = pytest.mark.skipif(not TRACES, reason="KVLEDGER_TRACES is not set: no public traces to replay")
BLOCK = 512


def parts(num_blocks: int = 600, *, groups=None, **changes) -> EngineParts:
    return EngineParts(
        allocator=AllocatorConfig(
            num_blocks=num_blocks,
            groups=groups or [FullAttention(BLOCK)],
            max_model_len=(num_blocks - 1) * BLOCK,
            max_num_reqs=64,
            retention_interval=None,
        ),
        scheduler=SchedulerConfig(max_num_seqs=64),
        latency=LinearLatency(),
        **changes,
    )


def chat(limit: int = 150, rate_scale: float = 20.0):
    return open_workload("conversation", limit=limit, rate_scale=rate_scale)


def serve(
    num_replicas: int,
    routing: str = "round-robin",
    *,
    trace=None,
    fleet_parts=None,
    delay_s=0.0,
    ranks=1,
    closed_loop: bool | None = False,
):
    return replay_fleet(
        chat() if trace is None else trace,
        shape=FleetShape(num_replicas=num_replicas, data_parallel_size=ranks, event_delay_s=delay_s),
        parts=fleet_parts or parts(),
        router=make_router(routing),
        trace_block_size=BLOCK,
        closed_loop=closed_loop,
    )


def figures(report) -> dict:
    document = report.to_json()
    return {
        name: value
        for name, value in document.items()
        if name not in ("assumptions", "series", "timing", "replicas", "kv_cache_usage")
    }


@pytest.mark.parametrize("routing", routers.names())
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_fleet_of_one_is_a_replay(routing: str, async_scheduling: bool) -> None:
    made_of = parts(async_scheduling=async_scheduling)
    alone = replay(
        chat(),
        allocator=made_of.allocator,
        scheduler=made_of.scheduler,
        latency=made_of.latency,
        trace_block_size=BLOCK,
        async_scheduling=async_scheduling,
    )
    fleet = serve(1, routing, fleet_parts=made_of)
    assert figures(fleet) == figures(alone)
    assert fleet.kv_cache_usage == pytest.approx(alone.kv_cache_usage)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_fleet_of_one_in_a_closed_loop_is_a_replay_in_one(async_scheduling: bool) -> None:
    made_of = parts(async_scheduling=async_scheduling)
    alone = replay(
        chat(),
        allocator=made_of.allocator,
        scheduler=made_of.scheduler,
        latency=made_of.latency,
        trace_block_size=BLOCK,
        async_scheduling=async_scheduling,
        closed_loop=True,
    )
    fleet = serve(1, "sticky", fleet_parts=made_of, closed_loop=True)
    assert figures(fleet) == figures(alone)
    assert fleet.assumptions["arrivals"] == alone.assumptions["arrivals"] != serve(1).assumptions["arrivals"]


def test_in_a_closed_loop_more_replicas_are_asked_sooner() -> None:
    """Sessions that wait for their answers send what is left of the trace as fast as it is answered."""
    one, four = (serve(n, "least-outstanding-work", closed_loop=True) for n in (1, 4))
    assert one.requests == four.requests == {"total": 150, "finished": 150, "rejected": 0, "aborted": 0}
    assert four.simulated_seconds < 0.5 * one.simulated_seconds


def test_a_closed_loop_over_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(InputError, match="--closed-loop has no effect on code"):
        serve(2, trace=open_workload("code", limit=5), closed_loop=True)


@pytest.mark.parametrize("routing", routers.names())
def test_every_request_is_served_by_exactly_one_replica(routing: str) -> None:
    report = serve(3, routing)
    assert report.requests == {"total": 150, "finished": 150, "rejected": 0, "aborted": 0}
    assert len(report.replicas) == 3
    for name in ("finished", "total"):
        assert sum(replica["requests"][name] for replica in report.replicas) == 150
    assert sum(replica["hits_tokens"] for replica in report.replicas) == report.prefix_cache["hits_tokens"]
    assert sum(replica["ttft_s"]["count"] for replica in report.replicas) == report.latencies["ttft_s"]["count"] == 150
    assert max(replica["ttft_s"]["max"] for replica in report.replicas) == report.latencies["ttft_s"]["max"]


def test_data_parallel_ranks_are_ledgers_of_their_own() -> None:
    ranks, replicas = serve(2, ranks=3), serve(6)
    assert [(one["replica"], one["data_parallel_rank"]) for one in ranks.replicas] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
    ]  # fmt: skip
    assert figures(ranks) == figures(replicas)
    assert ranks.assumptions["data_parallel_size"] == 3


@pytest.mark.parametrize("routing", ["least-outstanding-work", "prefix-aware"])
def test_more_replicas_wait_less(routing: str) -> None:
    ttft = [serve(n, routing).latencies["ttft_s"]["mean"] for n in (1, 2, 6)]
    assert ttft[0] > ttft[1] > ttft[2]


def test_what_can_never_fit_is_refused_and_does_not_weigh_on_the_router() -> None:
    small = parts(num_blocks=10)
    long, short = TraceRequest(0.0, 10 * BLOCK, 1, None, 1), [TraceRequest(0.1 * n, 8, 1, None, 1 + n) for n in (1, 2)]
    fleet = Fleet(FleetShape(num_replicas=1), small, make_router("least-outstanding-work"), None)
    fleet.run([long, *short])
    assert fleet.engines[0].engine.rejections
    assert fleet.engines[0].scheduler.stats.num_finished == 2
    assert fleet.views[0].outstanding_prefill_tokens() == 0
    assert fleet.views[0].num_outstanding_requests == 0


@pytest.mark.parametrize("groups", [[FullAttention(16)], [SlidingWindow(16, 64), FullAttention(32)]])
@given(st.integers(0, 5), st.sampled_from(routers.names()), st.integers(1, 3))
@settings(max_examples=4, deadline=None)
def test_a_view_holds_the_keys_and_the_requests_that_the_engine_holds(groups, seed, routing, num_replicas) -> None:
    """At any arrival, without a delay: the router's books, folded from events, equal the ledger."""
    kind = next(kind for kind in groups if kind.needs_whole_prefix)
    group = groups.index(kind)
    fleet_parts = EngineParts(
        allocator=AllocatorConfig(
            num_blocks=400, groups=groups, max_model_len=6_000, max_num_reqs=8, retention_interval=None
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
        latency=LinearLatency(0.02, 2e-5, 1e-4),
    )
    fleet = Fleet(FleetShape(num_replicas=num_replicas), fleet_parts, make_router(routing), 512)

    def check(_count: int) -> None:
        for view, run in zip(fleet.views, fleet.engines, strict=True):
            scheduler = run.scheduler
            pool = scheduler.allocator.state.pool
            keys = [
                pool.key_of(block)
                for block in range(1, 400)
                if pool.key_of(block) is not None and pool.group_of(block) == group
            ]
            assert sum(view.blocks_with_key.values()) == len(keys)
            assert set(view.blocks_with_key) == set(keys)
            assert view.num_outstanding_requests == scheduler.num_running + scheduler.num_waiting

    trace = (row for row in open_workload("conversation", seed=seed, limit=25, rate_scale=30) if row.input_length < 5e3)
    fleet.run(trace, check)
    check(0)


def test_events_that_come_late_find_less() -> None:
    trace = [TraceRequest(float(n), 8 * BLOCK + 1, 4, (1, 2, 3, 4, 5, 6, 7, 8, 100 + n), n + 1) for n in range(8)]
    hits = [serve(4, "prefix-aware", trace=trace, delay_s=delay).prefix_cache["hits_tokens"] for delay in (0, 2.5, 100)]
    # At once: only the first request computes the shared prefix. Never in time: each of the four replicas does, once.
    assert hits[0] == 7 * 8 * BLOCK
    assert hits[2] == 4 * 8 * BLOCK
    assert hits[0] > hits[1] >= hits[2]


@given(st.integers(0, 1000), st.sampled_from(routers.names()), st.integers(1, 4), st.booleans(), st.booleans())
@settings(max_examples=6, deadline=None)
def test_macro_steps_change_no_figure(
    seed: int, routing: str, num_replicas: int, async_scheduling: bool, closed_loop: bool
) -> None:
    def outcome(macro_steps: bool) -> tuple:
        logs = [EventLog() for _ in range(num_replicas)]
        report = serve(
            num_replicas,
            routing,
            trace=open_workload("conversation", seed=seed, limit=25, rate_scale=30),
            fleet_parts=parts(
                400,
                macro_steps=macro_steps,
                async_scheduling=async_scheduling,
                sinks_of=lambda index: [logs[index]],
            ),
            closed_loop=closed_loop,
        )
        return figures(report), [{**log.replay().snapshot(), "next_sequence": None} for log in logs]

    assert outcome(True) == outcome(False)


def test_the_same_fleet_gives_the_same_figures_again() -> None:
    assert figures(serve(3, "prefix-aware")) == figures(serve(3, "prefix-aware"))
    assert serve(3, "sticky").series == serve(3, "sticky").series


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_replicas": 0}, "num_replicas is 0; it must be at least 1"),
        ({"num_replicas": 1, "data_parallel_size": 0}, "data_parallel_size is 0"),
        ({"num_replicas": 1, "event_delay_s": -1.0}, "event_delay_s is -1.0"),
    ],
)
def test_a_shape_out_of_range_is_refused(shape: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        FleetShape(**shape)


@needs_traces
@pytest.mark.slow
def test_ten_replicas_on_the_conversation_trace_find_three_times_as_much_when_routed_by_prefix() -> None:
    """Judged against a peer's .11 (round robin) and .30 (prefix-aware) on the same fleet."""

    def ten(routing: str):
        made_of = EngineParts(
            allocator=AllocatorConfig(num_blocks=5_859, groups=[FullAttention(BLOCK)], max_model_len=1 << 20),
            scheduler=SchedulerConfig(),
            latency=LinearLatency(),
        )
        trace = open_trace(Path(TRACES or ".") / "mooncake" / "conversation_trace.jsonl.gz")
        return serve(10, routing, trace=trace, fleet_parts=made_of)

    in_turn, by_prefix = ten("round-robin"), ten("prefix-aware")
    assert in_turn.requests["finished"] == by_prefix.requests["finished"] == 12_031
    assert 0.09 <= in_turn.prefix_cache["hit_rate"] <= 0.14
    assert by_prefix.prefix_cache["hit_rate"] >= 0.25
    assert by_prefix.latencies["ttft_s"]["mean"] < in_turn.latencies["ttft_s"]["mean"]
