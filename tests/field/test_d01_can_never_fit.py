"""D01: a request that can never fit is refused at submit, with the numbers, and blocks nobody (blocks of 16)."""

import pytest
from kvledger.core import DoesNotFitError


def test_d01_a_request_larger_than_the_pool_is_refused_at_submit_with_the_numbers(scheduler_of) -> None:
    scheduler = scheduler_of(50)
    with pytest.raises(DoesNotFitError, match=r"1,002 tokens needs 63 blocks.*49 usable.*784 tokens"):
        scheduler.submit_new("big", 1002, 1)
    for i in range(10):
        scheduler.submit_new(f"small-{i}", 6, 4)
    assert scheduler.run_to_the_end() < 20
    assert scheduler.stats.num_rejected == 1
    assert scheduler.stats.num_finished == 10
    assert scheduler.allocator.pool.usage == 0


def test_d01_prompt_and_max_tokens_together_count(scheduler_of) -> None:
    scheduler = scheduler_of(50)
    with pytest.raises(DoesNotFitError, match="needs 66 blocks"):
        scheduler.submit_new("grows too long", 1002 - 16 + 16, 50)
    scheduler.submit_new("just fits", 700, 85)  # 784 tokens are computed: 49 blocks
    scheduler.run_to_the_end()
    with pytest.raises(DoesNotFitError, match="needs 50 blocks"):
        scheduler.submit_new("one more", 700, 86)


def test_d01_inference_sim_373_needs_57_of_50(scheduler_of) -> None:
    with pytest.raises(DoesNotFitError, match=r"needs 57 blocks.*50 usable"):
        scheduler_of(51).submit_new("r", 57 * 16, 1)


def test_d01_a_simulation_with_it_at_the_head_ends_and_counts_one_rejection(simulated) -> None:
    report = simulated((0.0, 1002, 1), *[(0.0, 6, 4)] * 10, num_blocks=50)
    assert report["requests"] == {"total": 11, "finished": 10, "rejected": 1, "aborted": 0}
    assert "needs 63 blocks" in report["rejections"][0]
