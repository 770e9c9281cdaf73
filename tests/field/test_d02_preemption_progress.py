"""D02: preemptions are few, and each is followed by progress of its victim (blocks of 16)."""

import pytest


def test_d02_two_requests_that_fit_only_alone_both_complete(scheduler_of) -> None:
    scheduler = scheduler_of(8)
    tokens_at_preemption: dict[str, list[int]] = {"a": [], "b": []}
    for name in ("a", "b"):
        scheduler.submit_new(name, 40, 60)
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
def test_d02_no_request_is_preempted_twice_without_progress(scheduler_of, num_blocks: int, budget: int) -> None:
    scheduler = scheduler_of(num_blocks, max_num_batched_tokens=budget)
    last_produced: dict[str, int] = {}
    for i in range(6):
        scheduler.submit_new(f"r{i}", 20 + 7 * i, 40, ordinal=i)
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


def test_d02_a_victim_whose_blocks_others_hold_too_is_not_followed_by_a_second_one(scheduler_of) -> None:
    """Three requests of 64 shared tokens and one token each of their own; one of them needs a block, none is free."""
    scheduler = scheduler_of(1 + 4 + 3)
    for name in ("a", "b", "c"):
        scheduler.submit_new(name, 65, 40, ordinal=0)
        scheduler.complete(scheduler.schedule())
    before = scheduler.stats.num_preemptions
    while scheduler.stats.num_preemptions == before:
        step = scheduler.schedule()
        assert step is not None
        scheduler.complete(step)
    assert scheduler.stats.num_preemptions == before + 1
    scheduler.run_to_the_end()
    assert scheduler.stats.num_finished == 3


def test_d02_the_report_tells_the_most_preemptions_of_one_request(simulated) -> None:
    preemptions = simulated((0.0, 40, 60), (0.0, 40, 60), num_blocks=8)["preemptions"]
    assert 1 <= preemptions["max_per_request"] <= preemptions["total"] <= 4
