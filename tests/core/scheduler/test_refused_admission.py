"""A request that found too few blocks looks again when it may find more, and not before."""

from collections.abc import Callable
from functools import partial
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import AllocatorConfig, Commit, EventLog, FullAttention, KVCacheAllocator, Request, SlidingWindow
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.scheduler.waiting import RefusedAdmission
from kvledger.sim.engine.arrivals import TraceKeySource

SIZE = 16


def make(num_blocks: int, watermark: int = 0, orphans: str = "keep", groups=None, **limits) -> Scheduler:
    allocator = KVCacheAllocator(
        AllocatorConfig(
            num_blocks=num_blocks,
            groups=groups or [FullAttention(SIZE)],
            max_model_len=1024,
            max_num_reqs=6,
            watermark_blocks=watermark,
            orphans=orphans,
            retention_interval=0,
        ),
        sinks=[EventLog()],
    )
    return Scheduler(SchedulerConfig(**{"max_num_seqs": 6, "max_num_batched_tokens": 64, **limits}), allocator)


def prompt(name: str, ids: list[int], max_tokens: int = 4) -> Request:
    """A prompt of one full block for each id, and a token behind them."""
    length = len(ids) * SIZE + 1
    own = 10_000 + crc32(name.encode())
    source = TraceKeySource((*ids, own), length, own, SIZE, SIZE)
    return Request(name, length, max_tokens, source)


class ListedKeys:
    """A source whose keys name outputs too, which are known beforehand."""

    def __init__(self, keys: list[int]) -> None:
        self._keys = keys

    def keys(self, start: int, stop: int) -> list[int]:
        return self._keys[start:stop]


def log_of(scheduler: Scheduler) -> list[Commit]:
    (log,) = scheduler.allocator.sinks
    assert isinstance(log, EventLog)
    return list(log)


def step(scheduler: Scheduler) -> bool:
    scheduled = scheduler.schedule()
    if scheduled is None:
        return False
    scheduler.complete(scheduled)
    return True


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who looked for a prefix, in order."""
    seen: list[str] = []
    match_prefix = KVCacheAllocator.match_prefix

    def noted(allocator: KVCacheAllocator, request: Request):
        seen.append(request.request_id)
        return match_prefix(allocator, request)

    monkeypatch.setattr(KVCacheAllocator, "match_prefix", noted)
    return seen


def test_while_nothing_comes_back_a_refused_request_does_not_look_again(lookups: list[str]) -> None:
    scheduler = make(num_blocks=8)
    scheduler.submit(prompt("runs", [1, 2, 3], max_tokens=8))
    assert step(scheduler)
    scheduler.submit(prompt("waits", [4, 5, 6, 7]))
    while "waits" not in {r.request_id for r in running(scheduler)}:
        assert step(scheduler)
    assert lookups == ["runs", "waits", "waits"]


def test_a_refused_request_looks_once_for_as_many_blocks_as_it_missed(lookups: list[str]) -> None:
    scheduler = make(num_blocks=12)
    for name, ids, outputs in (("short", [1], 3), ("middle", [2, 3], 6), ("long", [4, 5, 6], 12)):
        scheduler.submit(prompt(name, ids, max_tokens=outputs))
    assert step(scheduler) and step(scheduler)
    scheduler.submit(prompt("waits", [11, 12, 13, 14, 15, 16]))
    while len(scheduler.waiting):
        assert step(scheduler)
    # It missed five blocks. "short" gave back two, which cannot be enough, and "middle" three more.
    assert lookups.count("waits") == 2


def test_a_refused_request_looks_again_when_the_block_behind_its_hit_becomes_findable(lookups: list[str]) -> None:
    scheduler = make(num_blocks=7)
    # The third block is held from the start and named when the outputs have filled it.
    scheduler.submit(Request("runs", 2 * SIZE + 1, SIZE + 8, ListedKeys([1, 2, 3])))
    assert step(scheduler)
    scheduler.submit(Request("waits", 5 * SIZE + 1, 4, ListedKeys([1, 2, 3, 4, 5])))
    num_steps = 0
    while len(scheduler.waiting):
        assert step(scheduler)
        num_steps += 1
    assert num_steps == SIZE - 1
    assert "runs" in {r.request_id for r in running(scheduler)}
    assert lookups == ["runs", "waits", "waits"]


@pytest.mark.parametrize(
    ("reserved_blocks", "use_watermark", "holds"),
    [(2, True, True), (3, True, True), (1, True, False), (2, False, False)],
)
def test_a_refusal_ends_when_fewer_blocks_must_stay_free(
    reserved_blocks: int, use_watermark: bool, holds: bool
) -> None:
    allocator = make(num_blocks=8, watermark=1).allocator
    request = prompt("waits", [1, 2, 3, 4])
    refusal = RefusedAdmission(request, 1, 1, allocator.state.num_gains, reserved_blocks=2, use_watermark=True)
    assert refusal.still_holds(allocator, request, reserved_blocks, use_watermark) == holds


class CompleteBlocksOnly(ListedKeys):
    """A source that refuses blocks which its request has not filled, as one that hashes tokens does."""

    def keys(self, start: int, stop: int) -> list[int]:
        assert stop <= len(self._keys), f"no block {stop - 1}: there are {len(self._keys)}"
        return super().keys(start, stop)


def test_a_refused_request_asks_for_no_key_of_a_block_that_it_has_not_filled() -> None:
    scheduler = make(num_blocks=8)
    scheduler.submit(Request("runs", 4 * SIZE + 1, 8, CompleteBlocksOnly([1, 2, 3, 4])))
    assert step(scheduler) and step(scheduler)
    scheduler.submit(Request("hits", 4 * SIZE + 1, 4, CompleteBlocksOnly([1, 2, 3, 4])))
    scheduler.submit(Request("waits", 2 * SIZE + 1, 4, CompleteBlocksOnly([1, 2])))
    scheduler.submit(Request("waits too", 2 * SIZE + 1, 4, CompleteBlocksOnly([1, 2])))
    while scheduler.has_unfinished:
        assert step(scheduler)


def test_requests_with_windowed_groups_always_look(lookups: list[str]) -> None:
    scheduler = make(num_blocks=16, groups=[FullAttention(SIZE), SlidingWindow(SIZE, 32)])
    scheduler.submit(prompt("runs", [1, 2, 3], max_tokens=8))
    assert step(scheduler)
    scheduler.submit(prompt("waits", [4, 5, 6, 7, 8]))
    for _ in range(3):
        assert step(scheduler)
    assert lookups.count("waits") == 3


def test_a_key_dropped_from_a_free_block_can_admit_by_the_block_behind_it() -> None:
    # Two blocks carry key 1: one that is free, found first, and one that "twin" holds.
    scheduler = make(num_blocks=8)
    allocator = scheduler.allocator
    first, twin = prompt("first", [1]), prompt("twin", [1], max_tokens=40)
    match = allocator.match_prefix(first)
    assert allocator.allocate(first, first.num_tokens, match) is not None
    assert allocator.allocate(twin, twin.num_tokens, allocator.match_prefix(prompt("twin", []))) is not None
    allocator.free("first")
    free_one, held_one = allocator.pool.copies(1)
    assert (allocator.pool.ref_cnt(free_one), allocator.pool.ref_cnt(held_one)) == (0, 1)
    waits = prompt("waits", [1, 2, 3, 4, 5])
    match = allocator.match_prefix(waits)
    missing = allocator.num_missing_blocks(waits, match, use_watermark=False)
    assert missing == 1
    key = allocator.key_behind(waits, match)
    refusal = RefusedAdmission(waits, key, missing, allocator.state.num_gains, 0, False)
    assert refusal.still_holds(allocator, waits, 0, False)
    allocator.evict([free_one])
    assert not refusal.still_holds(allocator, waits, 0, False)
    assert allocator.can_admit(waits, allocator.match_prefix(waits), use_watermark=False)


def test_a_request_that_is_submitted_anew_looks_anew() -> None:
    scheduler = make(num_blocks=6, reserve_full_sequence=False, protect_preempted=True, max_num_batched_tokens=17)
    scheduler.submit(Request("runs", 40, 30, ListedKeys([1, 2, 3, 4, 5])))
    again = Request("again", 33, 30, ListedKeys([11, 12, 13, 14]))
    scheduler.submit(again)
    while not again.num_preemptions:
        assert step(scheduler)
    assert step(scheduler)
    # Preempted, it waited until the whole of it fits; aborted and new, its first chunk is all that has to.
    assert scheduler.waiting.head() is again
    scheduler.abort("again")
    scheduler.submit(again)
    assert step(scheduler)
    assert again in running(scheduler)


def test_a_hit_that_names_one_block_several_times_is_looked_up_again_once_others_hold_it(lookups: list[str]) -> None:
    scheduler = make(num_blocks=9, policy="priority")
    scheduler.submit(Request("first", SIZE + 1, 1, ListedKeys([1])))
    assert step(scheduler)
    scheduler.submit(Request("runs", 2 * SIZE + 1, 50, ListedKeys([2, 3])))
    assert step(scheduler)
    waits = Request("waits", 6 * SIZE + 1, 4, ListedKeys([1, 1, 1, 1, 7, 8]), priority=1)
    scheduler.submit(waits)
    assert step(scheduler)
    assert scheduler.waiting.head() is waits
    # It adopts the block of key 1, which is four of the seven that "waits" needs.
    scheduler.submit(Request("adopts", SIZE + 1, 50, ListedKeys([1])))
    assert step(scheduler) and step(scheduler)
    assert waits in running(scheduler)


Act = Callable[[Scheduler], object]


@st.composite
def acts(draw: st.DrawFn) -> list[Act]:
    """A history of a scheduler: prompts that share their beginnings, steps, aborts, the same again, keys dropped."""
    history: list[Act] = []
    names_content = draw(st.booleans())  # alone: then keys repeat, and follow several others
    for number in range(draw(st.integers(3, 40))):
        kind = draw(st.sampled_from(["submit", "step", "step", "step", "abort", "again", "evict"]))
        if kind == "submit":
            ids = [draw(st.integers(1, 2))]
            for _ in range(draw(st.integers(0, 4))):
                ids.append(draw(st.integers(1, 2)) if names_content else ids[-1] * 3 + draw(st.integers(0, 1)))
            # Its outputs may be what others are prompted with, and its last prompt block may be a part of one.
            length = len(ids) * SIZE + draw(st.integers(1 - SIZE, 1))
            named = ListedKeys([*ids, ids[-1] * 3, ids[-1] * 9])
            outputs, priority = draw(st.integers(1, 40)), draw(st.integers(0, 2))
            request = partial(Request, str(number), length, outputs, named, priority=priority)
            history.append(lambda s, request=request: s.submit(request()))
        elif kind == "step":
            history.append(step)
        elif kind == "abort":
            name = str(draw(st.integers(0, number)))
            history.append(lambda s, n=name: s.abort(n))
        elif kind == "again":
            name, keeps_outputs = str(draw(st.integers(0, number))), draw(st.booleans())
            history.append(lambda s, n=name, keeps=keeps_outputs: submit_again(s, n, keeps))
        else:
            block = draw(st.integers(1, 7))
            history.append(lambda s, b=block: s.allocator.evict([b]))
    return history


def submit_again(scheduler: Scheduler, name: str, keeps_outputs: bool) -> None:
    """Abort a request and submit the same object, as it is or as it was at first."""
    request = scheduler._requests.get(name)
    if request is None:
        return
    scheduler.abort(name)
    if not keeps_outputs:
        request.num_output_tokens = 0
    scheduler.submit(request)


@settings(max_examples=150, deadline=None)
@given(
    history=acts(),
    num_blocks=st.integers(8, 20),
    watermark=st.integers(0, 2),
    orphans=st.sampled_from(["keep", "drop"]),
    swap_space_blocks=st.sampled_from([0, 0, 10]),
    limits=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["fcfs", "priority"]),
            "num_speculative_tokens": st.sampled_from([0, 0, 3]),
            "reserve_full_sequence": st.booleans(),
            "max_num_batched_tokens": st.sampled_from([24, 40, 128]),
        }
    ),
)
def test_whoever_remembers_refusals_decides_as_one_who_always_looks(
    history: list[Act], num_blocks: int, watermark: int, orphans: str, swap_space_blocks: int, limits: dict
) -> None:
    if swap_space_blocks:
        limits |= {"preemption_mode": "swap", "swap_space_blocks": swap_space_blocks}
    remembers = make(num_blocks, watermark, orphans, **limits)
    looks = make(num_blocks, watermark, orphans, **limits)
    forget = looks._admission
    for number, act in enumerate([*history, *[step] * 60]):
        results = []
        for scheduler in (remembers, looks):
            forget._refused = None
            try:
                results.append(repr(act(scheduler)))
            except Exception as error:
                results.append(repr(error))
        assert results[0] == results[1], number
        assert log_of(remembers) == log_of(looks), number


def running(scheduler: Scheduler) -> list[Request]:
    return [scheduler.request_in(row) for row in scheduler._running.rows.tolist()]
