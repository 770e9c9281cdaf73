"""Field reports D01 to D04: what can never fit, progress under preemption, the victim, and what counts as a hit."""

import pytest
from kvledger.core import AllocatorConfig, DoesNotFitError, FullAttention, KVCacheAllocator, Request
from kvledger.core.scheduler import Scheduler
from kvledger.core.scheduler_config import SchedulerConfig
from kvledger.sim.trace_keys import TraceKeySource


def make_scheduler(num_blocks: int, *, block_size: int = 16, caching: bool = True, **limits: object) -> Scheduler:
    allocator = KVCacheAllocator(
        AllocatorConfig(
            num_blocks=num_blocks,
            groups=[FullAttention(block_size)],
            max_model_len=1 << 16,
            max_num_reqs=64,
            enable_caching=caching,
        )
    )
    return Scheduler(SchedulerConfig(**{"max_num_seqs": 64, **limits}), allocator)


def request(name: str, prompt: int, output: int, *, ordinal: int | None = None, **more: object) -> Request:
    keys = None if ordinal is None else TraceKeySource(None, prompt, ordinal, 16, None)
    return Request(name, prompt, output, keys, **more)


def run_to_the_end(scheduler: Scheduler, max_steps: int = 10_000) -> int:
    """Steps until nothing is left; every step computes something, or the scheduler is stuck."""
    steps = 0
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None and step.batch.num_tokens > 0
        scheduler.complete(step)
        steps += 1
        assert steps < max_steps
    return steps


def test_d01_a_request_larger_than_the_pool_is_refused_at_submit_with_the_numbers() -> None:
    scheduler = make_scheduler(50)
    with pytest.raises(DoesNotFitError, match=r"1,002 tokens needs 63 blocks.*49 usable.*784 tokens"):
        scheduler.submit(request("big", 1002, 1))
    for i in range(10):
        scheduler.submit(request(f"small-{i}", 6, 4))
    assert run_to_the_end(scheduler) < 20
    assert scheduler.stats.num_rejected == 1
    assert scheduler.stats.num_finished == 10
    assert scheduler.allocator.pool.usage == 0


def test_d01_prompt_and_max_tokens_together_count() -> None:
    scheduler = make_scheduler(50)
    with pytest.raises(DoesNotFitError, match="needs 66 blocks"):
        scheduler.submit(request("grows too long", 1002 - 16 + 16, 50))
    scheduler.submit(request("just fits", 700, 85))  # 784 tokens are computed: 49 blocks
    run_to_the_end(scheduler)
    with pytest.raises(DoesNotFitError, match="needs 50 blocks"):
        scheduler.submit(request("one more", 700, 86))


def test_d01_inference_sim_373_needs_57_of_50() -> None:
    scheduler = make_scheduler(51)
    with pytest.raises(DoesNotFitError, match=r"needs 57 blocks.*50 usable"):
        scheduler.submit(request("r", 57 * 16, 1))


def test_d02_two_requests_that_fit_only_alone_both_complete() -> None:
    scheduler = make_scheduler(8)
    tokens_at_preemption: dict[str, list[int]] = {"a": [], "b": []}
    for name in ("a", "b"):
        scheduler.submit(request(name, 40, 60))
    while scheduler.has_unfinished:
        before = {name: scheduler.num_preemptions_of(name) for name in tokens_at_preemption}
        step = scheduler.schedule()
        assert step is not None
        for waiting in scheduler.waiting:
            if scheduler.num_preemptions_of(waiting.request_id) > before[waiting.request_id]:
                tokens_at_preemption[waiting.request_id].append(waiting.num_output_tokens)
        scheduler.complete(step)
    assert scheduler.stats.num_finished == 2
    assert 1 <= scheduler.stats.num_preemptions <= 4
    for produced in tokens_at_preemption.values():
        assert produced == sorted(set(produced)), "preempted twice without a token in between"


@pytest.mark.parametrize("budget", [64, 70, 8192])
@pytest.mark.parametrize("num_blocks", [8, 9, 12, 15])
def test_d02_no_request_is_preempted_twice_without_progress(num_blocks: int, budget: int) -> None:
    scheduler = make_scheduler(num_blocks, max_num_batched_tokens=budget)
    last_produced: dict[str, int] = {}
    for i in range(6):
        scheduler.submit(request(f"r{i}", 20 + 7 * i, 40, ordinal=i))
    for _ in range(5000):
        if not scheduler.has_unfinished:
            break
        counts = {r.request_id: scheduler.num_preemptions_of(r.request_id) for r in scheduler.waiting}
        step = scheduler.schedule()
        assert step is not None
        for waiting in scheduler.waiting:
            name = waiting.request_id
            if scheduler.num_preemptions_of(name) > counts.get(name, scheduler.num_preemptions_of(name) - 1):
                assert waiting.num_output_tokens > last_produced.get(name, -1)
                last_produced[name] = waiting.num_output_tokens
        scheduler.complete(step)
    assert scheduler.stats.num_finished == 6
    assert scheduler.stats.num_preemptions > 0


def admit_two(victim: str) -> Scheduler:
    """R1 with 100 tokens and R2 with 6,000, both running, and not one block left."""
    scheduler = make_scheduler(8 + 376 + 1, preemption_victim=victim, caching=False)
    scheduler.submit(request("R1", 16 * 8 - 28, 40))
    scheduler.submit(request("R2", 6000, 40))
    while not (step := scheduler.schedule()) or scheduler.allocator.num_free_blocks > 1:
        scheduler.complete(step)
    scheduler.complete(step)
    return scheduler


@pytest.mark.parametrize(("victim", "expected"), [("last-admitted", "R2"), ("least-computed", "R1")])
def test_d03_the_victim_is_the_last_admitted_or_the_one_that_loses_least(victim: str, expected: str) -> None:
    scheduler = admit_two(victim)
    while not scheduler.stats.num_preemptions:
        step = scheduler.schedule()
        assert step is not None
        if not scheduler.stats.num_preemptions:
            scheduler.complete(step)
    assert scheduler.num_preemptions_of(expected) == 1
    assert scheduler.waiting.head().request_id == expected


def test_d03_a_victim_comes_back_ahead_of_a_request_that_never_started() -> None:
    scheduler = admit_two("last-admitted")
    scheduler.submit(request("never started", 5000, 1, arrival=-1.0))
    while not scheduler.stats.num_preemptions:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    assert [waiting.request_id for waiting in scheduler.waiting] == ["R2", "never started"]
    run_to_the_end(scheduler)
    assert scheduler.stats.recomputed_tokens > 6000
    assert scheduler.stats.recomputed_tokens < scheduler.stats.computed_tokens


def test_d04_a_preempted_request_that_finds_its_own_blocks_is_no_prefix_hit() -> None:
    scheduler = make_scheduler(20)
    for i in range(4):
        scheduler.submit(request(f"r{i}", 60, 60, ordinal=i))
    run_to_the_end(scheduler)
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.prefix_hits_tokens == 0
    assert scheduler.stats.readmission_hits_tokens > 0
    assert scheduler.stats.prefix_queries_tokens == 4 * 60
