"""D02: preemptions are few, and each is followed by progress of its victim (blocks of 16)."""

import pytest


def test_d02_two_requests_that_fit_only_alone_both_complete(scheduler_of) -> None:
    scheduler = scheduler_of(8, protect_preempted=True)
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
    scheduler = scheduler_of(num_blocks, max_num_batched_tokens=budget, protect_preempted=True)
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


def test_d02_a_request_that_comes_back_in_chunks_is_left_alone_until_its_next_token(scheduler_of) -> None:
    scheduler = scheduler_of(24, max_num_batched_tokens=24, max_num_seqs=24, protect_preempted=True)
    for ordinal, (prompt, output) in enumerate([(1, 55), (125, 80), (177, 19)]):
        scheduler.submit_new(str(ordinal), prompt, output, ordinal=ordinal)
    produced_before: dict[str, int] = {}
    while scheduler.has_unfinished:
        before = {name: scheduler.num_preemptions_of(name) for name in "012"}
        step = scheduler.schedule()
        for waiting in scheduler.waiting:
            name = waiting.request_id
            if scheduler.num_preemptions_of(name) > before[name]:
                assert waiting.num_output_tokens > produced_before.get(name, -1)
                produced_before[name] = waiting.num_output_tokens
        scheduler.complete(step)
    assert scheduler.stats.num_preemptions > 0


def test_d02_a_preemption_that_frees_nothing_is_not_followed_by_another(scheduler_of) -> None:
    """All of the victim's 64 tokens are shared, so the one that needs a block waits, and nobody else suffers."""
    scheduler = scheduler_of(1 + 5 + 4 + 1, preemption_victim="least-computed")
    scheduler.submit_new("needs a 6th block", 80, 10, ordinal=0)
    scheduler.submit_new("victim", 64, 10, ordinal=1)
    scheduler.submit_new("shares its 4 blocks", 70, 10, ordinal=1)
    scheduler.complete(scheduler.schedule())
    assert (scheduler.num_running, scheduler.allocator.num_free_blocks) == (3, 0)
    step = scheduler.schedule()
    assert [waiting.request_id for waiting in scheduler.waiting] == ["victim"]
    assert step.batch.num_tokens == 1
    scheduler.complete(step)
    scheduler.run_to_the_end()
    assert scheduler.stats.num_finished == 3


def test_d02_the_report_tells_the_most_preemptions_of_one_request(simulated) -> None:
    preemptions = simulated((0.0, 40, 60), (0.0, 40, 60), num_blocks=8)["preemptions"]
    assert 1 <= preemptions["max_per_request"] <= preemptions["total"] <= 4
