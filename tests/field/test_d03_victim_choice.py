"""D03: who gives way, where a victim queues up again, and what it costs (blocks of 16)."""

import pytest


def admit_two(scheduler_of, victim: str):
    """R1 with 100 tokens and R2 with 6,000, both running, and not one block left."""
    scheduler = scheduler_of(8 + 376 + 1, preemption_victim=victim, caching=False)
    scheduler.submit_new("R1", 16 * 8 - 28, 40)
    scheduler.submit_new("R2", 6000, 40)
    while not (step := scheduler.schedule()) or scheduler.allocator.num_free_blocks > 1:
        scheduler.complete(step)
    scheduler.complete(step)
    return scheduler


@pytest.mark.parametrize(("victim", "expected"), [("last-admitted", "R2"), ("least-computed", "R1")])
def test_d03_the_victim_is_the_last_admitted_or_the_one_that_loses_least(scheduler_of, victim, expected) -> None:
    scheduler = admit_two(scheduler_of, victim)
    while not scheduler.stats.num_preemptions:
        step = scheduler.schedule()
        assert step is not None
        if not scheduler.stats.num_preemptions:
            scheduler.complete(step)
    assert scheduler.num_preemptions_of(expected) == 1
    assert scheduler.waiting.head().request_id == expected


def test_d03_a_victim_comes_back_ahead_of_a_request_that_never_started(scheduler_of) -> None:
    scheduler = admit_two(scheduler_of, "last-admitted")
    scheduler.submit_new("never started", 5000, 1, arrival=-1.0)
    while not scheduler.stats.num_preemptions:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    assert [waiting.request_id for waiting in scheduler.waiting] == ["R2", "never started"]
    scheduler.run_to_the_end()
    assert scheduler.stats.recomputed_tokens > 6000
    assert scheduler.stats.recomputed_tokens < scheduler.stats.computed_tokens


def test_d03_the_recompute_tax_is_recomputed_over_all_computed_tokens(scheduler_of, simulated) -> None:
    scheduler = scheduler_of(8, max_num_batched_tokens=256, max_num_seqs=16)
    for ordinal in range(2):
        scheduler.submit_new(str(ordinal), 40, 60, ordinal=ordinal)
    scheduler.run_to_the_end()
    stats = scheduler.stats
    assert stats.recomputed_tokens == stats.computed_tokens - 2 * (40 + 60 - 1) > 0
    report = simulated((0.0, 40, 60), (0.0, 40, 60), num_blocks=8)
    assert report["preemptions"]["recompute_tax"] == stats.recomputed_tokens / stats.computed_tokens
