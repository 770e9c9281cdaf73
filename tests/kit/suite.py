"""What `pytest --kvledger-allocator MODULE:FACTORY` runs."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

import pytest
from kvledger.testing import FactoryError, KitFailure, explore, load_history, play
from kvledger.testing.plugin import NOTE
from kvledger.testing.protocol import ManagerFactory, supports_of

Note: TypeAlias = Callable[[str, object], None]
Result = TypeVar("Result")


def _report(run: Callable[[], Result]) -> Result:
    """Run, and show a failure as its program, table and sentence, without the kit's own frames."""
    try:
        return run()
    except KitFailure as failure:
        what = f"{failure.violation.name} is broken by {len(failure.history.commands)} commands\n{failure.report()}"
    except FactoryError as error:
        what = str(error)
    return pytest.fail(what, pytrace=False)


def test_saved_histories_break_no_promise(
    kvledger_make: ManagerFactory, kvledger_regressions: Path, record_property: Note
) -> None:
    """Every history that failed once is played again; delete a file whose history is no longer of interest."""
    for path in sorted(kvledger_regressions.glob("*.json")):
        history = load_history(path)
        if supports_of(kvledger_make).allows(history.scenario):
            _report(lambda history=history: play(kvledger_make, history, finish=False))
            record_property(NOTE, f"played {path}")
        else:
            record_property(NOTE, f"not played: {path}, whose scenario the factory does not support")


def test_random_histories_break_no_promise(
    kvledger_make: ManagerFactory,
    kvledger_rival: ManagerFactory | None,
    kvledger_histories: int,
    kvledger_shorten_s: float,
    kvledger_regressions: Path,
    record_property: Note,
) -> None:
    """Seeded histories, the same ones on every machine."""
    played = _report(
        lambda: explore(
            kvledger_make,
            kvledger_histories,
            rival=kvledger_rival,
            shorten_s=kvledger_shorten_s,
            save_to=kvledger_regressions,
        )
    )
    record_property(NOTE, f"played {played.histories:,} random histories, {played.commands:,} commands")


def test_drawn_histories_break_no_promise(
    kvledger_make: ManagerFactory,
    kvledger_rival: ManagerFactory | None,
    kvledger_histories: int,
    kvledger_shorten_s: float,
    kvledger_regressions: Path,
    record_property: Note,
) -> None:
    """Histories that Hypothesis draws; skipped where it is not installed."""
    pytest.importorskip("hypothesis")
    from kvledger.testing import run_machine

    played = _report(
        lambda: run_machine(
            kvledger_make,
            rival=kvledger_rival,
            max_examples=max(kvledger_histories // 5, 1),
            shorten_s=kvledger_shorten_s,
            save_to=kvledger_regressions,
        )
    )
    record_property(NOTE, f"played {played.histories:,} drawn histories, {played.commands:,} commands")
