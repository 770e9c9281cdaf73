"""Tiers for evicted blocks: nothing is lost or doubled, hits are those of the sum, and copies take their time."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.backends.sinks.kv_events.encoder import TierEventEncoder, block_hash
from kvledger.backends.sinks.kv_events.schema import BlockHash, BlockRemoved, BlockStored
from kvledger.core import AllocatorConfig, Commit, FullAttention, InputError, SlidingWindow
from kvledger.core.errors import CorruptLedgerError, MisuseError
from kvledger.core.events import BlocksMoved, MoveReason, TierCommit, TiersCreated
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.sim.fleet.fleet import EngineParts, Fleet, FleetShape, replay_fleet
from kvledger.sim.fleet.routing import make_router
from kvledger.sim.fleet.tiers import Tier, TierState, TierStore
from kvledger.sim.latency.linear import LinearLatency
from kvledger.sim.traces import TraceRequest
from kvledger.sim.workloads.builtin import open_workload

BLOCK = 512
MB = 1e6


def config(num_blocks: int, block_size: int = BLOCK) -> AllocatorConfig:
    return AllocatorConfig(
        num_blocks=num_blocks, groups=[FullAttention(block_size)], max_model_len=(num_blocks - 1) * block_size
    )


def serve(trace, num_blocks: int, *tiers: Tier, macro_steps: bool = True):
    return replay_fleet(
        trace,
        shape=FleetShape(num_replicas=1),
        parts=EngineParts(
            allocator=config(num_blocks),
            scheduler=SchedulerConfig(),
            latency=LinearLatency(),
            tiers=tiers,
            tier_bytes_per_block=100 * MB if tiers else None,
            macro_steps=macro_steps,
        ),
        router=make_router("round-robin"),
        trace_block_size=BLOCK,
    )


def chat(limit: int = 900):
    return open_workload("conversation", limit=limit, rate_scale=0.5)


@pytest.mark.parametrize("shares", [(5000,), (2000, 3000)])
def test_unlimited_bandwidth_finds_what_the_combined_capacity_finds(shares: tuple[int, ...]) -> None:
    tiers = [Tier(name=f"tier {index}", num_blocks=count) for index, count in enumerate(shares)]
    small, tiered, large = serve(chat(), 1500), serve(chat(), 1500, *tiers), serve(chat(), 6500)
    found = tiered.prefix_cache["hit_rate_with_tiers"]
    assert large.prefix_cache["hit_rate"] > 2 * small.prefix_cache["hit_rate"]
    assert found == pytest.approx(large.prefix_cache["hit_rate"], abs=0.002)
    assert found > tiered.prefix_cache["hit_rate"]
    assert tiered.latencies["ttft_s"]["mean"] < small.latencies["ttft_s"]["mean"]


def test_ttft_shows_the_copy_of_what_is_promoted() -> None:
    """A prompt of 5 blocks goes out to host memory for another and comes back: 4 blocks over the link."""
    first, other = (1, 2, 3, 4, 5), (11, 12, 13, 14, 15, 16)
    trace = [
        TraceRequest(0.0, 4 * BLOCK + 10, 1, first, 1),
        TraceRequest(10.0, 5 * BLOCK + 10, 1, other, 2),
        TraceRequest(20.0, 4 * BLOCK + 10, 1, first, 3),
    ]
    free, slow = serve(trace, 7, Tier(name="host", num_blocks=9)), serve(
        trace, 7, Tier(name="host", num_blocks=9, bytes_per_s=1000 * MB)
    )  # fmt: skip
    assert free.prefix_cache["external_hits_tokens"] == slow.prefix_cache["external_hits_tokens"] == 4 * BLOCK
    (tier,) = slow.replicas[0]["tiers"]
    assert tier["promoted"] == 4
    step = LinearLatency()
    alone = [step.base_s + step.prefill_token_s * tokens for tokens in (4 * BLOCK + 10, 5 * BLOCK + 10, 10)]
    assert free.latencies["ttft_s"]["mean"] == pytest.approx(sum(alone) / 3)
    # The second prompt overwrites 4 blocks with keys; the third promotes 4 while it overwrites as many: 0.4 s each.
    assert slow.latencies["ttft_s"]["mean"] == pytest.approx((sum(alone) + 0.4 + 0.4) / 3)


def test_a_slower_tier_waits_longer() -> None:
    def ttft(gb_s: float) -> float:
        return serve(chat(150), 800, Tier(name="host", num_blocks=1200, bytes_per_s=gb_s * 1e9)).latencies["ttft_s"][
            "mean"
        ]

    assert ttft(math.inf) < ttft(50) < ttft(5)


class Auditor:
    """After every commit: each key in one place, no tier over its size, and every block accounted for."""

    def __init__(self) -> None:
        self.store: TierStore | None = None
        self.pool = None
        self.num_commits = 0
        self.tier_log: list[TierCommit] = []
        self.encoder = TierEventEncoder()
        self.on_the_wire: dict[str, set[BlockHash]] = {}

    def told(self) -> "TierLog":
        return TierLog(self)

    def apply(self, commit: Commit) -> None:
        self.num_commits += 1
        store = self.store
        if store is None or self.pool is None:
            return
        places = [set(store.blocks_with_key), *map(set, store.state.kept)]
        assert sum(map(len, places)) == len(frozenset().union(*places))
        assert places[0] == {
            key for block in range(1, self.pool.num_blocks) if (key := self.pool.key_of(block)) is not None
        }
        for place, tier, counts in zip(places[1:], store.tiers, store.state.counts, strict=True):
            assert len(place) <= tier.num_blocks
            assert counts.came_in == counts.promoted + counts.superseded + counts.moved_on + counts.cleared + len(place)
        for before, after in zip(store.state.counts, store.state.counts[1:], strict=False):
            assert after.came_in == before.moved_on


class TierLog:
    """Keeps the tier commits, and follows the KV events made of them as a subscriber would: a set for each medium."""

    def __init__(self, auditor: Auditor) -> None:
        self.auditor = auditor

    def apply(self, commit: TierCommit) -> None:
        auditor = self.auditor
        auditor.tier_log.append(commit)
        for event in auditor.encoder.encode(commit):
            assert isinstance(event, BlockStored | BlockRemoved)
            held = auditor.on_the_wire.setdefault(str(event.medium), set())
            hashes = set(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not hashes & held
                held |= hashes
            else:
                assert hashes <= held
                held -= hashes


requests = st.lists(
    st.tuples(st.integers(0, 200), st.integers(1, 150), st.integers(1, 30), st.lists(st.integers(0, 2), max_size=6)),
    min_size=1,
    max_size=25,
)


@given(requests, st.integers(18, 40), st.lists(st.integers(1, 25), min_size=1, max_size=3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_conservation_across_tiers(rows, num_blocks: int, sizes: list[int], takes_time: bool) -> None:
    trace, now = [], 0.0
    for place, (gap, prompt, output, choices) in enumerate(rows):
        now += gap / 100
        ids, node = [], 0
        for choice in choices:
            node = node * 3 + choice + 1
            ids.append(node)
        ids += [10_000 + 20 * place + index for index in range(12)]
        trace.append(TraceRequest(now, prompt, output, tuple(ids[: -(-prompt // 16)]), place + 1))
    auditor = Auditor()
    speed = 1e9 if takes_time else math.inf
    fleet = Fleet(
        FleetShape(num_replicas=1),
        EngineParts(
            allocator=AllocatorConfig(
                num_blocks=num_blocks, groups=[FullAttention(16)], max_model_len=272, max_num_reqs=4
            ),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
            latency=LinearLatency(0.05, 1e-4, 1e-3),
            sinks_of=lambda index: [auditor],
            tier_sinks_of=lambda index: [auditor.told()],
            tiers=tuple(Tier(name=str(n), num_blocks=size, bytes_per_s=speed) for n, size in enumerate(sizes)),
            tier_bytes_per_block=MB,
        ),
        make_router("round-robin"),
        16,
    )
    run = fleet.engines[0]
    auditor.store, auditor.pool = run.tiers, run.scheduler.allocator.state.pool
    fleet.run(trace)
    assert run.scheduler.stats.num_finished == len(trace)
    assert auditor.num_commits > len(trace)
    store = run.tiers
    assert store is not None
    # The log alone gives the tiers, down to the order in which they forget; so do the events on the wire, by medium.
    assert TierState.replay(auditor.tier_log).snapshot() == store.state.snapshot()
    for index in range(len(sizes)):
        assert auditor.on_the_wire.get(str(index), set()) == {block_hash(key) for key in store.state.kept[index]}


def moves(log: list[TierCommit]) -> list[tuple[str, tuple, int, int | None]]:
    return [
        (str(event.reason), event.keys, event.from_tier, event.to_tier)
        for commit in log
        for event in commit.events
        if isinstance(event, BlocksMoved)
    ]


def test_every_move_is_written_down_and_goes_on_the_wire_with_its_medium() -> None:
    """A pool of 3 usable blocks, a host tier of 2, an SSD of 4; three prompts of 2 whole blocks, and the first again.

    A prompt's last block is freed, and so forgotten, first; a hit brings its blocks back in the prompt's order.
    """
    log: list[TierCommit] = []

    class Keep:
        def apply(self, commit: TierCommit) -> None:
            log.append(commit)

    fleet = Fleet(
        FleetShape(num_replicas=1),
        EngineParts(
            allocator=config(4, 16),
            scheduler=SchedulerConfig(),
            latency=LinearLatency(),
            tiers=(Tier(name="host", num_blocks=2), Tier(name="ssd", num_blocks=4)),
            tier_sinks_of=lambda index: [Keep()],
        ),
        make_router("round-robin"),
        16,
    )
    prompts = [(1, 2, 3), (11, 12, 13), (21, 22, 23), (1, 2, 4)]
    fleet.run([TraceRequest(10.0 * n, 33, 1, ids, n + 1) for n, ids in enumerate(prompts)])
    assert moves(log) == [
        ("written_back", (2, 1), 0, 1),
        ("written_back", (12, 11), 0, 1),
        ("overflowed", (2, 1), 1, 2),
        ("promoted", (1, 2), 2, 0),
        ("written_back", (22, 21), 0, 1),
        ("overflowed", (12, 11), 1, 2),
    ]
    encoder = TierEventEncoder()
    wire = [(type(event).__name__, event.medium, len(event.block_hashes)) for c in log for event in encoder.encode(c)]
    assert wire == [
        ("BlockStored", "CPU", 2),
        ("BlockStored", "CPU", 2),
        ("BlockRemoved", "CPU", 2),
        ("BlockStored", "STORAGE", 2),
        ("BlockRemoved", "STORAGE", 2),
        ("BlockStored", "CPU", 2),
        ("BlockRemoved", "CPU", 2),
        ("BlockStored", "STORAGE", 2),
    ]


def test_a_tier_log_that_is_not_whole_is_refused() -> None:
    created = TierCommit(0, 0, (TiersCreated(("host",), (2,), 16),))
    gone = BlocksMoved(MoveReason.PROMOTED, ("a",), 1, 0)
    with pytest.raises(CorruptLedgerError, match="begins with TiersCreated"):
        TierState.replay([TierCommit(0, 5, (gone,))])
    with pytest.raises(CorruptLedgerError, match="an empty tier log"):
        TierState.replay([])
    with pytest.raises(CorruptLedgerError, match="tier commit 2 follows 0"):
        TierState.replay([created, TierCommit(2, 5, ())])
    with pytest.raises(CorruptLedgerError, match="promoted: the host tier does not keep 'a'"):
        TierState.replay([created, TierCommit(1, 5, (gone,))])
    with pytest.raises(MisuseError, match="the encoder came too late"):
        TierEventEncoder().encode(TierCommit(1, 5, (gone,)))


def test_a_reset_clears_the_tiers_as_well() -> None:
    fleet = Fleet(
        FleetShape(num_replicas=1),
        EngineParts(
            allocator=config(4, 16),
            scheduler=SchedulerConfig(),
            latency=LinearLatency(),
            tiers=(Tier(name="host", num_blocks=5),),
        ),
        make_router("round-robin"),
        16,
    )
    fleet.run([TraceRequest(float(n), 33, 1, (3 * n, 3 * n + 1, 3 * n + 2), n + 1) for n in range(3)])
    store = fleet.engines[0].tiers
    assert store is not None
    assert len(store.state.kept[0]) > 0
    fleet.engines[0].scheduler.allocator.reset_prefix_cache()
    assert not store.state.kept[0] and not store.blocks_with_key


@pytest.mark.parametrize(
    ("tiers", "groups", "message"),
    [
        ([], [FullAttention(16)], "give at least one tier"),
        ([Tier(name="host", num_blocks=5, bytes_per_s=1e9)], [FullAttention(16)], "needs the bytes of a block"),
        ([Tier(name="host", num_blocks=5)], [FullAttention(16), SlidingWindow(16, 64)], "attend to everything"),
    ],
)
def test_tiers_that_cannot_work_are_refused(tiers, groups, message: str) -> None:
    made_of = AllocatorConfig(num_blocks=50, groups=groups, max_model_len=512, retention_interval=None)
    with pytest.raises(InputError, match=message):
        TierStore(tiers, made_of, None)


def test_a_tier_of_no_size_or_speed_is_refused() -> None:
    with pytest.raises(InputError, match="the ssd tier has 0 blocks"):
        Tier(name="ssd", num_blocks=0)
    with pytest.raises(InputError, match="must be above 0"):
        Tier(name="ssd", num_blocks=1, bytes_per_s=0)
