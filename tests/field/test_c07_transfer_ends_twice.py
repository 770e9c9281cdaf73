"""C07: the end of a copy that is told twice, or for another copy, is refused by name."""

import pytest
from kvledger.core import MisuseError


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
