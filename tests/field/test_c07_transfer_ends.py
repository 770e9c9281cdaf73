"""C07 to C09: a copy whose end is told twice or never, and an abort while a copy is under way."""

import pytest
from kvledger.core import MisuseError, Scheduler
from kvledger.core.scheduler.config import SchedulerConfig


class OtherEngine:
    """Holds every prompt but its last token."""

    def num_tokens_after(self, request, num_hit_tokens: int) -> int:
        return request.num_prompt_tokens - 1 - num_hit_tokens

    def admitted(self, request, num_tokens: int) -> None:
        pass


@pytest.fixture
def copying(ledger_of):
    """A ledger of 8 blocks of 4 tokens, and a scheduler with one request whose content is being copied in."""
    ledger = ledger_of(8, block_size=4)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = Scheduler(limits, ledger.allocator, remote=OtherEngine())
    request = ledger.request("d", range(17))
    request.max_tokens = 4
    scheduler.submit(request)
    assert scheduler.schedule() is None
    return ledger, scheduler


def test_c07_an_end_that_is_told_twice_is_refused_by_name(copying) -> None:
    ledger, scheduler = copying
    scheduler.abort("d")
    scheduler.received("d")
    before = ledger.snapshot()
    for name in ("d", "never there"):
        for tell in (scheduler.received, scheduler.sent, scheduler.end_lease):
            with pytest.raises(MisuseError, match=f"no copy of request '{name}' is under way"):
                tell(name)
    assert ledger.snapshot() == before


def test_c07_an_end_is_refused_for_the_other_direction(copying) -> None:
    _, scheduler = copying
    with pytest.raises(MisuseError, match="could have been sent"):
        scheduler.sent("d")
    scheduler.received("d")


def test_c08_a_copy_whose_end_never_comes_is_listed_and_ended_by_name(copying) -> None:
    ledger, scheduler = copying
    scheduler.abort("d")
    for _ in range(5):
        assert scheduler.schedule() is None
    assert ledger.pool.num_held_blocks == 4
    assert scheduler.has_unfinished
    (lease,) = scheduler.leases()
    assert (lease.request_id, lease.state, lease.since_step) == ("d", "aborted", 1)
    assert lease.blocks == (tuple(ledger.table("d")),)
    scheduler.end_lease("d")
    assert (ledger.pool.num_held_blocks, scheduler.has_unfinished, scheduler.leases()) == (0, False, ())


def test_c08_leases_end_after_a_number_of_steps(copying) -> None:
    ledger, scheduler = copying
    scheduler.abort("d")
    assert scheduler.end_leases(older_than_steps=3) == ()
    for _ in range(3):
        scheduler.schedule()
    assert scheduler.end_leases(older_than_steps=3) == ("d",)
    assert ledger.pool.num_held_blocks == 0


def test_c08_a_request_that_still_waits_keeps_its_lease(copying) -> None:
    _, scheduler = copying
    for _ in range(9):
        scheduler.schedule()
    assert scheduler.end_leases(older_than_steps=0) == ()
    with pytest.raises(MisuseError, match="'d' waits for its copy: abort it first"):
        scheduler.end_lease("d")
    assert [lease.state for lease in scheduler.leases()] == ["receiving"]


def test_c09_blocks_stay_held_after_an_abort_and_hold_nothing_that_can_be_found(copying) -> None:
    ledger, scheduler = copying
    assert scheduler.abort("d")
    assert ledger.pool.num_held_blocks == 4
    assert ledger.allocator.match_prefix(ledger.request("x", range(17))).num_hit_tokens == 0
    scheduler.received("d")
    assert ledger.pool.num_held_blocks == 0
    assert ledger.allocator.match_prefix(ledger.request("y", range(17))).num_hit_tokens == 0
