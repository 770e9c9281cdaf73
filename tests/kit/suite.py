"""What `pytest --kvledger-allocator MODULE:FACTORY` runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from kvledger.testing import KitFailure, explore, load_history, play
from kvledger.testing.protocol import ManagerFactory


def _report(run: Callable[[], object]) -> None:
    """Run, and show a failure as its program, table and sentence, without the kit's own frames."""
    found: KitFailure | None = None
    try:
        run()
    except KitFailure as failure:
        found = failure
    if found is not None:
        pytest.fail(found.report(), pytrace=False)


def test_saved_histories_break_no_promise(kvledger_make: ManagerFactory, kvledger_regressions: Path) -> None:
    """Every history that failed once is played again; delete a file whose history is no longer of interest."""
    for path in sorted(kvledger_regressions.glob("*.json")):
        _report(lambda path=path: play(kvledger_make, load_history(path), finish=False))


def test_random_histories_break_no_promise(
    kvledger_make: ManagerFactory,
    kvledger_rival: ManagerFactory | None,
    kvledger_histories: int,
    kvledger_shorten_s: float,
    kvledger_regressions: Path,
) -> None:
    """Seeded histories, the same ones on every machine."""
    _report(
        lambda: explore(
            kvledger_make,
            kvledger_histories,
            rival=kvledger_rival,
            shorten_s=kvledger_shorten_s,
            save_to=kvledger_regressions,
        )
    )


def test_drawn_histories_break_no_promise(
    kvledger_make: ManagerFactory,
    kvledger_rival: ManagerFactory | None,
    kvledger_histories: int,
    kvledger_shorten_s: float,
    kvledger_regressions: Path,
) -> None:
    """Histories that Hypothesis draws; skipped where it is not installed."""
    pytest.importorskip("hypothesis")
    from kvledger.testing import run_machine

    _report(
        lambda: run_machine(
            kvledger_make,
            rival=kvledger_rival,
            max_examples=max(kvledger_histories // 5, 1),
            shorten_s=kvledger_shorten_s,
            save_to=kvledger_regressions,
        )
    )
