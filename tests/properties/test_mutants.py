"""The kit finds every seeded fault of the allocator within its budget of histories."""

from pathlib import Path

import pytest
from kvledger.testing import KitFailure, LedgerAdapter, Scenario, explore, ledger_supports, supporting

from tests.properties import list_manager
from tests.properties.mutant import Mutant
from tests.properties.mutants import MUTANTS

# The same histories on every machine. Nearly every fault is found within 100 of them.
BUDGET_HISTORIES = 1_000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "_"))
def test_the_kit_finds_that(mutant: Mutant, tmp_path: Path) -> None:
    core = mutant.core_in(tmp_path)

    @supporting(ledger_supports())
    def make(scenario: Scenario) -> LedgerAdapter:
        return LedgerAdapter(scenario, core)

    with pytest.raises(KitFailure) as found:
        explore(make, BUDGET_HISTORIES, rival=list_manager.make, shorten_s=0)
    assert found.value.history.commands


def test_there_are_at_least_25_faults_each_in_a_place_of_its_own() -> None:
    assert len({(mutant.file, mutant.line, mutant.wrong) for mutant in MUTANTS}) == len(MUTANTS) >= 25


def test_the_allocator_without_a_fault_passes_what_finds_them(kit_histories) -> None:
    from kvledger.testing import make_ledger

    explore(make_ledger, kit_histories(100), rival=list_manager.make)
