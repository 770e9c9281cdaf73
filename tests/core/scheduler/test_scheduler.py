"""Continuous batching: order, budget, chunks, policies, aborts, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core import (
    AllocatorConfig,
    DoesNotFitError,
    EventLog,
    FullAttention,
    InputError,
    KVCacheAllocator,
    MisuseError,
    Request,
    SlidingWindow,
)
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.sim.engine.arrivals import TraceKeySource


def make(num_blocks: int = 101, log: EventLog | None = None, groups=None, watermark: int = 0, **limits) -> Scheduler:
    allocator = KVCacheAllocator(
        AllocatorConfig(
            num_blocks=num_blocks,
            groups=groups or [FullAttention(16)],
            max_model_len=1600,
            max_num_reqs=limits.get("max_num_seqs", 8),
            retention_interval=0,
            watermark_blocks=watermark,
        ),
        sinks=[log] if log is not None else [],
    )
    return Scheduler(SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}), allocator)


def batch_of(scheduler: Scheduler, step) -> dict[str, int]:
    names = [scheduler.request_in(row).request_id for row in step.batch.rows.tolist()]
    return dict(zip(names, step.batch.counts.tolist(), strict=True))


def test_running_requests_come_first_and_the_rest_of_the_budget_goes_to_waiting_ones() -> None:
    scheduler = make()
    scheduler.submit(Request("a", 10, 5))
    scheduler.complete(scheduler.schedule())
    scheduler.submit(Request("b", 100, 5))
    step = scheduler.schedule()
    assert batch_of(scheduler, step) == {"a": 1, "b": 63}
    scheduler.complete(step)
    step = scheduler.schedule()
    assert batch_of(scheduler, step) == {"a": 1, "b": 37}
    outcome = scheduler.complete(step)
    assert len(outcome.sampled) == 2


def test_a_prompt_in_chunks_produces_nothing_before_its_last_chunk() -> None:
    scheduler = make()
    scheduler.submit(Request("a", 130, 1))
    sampled = []
    while scheduler.has_unfinished:
        sampled.append(len(scheduler.complete(scheduler.schedule()).sampled))
    assert sampled == [0, 0, 1]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room_or_is_refused() -> None:
    scheduler = make(enable_chunked_prefill=False)
    scheduler.submit(Request("a", 40, 5))
    scheduler.submit(Request("b", 40, 5))
    step = scheduler.schedule()
    assert batch_of(scheduler, step) == {"a": 40}
    scheduler.complete(step)
    assert batch_of(scheduler, scheduler.schedule()) == {"a": 1, "b": 40}
    with pytest.raises(DoesNotFitError, match="65 prompt tokens, more than max_num_batched_tokens 64"):
        scheduler.submit(Request("c", 65, 1))


def test_one_long_prompt_takes_no_more_than_its_threshold() -> None:
    scheduler = make(long_prefill_token_threshold=20)
    scheduler.submit(Request("a", 100, 5))
    scheduler.submit(Request("b", 30, 5))
    assert batch_of(scheduler, scheduler.schedule()) == {"a": 20, "b": 20}


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make(max_num_seqs=2)
    for i in range(3):
        scheduler.submit(Request(f"r{i}", 5, 2))
    assert list(batch_of(scheduler, scheduler.schedule())) == ["r0", "r1"]
    assert scheduler.num_waiting == 1


def test_by_priority_the_most_urgent_is_admitted_first_and_the_least_urgent_gives_way() -> None:
    scheduler = make(num_blocks=6, policy="priority")
    scheduler.submit(Request("late and urgent", 30, 40, priority=0, arrival=2.0))
    scheduler.submit(Request("early", 30, 40, priority=1, arrival=0.0))
    assert list(batch_of(scheduler, scheduler.schedule())) == ["late and urgent", "early"]
    # the urgent one comes second, and yet the other one is the victim
    scheduler = make(num_blocks=6, policy="priority")
    scheduler.submit(Request("early", 30, 40, priority=1, arrival=0.0))
    scheduler.complete(scheduler.schedule())
    scheduler.submit(Request("late and urgent", 30, 40, priority=0, arrival=2.0))
    while not scheduler.stats.num_preemptions:
        scheduler.complete(scheduler.schedule())
    assert scheduler.waiting.head().request_id == "early"
    while scheduler.has_unfinished:
        scheduler.complete(scheduler.schedule())
    assert scheduler.stats.num_finished == 2


def test_a_request_knows_what_its_first_admission_found_and_how_often_it_was_preempted() -> None:
    scheduler = make(num_blocks=6)
    requests = [
        Request(name, 32, 30, keys=TraceKeySource((7, 8), 32, ordinal, 16, 16)) for ordinal, name in enumerate("ab")
    ]
    scheduler.submit(requests[0])
    assert requests[0].num_cached_tokens is None
    scheduler.complete(scheduler.schedule())
    scheduler.submit(requests[1])
    while scheduler.has_unfinished:
        scheduler.complete(scheduler.schedule())
    # of two whole blocks found, the last is computed again: one token must be computed to produce output
    assert [request.num_cached_tokens for request in requests] == [0, 16]
    assert sum(request.num_preemptions for request in requests) == scheduler.stats.num_preemptions > 0
    assert max(r.num_preemptions for r in requests) == scheduler.stats.max_preemptions_per_request
    assert scheduler.stats.readmission_hits_tokens > 0
    requests[1].num_output_tokens = 0
    scheduler.submit(requests[1])
    assert (requests[1].num_cached_tokens, requests[1].num_preemptions) == (None, 0)


def test_c06_abort_gives_everything_back_in_every_state_and_is_idempotent() -> None:
    scheduler = make(num_blocks=12)
    keys = [TraceKeySource([7, 8 + i], 64, i, 16, 32) for i in range(3)]
    scheduler.submit(Request("decoding", 64, 20, keys[0]))
    scheduler.complete(scheduler.schedule())
    scheduler.submit(Request("mid prefill", 64, 20, keys[1]))
    scheduler.schedule()
    pool = scheduler.allocator.pool
    shared = [block for block, count in enumerate(pool.ref_cnts()) if count == 2]
    assert shared
    scheduler.submit(Request("waiting", 60, 4, keys[2]))
    for name in ("mid prefill", "waiting"):
        assert scheduler.abort(name)
        assert not scheduler.abort(name)
    assert all(pool.ref_cnt(block) == 1 for block in shared)
    assert scheduler.abort("decoding")
    assert pool.usage == 0
    assert not scheduler.has_unfinished
    assert not scheduler.abort("never seen")
    assert scheduler.stats.num_aborted == 3


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_c06_a_request_aborted_while_its_step_runs_ends_once_and_the_others_go_on(max_tokens) -> None:
    scheduler = make()
    scheduler.submit(Request("aborted", 10, max_tokens))
    scheduler.submit(Request("other", 10, max_tokens))
    step = scheduler.schedule()
    assert scheduler.abort("aborted")
    outcome = scheduler.complete(step)
    assert [request.request_id for request in outcome.finished_requests] == ["other"][: 2 - max_tokens]
    while (step := scheduler.schedule()) is not None:
        scheduler.complete(step)
    assert (scheduler.stats.num_aborted, scheduler.stats.num_finished) == (1, 1)
    assert scheduler.allocator.pool.num_held_blocks == 0


def test_an_aborted_request_may_come_back_under_its_name() -> None:
    scheduler = make()
    scheduler.submit(Request("a", 10, 5))
    with pytest.raises(MisuseError, match="still being served"):
        scheduler.submit(Request("a", 10, 5))
    scheduler.abort("a")
    scheduler.submit(Request("a", 10, 5))


def test_a_watermark_never_keeps_the_only_request_out() -> None:
    scheduler = make(num_blocks=11, watermark=4)
    scheduler.submit(Request("nearly the whole pool", 140, 10))
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    assert scheduler.stats.num_finished == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"policy": "lifo"}, "policy must be one of fcfs, priority, not 'lifo'"),
        ({"preemption_victim": "oldest"}, "preemption_victim must be one of"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens 7 is below max_num_seqs 8"),
    ],
)
def test_contradicting_limits_are_refused(limits: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits})


def test_more_sequences_than_rows_are_refused() -> None:
    allocator = KVCacheAllocator(
        AllocatorConfig(num_blocks=9, groups=[FullAttention(16)], max_model_len=64, max_num_reqs=2)
    )
    with pytest.raises(InputError, match="max_num_seqs 3 exceeds the allocator's 2 rows"):
        Scheduler(SchedulerConfig(max_num_seqs=3), allocator)


requests = st.lists(
    st.tuples(st.integers(1, 150), st.integers(1, 40), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@given(
    requests=requests,
    num_blocks=st.integers(14, 30),
    budget=st.integers(8, 100),
    threshold=st.sampled_from([0, 5, 33]),
    policy=st.sampled_from(["fcfs", "priority"]),
    victim=st.sampled_from(["last-admitted", "least-computed"]),
    windowed=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_and_the_pool_returns_to_empty(
    requests, num_blocks, budget, threshold, policy, victim, windowed
) -> None:
    log = EventLog()
    groups = [FullAttention(16), SlidingWindow(16, 40)] if windowed else None
    scheduler = make(
        num_blocks,
        log,
        groups,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        policy=policy,
        preemption_victim=victim,
    )
    rejected = 0
    for i, (prompt, output, ids, priority) in enumerate(requests):
        # ids name prompt content in a tree, so that prefixes are shared and no id has two parents
        chain, node = [], 0
        for choice in ids:
            node = node * 4 + choice + 1
            chain.append(node)
        keys = TraceKeySource(
            (chain + [100_000 + 50 * i + j for j in range(10)])[: -(-prompt // 16)], prompt, i, 16, 16
        )
        try:
            scheduler.submit(Request(f"r{i}", prompt, output, keys, priority=priority, arrival=float(i)))
        except DoesNotFitError:
            rejected += 1
    produced = computed = 0
    for _ in range(20_000):
        if not scheduler.has_unfinished:
            break
        step = scheduler.schedule()
        assert step is not None, "nothing can be computed although requests are left"
        assert 0 < step.batch.num_tokens <= budget
        assert step.load.num_tokens == step.batch.num_tokens
        computed += step.batch.num_tokens
        produced += len(scheduler.complete(step).sampled)
    stats = scheduler.stats
    assert stats.num_finished + rejected == len(requests)
    assert scheduler.allocator.pool.usage == 0
    assert stats.computed_tokens == computed
    accepted = [
        request for request in requests if request[0] + request[1] - 1 <= scheduler.allocator.max_fitting_tokens()
    ]
    assert produced == sum(output for _, output, *_ in accepted)
    needed = sum(prompt + output - 1 for prompt, output, *_ in accepted)
    found = stats.prefix_hits_tokens + stats.readmission_shared_tokens
    assert computed - stats.recomputed_tokens + found == needed
    assert log.replay().snapshot() == scheduler.allocator.state.snapshot()


def run_with_drafts(scheduler: Scheduler, accept: list[int]) -> int:
    """Steps to the end; the n-th step accepts `accept[n % len]` drafts of every request (at most what it has)."""
    steps = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        drafts = step.num_draft_tokens
        accepted = None if drafts is None else np.minimum(drafts, accept[steps % len(accept)])
        scheduler.complete(step, num_accepted_tokens=accepted)
        steps += 1
        assert steps < 20_000
    return steps


def test_accepted_drafts_save_steps_and_rejected_ones_are_taken_back() -> None:
    def steps(accept: list[int]) -> int:
        scheduler = make(num_speculative_tokens=3)
        scheduler.submit(Request("a", 30, 17))
        return run_with_drafts(scheduler, accept)

    assert steps([0]) == 17
    assert steps([3]) == 1 + 4
    assert steps([1]) == 1 + 8


def test_d06_drafts_and_lookahead_take_their_slots_whatever_is_accepted() -> None:
    scheduler = make(num_speculative_tokens=3)
    scheduler.submit(Request("a", 30, 17))
    scheduler.complete(scheduler.schedule())
    assert [len(blocks) for blocks in scheduler.allocator.block_ids("a")] == [3]  # ceil((30 + 3) / 16)
    step = scheduler.schedule()
    assert step.batch.counts.tolist() == [4]
    assert step.num_draft_tokens.tolist() == [3]


def test_more_accepted_drafts_than_there_were_are_refused() -> None:
    scheduler = make(num_speculative_tokens=2)
    scheduler.submit(Request("a", 5, 9))
    scheduler.complete(scheduler.schedule())
    step = scheduler.schedule()
    with pytest.raises(MisuseError, match=r"accepted drafts \[3\] of \[2\]"):
        scheduler.complete(step, num_accepted_tokens=np.array([3]))


def test_who_produced_no_token_in_a_step_cannot_stop_with_it() -> None:
    scheduler = make()
    scheduler.submit(Request("a", 5, 9))
    scheduler.complete(scheduler.schedule())
    scheduler.submit(Request("b", 100, 9))
    step = scheduler.schedule()
    decoding, in_chunks = step.batch.rows.tolist()
    computed = scheduler.stats.computed_tokens
    with pytest.raises(MisuseError, match=rf"rows \[{in_chunks}\] cannot stop .* are \[{decoding}\]"):
        scheduler.complete(step, stopped=(decoding, in_chunks))
    assert scheduler.stats.computed_tokens == computed
    outcome = scheduler.complete(step, stopped=(decoding,))
    assert [request.request_id for request in outcome.finished_requests] == ["a"]


def test_swapped_tokens_come_back_without_being_computed_again() -> None:
    def run(**limits) -> Scheduler:
        scheduler = make(num_blocks=8, max_num_batched_tokens=256, **limits)
        for name in ("a", "b"):
            scheduler.submit(Request(name, 40, 60))
        while scheduler.has_unfinished:
            scheduler.complete(scheduler.schedule())
        return scheduler

    swapped, recomputed = run(preemption_mode="swap", swap_space_blocks=20), run()
    assert swapped.stats.num_preemptions > 0
    assert recomputed.stats.recomputed_tokens > 0
    assert swapped.stats.recomputed_tokens == 0
    assert swapped.stats.swapped_in_tokens == swapped.stats.swapped_out_tokens > 0
    assert swapped.stats.computed_tokens == 2 * 99
    assert run(preemption_mode="swap", swap_space_blocks=1).stats.swapped_in_tokens == 0


def test_swapping_without_room_or_room_without_swapping_is_refused() -> None:
    with pytest.raises(InputError, match="contradict"):
        SchedulerConfig(preemption_mode="swap")
    with pytest.raises(InputError, match="contradict"):
        SchedulerConfig(swap_space_blocks=5)


@given(
    requests=requests,
    num_blocks=st.integers(16, 30),
    budget=st.integers(40, 100),
    drafts=st.integers(0, 4),
    accept=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    swap=st.integers(0, 30),
    windowed=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_with_drafts_and_swapping_too_every_request_ends(
    requests, num_blocks, budget, drafts, accept, swap, windowed
) -> None:
    log = EventLog()
    scheduler = make(
        num_blocks,
        log,
        [FullAttention(16), SlidingWindow(16, 40)] if windowed else None,
        max_num_batched_tokens=budget,
        num_speculative_tokens=drafts,
        preemption_mode="swap" if swap else "recompute",
        swap_space_blocks=swap,
    )
    rejected = 0
    expected = 0
    for i, (prompt, output, *_) in enumerate(requests):
        keys = TraceKeySource(None, prompt, i, 16, 16)
        try:
            scheduler.submit(Request(f"r{i}", prompt, output, keys))
            expected += output
        except DoesNotFitError:
            rejected += 1
    produced = 0
    for n in range(20_000):
        if not scheduler.has_unfinished:
            break
        step = scheduler.schedule()
        assert step is not None
        accepted = None
        if step.num_draft_tokens is not None:
            accepted = np.minimum(step.num_draft_tokens, accept[n % len(accept)])
        produced += int(scheduler.complete(step, num_accepted_tokens=accepted).produced.sum())
    assert scheduler.stats.num_finished + rejected == len(requests)
    assert produced == expected
    assert scheduler.allocator.pool.usage == 0
    assert log.replay().snapshot() == scheduler.allocator.state.snapshot()


def test_without_chunked_prefill_a_preempted_request_that_outgrew_a_step_comes_back_all_the_same() -> None:
    """Two requests of 60 + 68 tokens, steps of 64, a pool for one and a half of them."""
    scheduler = make(12, enable_chunked_prefill=False)
    for name in ("a", "b"):
        scheduler.submit(Request(name, 60, 68))
    finished = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        assert step.batch.num_tokens <= 64
        finished += [request.request_id for request in scheduler.complete(step).finished_requests]
    assert finished == ["a", "b"]
    assert scheduler.stats.num_preemptions == 1
    assert scheduler.stats.recomputed_tokens > 64
