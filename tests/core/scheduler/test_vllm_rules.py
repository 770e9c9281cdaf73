"""What vLLM's scheduler does where blocks, tokens or drafts run short, and what our options change about it."""

import numpy as np
import pytest
from kvledger.core.allocator.allocator import KVCacheAllocator
from kvledger.core.allocator.config import AllocatorConfig
from kvledger.core.cache_kinds import FullAttention
from kvledger.core.errors import InputError, MisuseError
from kvledger.core.scheduler.config import SchedulerConfig
from kvledger.core.scheduler.scheduler import Scheduler
from kvledger.core.types import Request

SIZE = 4


class NumberedKeys:
    """Keys that no other request has."""

    def __init__(self, name: str) -> None:
        self.name = name

    def keys(self, start: int, stop: int) -> list[tuple[str, int]]:
        return [(self.name, index) for index in range(start, stop)]


def scheduler_of(num_blocks: int, **limits) -> Scheduler:
    allocator = AllocatorConfig(num_blocks=num_blocks, groups=[FullAttention(SIZE)], max_model_len=400, max_num_reqs=8)
    return Scheduler(SchedulerConfig(**{"max_num_seqs": 8, **limits}), KVCacheAllocator(allocator))


def counts_of(scheduler: Scheduler) -> dict[str, int]:
    step = scheduler.schedule()
    assert step is not None
    names = [scheduler.request_in(row).request_id for row in step.batch.rows.tolist()]
    counts = dict(zip(names, step.batch.counts.tolist(), strict=True))
    scheduler.complete(step)
    return counts


@pytest.mark.parametrize("drops", [False, True])
def test_keys_of_a_request_that_is_preempted_in_its_step_are_dropped_on_request(drops: bool) -> None:
    """The patient request is served first, and gives way to the urgent one behind it in the same step."""
    limits = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 8, "drop_unwritten_keys": drops}
    scheduler = scheduler_of(1 + 10, policy="priority", **limits)
    scheduler.submit(Request("patient", 40, 1, NumberedKeys("patient"), priority=1))
    assert counts_of(scheduler) == {"patient": 16}
    scheduler.submit(Request("urgent", 8, 8, NumberedKeys("urgent"), priority=0, arrival=1.0))
    assert counts_of(scheduler) == {"patient": 8, "urgent": 8}
    assert counts_of(scheduler) == {"urgent": 1}
    assert scheduler.stats.num_preemptions == 1
    # Block 7 is the one that the urgent request took. Block 6 was to be written by the step that preempted.
    found = [scheduler.allocator.pool.find(("patient", index)) is not None for index in range(8)]
    assert found == [True] * 6 + [not drops, False]


def test_a_budget_below_all_drafts_is_accepted_and_divided_in_order() -> None:
    scheduler = scheduler_of(200, max_num_seqs=4, max_num_batched_tokens=4, num_speculative_tokens=3)
    for name in "ab":
        scheduler.submit(Request(name, 2, 20))
    assert counts_of(scheduler) == {"a": 2, "b": 2}
    assert counts_of(scheduler) == {"a": 4}
    with pytest.raises(InputError, match="max_num_batched_tokens 3 is below max_num_seqs 4"):
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=3)


def test_a_request_has_no_drafts_before_its_first_output() -> None:
    scheduler = scheduler_of(200, max_num_batched_tokens=8, num_speculative_tokens=3)
    scheduler.submit(Request("a", 9, 20))
    assert counts_of(scheduler) == {"a": 8}
    assert counts_of(scheduler) == {"a": 1}
    assert counts_of(scheduler) == {"a": 4}


def test_a_request_that_lacks_one_token_enters_with_as_many_as_those_that_decode() -> None:
    scheduler = scheduler_of(200, num_speculative_tokens=3)
    keys = NumberedKeys("shared")
    scheduler.submit(Request("a", 9, 20, keys))
    assert counts_of(scheduler) == {"a": 9}
    scheduler.submit(Request("b", 9, 20, keys))
    step = scheduler.schedule()
    assert step.batch.counts.tolist() == [4, 4]
    assert step.num_draft_tokens.tolist() == [3, 3]
    assert step.num_proposed_tokens.tolist() == [3, 0]
    outcome = scheduler.complete(step, num_accepted_tokens=np.array([3, 0]))
    assert outcome.produced.tolist() == [4, 1]


def test_a_long_prompt_that_is_alone_takes_the_whole_budget() -> None:
    scheduler = scheduler_of(200, max_num_batched_tokens=64, long_prefill_token_threshold=10)
    scheduler.submit(Request("a", 100, 2))
    assert counts_of(scheduler) == {"a": 64}
    scheduler.submit(Request("b", 100, 2))
    assert counts_of(scheduler) == {"a": 10, "b": 10}


def test_a_request_that_comes_back_is_protected_on_request() -> None:
    preemptions = []
    for protect in (False, True):
        scheduler = scheduler_of(1 + 12, max_num_batched_tokens=16, protect_preempted=protect)
        for name in "abc":
            scheduler.submit(Request(name, 13, 24))
        while scheduler.has_unfinished:
            scheduler.complete(scheduler.schedule())
        preemptions.append(scheduler.stats.num_preemptions)
        assert scheduler.stats.num_finished == 3
    assert preemptions[0] >= preemptions[1] > 0


def test_two_steps_can_be_in_flight_and_not_three() -> None:
    scheduler = scheduler_of(50)
    scheduler.submit(Request("a", 9, 20))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.batch.first_positions.tolist() == [9]
    with pytest.raises(MisuseError, match="two of them are in flight"):
        scheduler.schedule()
    assert scheduler.complete(first).produced.tolist() == [1]
    assert scheduler.complete(second).produced.tolist() == [1]


def test_a_step_in_flight_ends_before_those_behind_a_request_that_preempted_itself_are_served() -> None:
    """The next decision would forget who was preempted, and the step in flight still has a token for that request."""
    scheduler = scheduler_of(1 + 4)
    scheduler.submit(Request("ends", 6, 2))
    scheduler.submit(Request("grows", 7, 6))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.complete(first)
    assert scheduler.schedule() is None
    assert scheduler.stats.num_preemptions == 1
    outcome = scheduler.complete(second)
    assert [request.request_id for request in outcome.finished_requests] == ["ends"]
    assert counts_of(scheduler) == {"grows": 9}
