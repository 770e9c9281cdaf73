"""C08: a copy whose end never comes holds its blocks until the caller ends its lease, and is listed meanwhile."""

import pytest
from kvledger.core import MisuseError


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
