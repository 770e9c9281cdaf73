"""Prefill here, decode there: exact times of one request, and nothing lost, doubled or early among many."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import AllocatorConfig, Commit, EventLog, FullAttention, InputError, SlidingWindow
from kvledger.core.events import PoolCreated
from kvledger.core.ledger.audit import ConservationAudit
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.fleet.disaggregation import DisaggregatedFleet, DisaggregatedShape, replay_disaggregated
from kvledger.sim.fleet.fleet import EngineParts, FleetShape, replay_fleet
from kvledger.sim.fleet.links import TransferModel
from kvledger.sim.fleet.routing import make_router, routers
from kvledger.sim.fleet.tiers import Tier
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest
from kvledger.sim.traces.trace import Turn
from kvledger.sim.workloads.builtin import open_workload

BLOCK = 512
MB = 1e6
STEP = LinearLatency()


def parts(num_blocks: int = 3000, *, groups=None, max_num_seqs: int = 64, **changes) -> EngineParts:
    return EngineParts(
        allocator=AllocatorConfig(
            num_blocks=num_blocks,
            groups=groups or [FullAttention(BLOCK)],
            max_model_len=(num_blocks - 1) * (groups or [FullAttention(BLOCK)])[0].block_size,
            max_num_reqs=max_num_seqs,
            retention_interval=None,
        ),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        latency=STEP,
        **changes,
    )


def shape(num_prefill: int = 1, num_decode: int = 1, **changes) -> DisaggregatedShape:
    return DisaggregatedShape(num_prefill_replicas=num_prefill, num_decode_replicas=num_decode, **changes)


def serve(trace, of_shape=None, fleet_parts=None, *, gb_s: float = math.inf, routing: str = "round-robin", **changes):
    closed_loop = changes.pop("closed_loop", False)
    return replay_disaggregated(
        trace,
        shape=of_shape or shape(),
        parts=fleet_parts or parts(),
        transfer=TransferModel(bytes_per_s=gb_s * 1e9, bytes_per_block=100 * MB, **changes),
        prefill_router=make_router(routing),
        decode_router=make_router("least-outstanding-work"),
        trace_block_size=BLOCK,
        closed_loop=closed_loop,
    )


def row(place: int, at_s: float = 0.0, prompt: int = 4 * BLOCK, output: int = 5, ids=None, turn=None) -> TraceRequest:
    ids = ids or tuple(range(1000 * place, 1000 * place + -(-prompt // BLOCK)))
    return TraceRequest(at_s, prompt, output, ids, place, turn=turn)


PREFILL_S = STEP.base_s + 4 * BLOCK * STEP.prefill_token_s
DECODE_S = STEP.base_s + STEP.decode_seq_s


def test_the_first_gap_between_tokens_holds_the_transfer() -> None:
    """4 blocks of 100 MB at 1 GB/s: 0.4 s, after 0.1 s of latency."""
    report = serve([row(1)], gb_s=1, latency_s=0.1)
    figures = {name: report.latencies[name]["max"] for name in ("ttft_s", "itl_s", "e2e_s", "tpot_s")}
    assert figures["ttft_s"] == pytest.approx(PREFILL_S)
    assert figures["itl_s"] == pytest.approx(0.5 + DECODE_S)
    assert figures["e2e_s"] == pytest.approx(PREFILL_S + 0.5 + 4 * DECODE_S)
    assert figures["tpot_s"] == pytest.approx((0.5 + 4 * DECODE_S) / 4)
    transfer = report.kv_transfer
    assert transfer is not None
    assert (transfer["transfers"], transfer["transferred_tokens"]) == (1, 4 * BLOCK)
    assert transfer["transferred_bytes"] == 400 * MB
    assert transfer["transfer_s"]["max"] == pytest.approx(0.5)


def test_ttft_holds_the_transfer_where_the_first_token_comes_from_decode() -> None:
    report = serve([row(1)], shape(first_token_from="decode"), gb_s=1, latency_s=0.1)
    assert report.latencies["ttft_s"]["max"] == pytest.approx(PREFILL_S + 0.5 + DECODE_S)
    assert report.latencies["itl_s"]["max"] == pytest.approx(DECODE_S)
    assert report.latencies["e2e_s"]["max"] == pytest.approx(PREFILL_S + 0.5 + 5 * DECODE_S)
    assert report.latencies["ttft_s"]["count"] == 1
    # The prompt's last token is computed on both sides.
    assert report.throughput["computed_tokens_per_s"] * report.simulated_seconds == pytest.approx(4 * BLOCK + 5)


def test_a_request_of_one_token_needs_no_decode_engine() -> None:
    report = serve([row(1, output=1)], gb_s=1)
    assert report.requests == {"total": 1, "finished": 1, "rejected": 0, "aborted": 0}
    assert report.kv_transfer is not None
    assert report.kv_transfer["handed_over"] == 0


@pytest.mark.parametrize(("sharing", "ends_s"), [("fair", (0.8, 0.8)), ("fifo", (0.4, 0.8))])
def test_transfers_of_one_link_share_it_or_wait(sharing: str, ends_s: tuple[float, float]) -> None:
    """Two prefill engines send 4 blocks each at once to one decode engine."""
    report = serve([row(1), row(2)], shape(2, 1), gb_s=1, sharing=sharing)
    assert report.kv_transfer is not None
    figures = report.kv_transfer["transfer_s"]
    assert (figures["max"], figures["mean"]) == pytest.approx((max(ends_s), sum(ends_s) / 2))


def test_a_copy_that_is_slowed_at_one_end_leaves_the_other_end_to_others() -> None:
    """Max-min: from engine 0 both copies get half; from engine 1 the copy gets what is left into decode engine 0."""
    from kvledger.sim.fleet.links import KVLinks
    from simpy import Environment

    env = Environment()
    links = KVLinks(env, TransferModel(bytes_per_s=100.0, bytes_per_block=100.0))
    ends: dict[str, float] = {}
    for name, source, target in (("a", 0, 0), ("b", 0, 1), ("c", 0, 2), ("d", 1, 0)):
        links.start(source, target, 1, partial(lambda name: ends.update({name: env.now / 1e9}), name))
    env.run()
    # a, b and c: a third of engine 0's link; d: two thirds of what decode engine 0 takes in, then alone.
    assert ends == pytest.approx({"d": 1.5, "a": 3.0, "b": 3.0, "c": 3.0})


def test_what_the_decode_engine_holds_already_is_not_copied_again() -> None:
    shared = tuple(range(1, 9))
    trace = [row(1, 0.0, 8 * BLOCK, ids=shared), row(2, 10.0, 8 * BLOCK + 9, ids=(*shared, 99))]
    report = serve(trace, gb_s=1)
    assert report.kv_transfer is not None
    assert report.kv_transfer["transferred_tokens"] == 8 * BLOCK + 9
    assert report.kv_transfer["found_tokens"] == 8 * BLOCK
    assert report.prefix_cache["hits_tokens"] == 8 * BLOCK
    assert report.kv_transfer["transferred_bytes"] == 9 * 100 * MB


def test_a_prompt_that_decode_finds_whole_is_let_go_at_once() -> None:
    fleet_parts = parts(14)
    ids = (1, 2, 3, 4)
    trace = [row(place, 10.0 * place, ids=ids) for place in (1, 2, 3, 4)]
    report = serve(trace, fleet_parts=fleet_parts, gb_s=1)
    assert report.requests["finished"] == 4
    assert report.kv_transfer is not None
    # Its last block is whole, and the first output token makes it known: all 4 blocks are found.
    assert (report.kv_transfer["transfers"], report.kv_transfer["found_tokens"]) == (1, 3 * 4 * BLOCK)


def test_with_links_that_take_no_time_ttft_is_that_of_the_prefill_pool_alone() -> None:
    def trace(cut: bool):
        for one in open_workload("conversation", limit=120, rate_scale=2.0):
            yield TraceRequest(
                one.arrival_s, one.input_length, 1 if cut else one.output_length, one.hash_ids, one.place
            )

    both = serve(trace(cut=False), shape(2, 3), routing="prefix-aware")
    alone = replay_fleet(
        trace(cut=True),
        shape=FleetShape(num_replicas=2),
        parts=parts(),
        router=make_router("prefix-aware"),
        trace_block_size=BLOCK,
    )
    assert both.latencies["ttft_s"] == alone.latencies["ttft_s"]
    assert both.prefix_cache == alone.prefix_cache
    # No prompt gets between two tokens: each gap is a decode step, the first one the rest of a step more.
    assert both.latencies["itl_s"]["max"] < 3 * (STEP.base_s + 64 * STEP.decode_seq_s)


def test_a_full_decode_pool_holds_up_the_prefill_pool() -> None:
    """8 prompts of 4 blocks; the decode engine has room for one at a time, the prefill engine for two."""
    trace = [row(place, output=500) for place in range(1, 9)]
    tight, wide = serve(trace, fleet_parts=parts(11)), serve(trace)
    assert tight.requests["finished"] == wide.requests["finished"] == 8
    assert tight.latencies["ttft_s"]["max"] > 5 * wide.latencies["ttft_s"]["max"]
    assert tight.kv_transfer is not None
    assert tight.kv_transfer["wait_for_blocks_s"]["max"] > 1


def test_what_can_never_fit_is_refused_before_it_is_prefilled() -> None:
    """The prompt fits, and the prefill engine computes no more; with its output it would not fit into the other."""
    report = serve([row(1, output=8 * BLOCK), row(2)], fleet_parts=parts(11))
    assert report.requests == {"total": 2, "finished": 1, "rejected": 1, "aborted": 0}
    assert "of 6,143 tokens is longer than max_model_len 5,120" in report.rejections[0]
    assert sum(one["steps"] for one in report.replicas) == 1 + 4


def test_a_closed_loop_waits_for_the_decode_engine() -> None:
    def turn(number: int) -> Turn:
        before = (number - 1,) if number > 1 else ()
        return Turn(session="s", number=number, waits_for=before, think_s=1.0, is_last=number == 3)

    trace = [row(number, (number - 1) * 1e-3, turn=turn(number)) for number in (1, 2, 3)]
    report = serve(trace, gb_s=1, closed_loop=True)
    assert report.simulated_seconds == pytest.approx(3 * (PREFILL_S + 0.4 + 4 * DECODE_S) + 2.0)


def test_tiers_stand_behind_the_prefill_pools_only() -> None:
    tiered = parts(700, tiers=(Tier(name="host", num_blocks=3000),))
    trace = lambda: open_workload("conversation", limit=200, rate_scale=0.5)  # noqa: E731
    with_tiers, without = serve(trace(), fleet_parts=tiered), serve(trace(), fleet_parts=parts(700))
    assert with_tiers.prefix_cache["hit_rate_with_tiers"] > without.prefix_cache["hit_rate"]
    assert ["tiers" in one for one in with_tiers.replicas] == [True, False]


def test_every_engine_is_told_apart_in_the_report() -> None:
    report = serve([row(1), row(2)], shape(2, 1, data_parallel_size=2))
    places = [(one["pool"], one["replica"], one["data_parallel_rank"]) for one in report.replicas]
    assert places == [
        *(("prefill", replica, rank) for replica in (0, 1) for rank in (0, 1)),
        *(("decode", 0, rank) for rank in (0, 1)),
    ]
    assert report.assumptions["num_prefill_replicas"] == 2
    assert report.assumptions["decode_routing"] == "least-outstanding-work"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shape(0, 1), "num_prefill_replicas is 0; it must be at least 1"),
        (lambda: shape(1, 0), "num_decode_replicas is 0"),
        (lambda: TransferModel(bytes_per_s=0), "more than 0 bytes a second"),
        (lambda: TransferModel(bytes_per_s=1e9), "needs the bytes of a block"),
        (lambda: TransferModel(bytes_per_s=math.inf, latency_s=-1), "latency_s is -1"),
    ],
)
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


# -- conservation over both ledgers ------------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 150), st.integers(1, 30), st.lists(st.integers(0, 2), max_size=6)),
    min_size=1,
    max_size=25,
)


def tree_of_prompts(rows) -> list[TraceRequest]:
    """Prompts of blocks of 16 that share the beginnings of others'."""
    trace, now = [], 0.0
    for place, (gap, prompt, output, choices) in enumerate(rows):
        now += gap / 100
        ids, node = [], 0
        for choice in choices:
            node = node * 3 + choice + 1
            ids.append(node)
        ids += [10_000 + 20 * place + index for index in range(12)]
        trace.append(TraceRequest(now, prompt, output, tuple(ids[: -(-prompt // 16)]), place + 1))
    return trace


class Counted:
    """After every commit: held + evictable + clean + null blocks are all blocks."""

    def __init__(self) -> None:
        self.log = EventLog()
        self.audit: ConservationAudit | None = None

    def apply(self, commit: Commit) -> None:
        self.log.apply(commit)
        if self.audit is None:
            (created,) = commit.events
            assert isinstance(created, PoolCreated)
            self.audit = ConservationAudit(created)
        self.audit.apply(commit)
        assert not self.audit.balance.difference


class Audit:
    """Looks at both sides of every transfer, when it begins and when it ends."""

    def __init__(self, fleet: DisaggregatedFleet) -> None:
        self.fleet = fleet
        self.num_transfers = 0
        self._start = fleet.links.start
        fleet.links.start = self.start  # type: ignore[method-assign]

    def start(self, source: int, target: int, num_blocks: int, done) -> None:
        if not num_blocks:
            self._start(source, target, num_blocks, done)
            return
        self.num_transfers += 1
        name = done.args[1].request.request_id
        before = self.blocks(source, target, name, num_blocks)

        def ended() -> None:
            assert self.blocks(source, target, name, num_blocks) == before
            done()

        self._start(source, target, num_blocks, ended)

    def blocks(self, source: int, target: int, name: str, num_blocks: int):
        """Both sides hold the request; what is written into on the decode side is not found and not shared."""
        prefill = self.fleet.prefill[source].scheduler.allocator
        decode = self.fleet.decode[target].scheduler.allocator
        held = [block for blocks in decode.block_ids(name) for block in blocks if block]
        written = [block for block in held if decode.pool.key_of(block) is None]
        assert len(written) == num_blocks
        assert [decode.pool.ref_cnt(block) for block in written] == [1] * num_blocks
        return prefill.block_ids(name), held, written


@pytest.mark.parametrize("groups", [[FullAttention(16)], [SlidingWindow(16, 64), FullAttention(16)]])
@given(
    rows=requests,
    num_blocks=st.integers(24, 45),
    pools=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    gb_s=st.sampled_from([math.inf, 1.0, 0.01]),
    sharing=st.sampled_from(["fair", "fifo"]),
    first=st.sampled_from(["prefill", "decode"]),
    routing=st.sampled_from(routers.names()),
    async_scheduling=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_conservation_across_both_ledgers(
    groups, rows, num_blocks, pools, gb_s, sharing, first, routing, async_scheduling
) -> None:
    trace = tree_of_prompts(rows)
    outcomes = []
    for macro_steps in (True, False):
        logs = [Counted() for _ in range(sum(pools))]
        records = []
        fleet = DisaggregatedFleet(
            shape(*pools, first_token_from=first),
            EngineParts(
                allocator=AllocatorConfig(
                    num_blocks=num_blocks * len(groups),
                    groups=groups,
                    max_model_len=272,
                    max_num_reqs=4,
                    retention_interval=None,
                ),
                scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
                latency=LinearLatency(0.05, 1.3e-4, 1.7e-3),
                sinks_of=partial(lambda logs, index: [logs[index]], logs),
                on_finished=records.append,
                async_scheduling=async_scheduling,
                macro_steps=macro_steps,
            ),
            TransferModel(bytes_per_s=gb_s * 1e9, bytes_per_block=MB, sharing=sharing),
            prefill_router=make_router(routing),
            decode_router=make_router(routing),
            trace_block_size=16,
        )
        audit = Audit(fleet)
        fleet.run(trace)
        # Every request ends, once, with all its tokens, and leaves nothing behind on either side.
        assert sorted(int(record.request_id) for record in records) == [one.place for one in trace]
        assert sum(record.num_output_tokens for record in records) == sum(one.output_length for one in trace)
        assert fleet._handovers == {}
        for engine in (*fleet.prefill, *fleet.decode):
            assert engine.view.num_outstanding_requests == 0
        for run, log in zip(fleet.engines, logs, strict=True):
            allocator = run.scheduler.allocator
            assert allocator.pool.num_held_blocks == 0
            assert not run.scheduler.has_unfinished
            assert run.recorder._away == run.recorder._arrival_ns == {}
            assert log.log.replay().snapshot() == allocator.state.snapshot()
        assert audit.num_transfers == fleet.transfer_ns.count
        # Every token is computed once: in the prompt's place, or as output but for the last one.
        prefill = [engine.scheduler.stats for engine in fleet.prefill]
        decode = [engine.scheduler.stats for engine in fleet.decode]
        again = sum(stats.recomputed_tokens for stats in (*prefill, *decode))
        hits = sum(stats.prefix_hits_tokens + stats.readmission_shared_tokens for stats in prefill)
        prompts = sum(one.input_length for one in trace)
        outputs = sum(one.output_length - 1 for one in trace)
        computed = sum(stats.computed_tokens for stats in (*prefill, *decode))
        found = sum(stats.prefix_hits_tokens + stats.external_hits_tokens for stats in decode)
        last_again = sum(stats.num_submitted for stats in decode) if first == "decode" else 0
        assert found + last_again == sum(
            one.input_length for one in trace if one.output_length > 1 or first == "decode"
        )
        assert computed == prompts - hits + outputs + last_again + again
        outcomes.append((sorted(map(str, records)), fleet.arrivals.last_ended_ns, fleet.num_transferred_tokens))
    assert outcomes[0] == outcomes[1]
