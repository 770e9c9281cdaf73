"""B13: a state exists only where a step ended, and chunks end where a state is to be kept."""

import pytest
from kvledger.core import FullAttention, Scheduler, SequenceState
from kvledger.core.scheduler.config import SchedulerConfig

from tests.field.test_b12_eagle_and_retention import tokens


@pytest.mark.parametrize(
    "retention, steps, hits",
    [
        (0, (64,), (0, 0, 0)),
        (None, (64,), (64, 0, 0)),
        (0, (60, 4), (60, 0, 0)),
        (None, (60, 4), (64, 0, 0)),
    ],
)
def test_b13_nothing_hits_a_state_that_was_never_written(ledger_of, retention, steps, hits) -> None:
    ledger = ledger_of(90, groups=[FullAttention(4), SequenceState(4)], retention_interval=retention)
    prompt = tokens(64)
    first = ledger.request("first", prompt)
    for count in steps:
        assert ledger.allocator.allocate(first, count) is not None
    # One block a step holds a state; the null block stands for the boundaries that the step ran past.
    assert [block > 0 for block in ledger.allocator.block_ids("first")[1]].count(True) == len(steps)
    ledger.allocator.free("first")
    shared = [ledger.request(f"{n}", [*prompt[:n], 1, 2]) for n in (64, 52, 30)]
    assert tuple(ledger.allocator.match_prefix(request).num_hit_tokens for request in shared) == hits


def test_b13_a_state_that_a_chunk_overwrote_is_not_registered(ledger_of) -> None:
    """A chunk that begins inside a block and ends behind it leaves nothing at the block's end."""
    ledger = ledger_of(90, groups=[FullAttention(4), SequenceState(4)], retention_interval=None)
    prompt = tokens(64)
    first = ledger.request("first", prompt)
    for count in (3, 9):
        ledger.allocator.allocate(first, count)
    ledger.allocator.free("first")
    assert ledger.allocator.match_prefix(ledger.request("4", [*prompt[:4], 1])).num_hit_tokens == 0
    assert ledger.allocator.match_prefix(ledger.request("12", [*prompt[:12], 1])).num_hit_tokens == 12


def chunks(ledger, num_tokens: int, budget: int = 8192) -> list[int]:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget), ledger.allocator)
    request = ledger.request("one", tokens(num_tokens))
    request.max_tokens = 1
    scheduler.submit(request)
    counts = []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        assert step is not None
        counts += step.batch.counts.tolist()
        scheduler.complete(step)
    return counts


def test_b13_chunks_end_at_states(ledger_of) -> None:
    def hybrid(size: int, **more):
        return ledger_of(400, groups=[FullAttention(size), SequenceState(size)], retention_interval=0, **more)

    assert chunks(hybrid(528), 1000) == [528, 472]
    assert chunks(hybrid(2144), 20_000) == [6432, 6432, 6432, 704]
    assert chunks(hybrid(2144, use_eagle=True), 20_000) == [6432, 6432, 4288, 2848]
    # A block that no chunk can fill is filled by several; the next ones end at its boundary again.
    assert chunks(hybrid(2144), 5000, budget=1500) == [1500, 644, 1500, 644, 712]
    assert chunks(ledger_of(400), 1000) == [1000]


def test_b13_a_state_of_this_step_is_not_copied_before_the_step_has_run(ledger_of) -> None:
    ledger = ledger_of(400, groups=[FullAttention(16), SequenceState(16)], retention_interval=0)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8192), ledger.allocator)
    prompt = tokens(40)
    for name in ("a", "b"):
        request = ledger.request(name, prompt)
        request.max_tokens = 3
        scheduler.submit(request)
    counts = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        counts.append((step.batch.first_positions.tolist(), step.batch.counts.tolist()))
        scheduler.complete(step)
    # In the second step "a" continues from the state, and vLLM lets nobody else do so yet.
    assert counts == [([0], [32]), ([32], [8]), ([40, 32], [1, 8])]
