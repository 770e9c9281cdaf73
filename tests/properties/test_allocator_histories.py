"""Any history of commands, on any group set: the promises hold and the log rebuilds the state after every commit."""

from collections.abc import Callable, Hashable

import pytest
from kvledger.core.pool.eviction_order import eviction_order_names
from kvledger.core.pool.policies.belady import BeladyOrder
from kvledger.testing import (
    Allocate,
    GroupShape,
    LedgerAdapter,
    Match,
    New,
    ReleaseOutOfWindow,
    Scenario,
    Trial,
    explore,
    ledger_supports,
    make_ledger,
    run_machine,
    supporting,
)
from kvledger.testing.ledger_adapter import EVERY_OPTION

from tests.properties import list_manager

Scale = Callable[[int], int]
LEAST_COMMANDS = 500


def next_use(key: Hashable) -> float:
    """A future that depends on the key alone, so that a replay asks the same one."""
    assert isinstance(key, tuple)
    return float((len(key) * 7919 + sum(key) * 104_729) % 97)


# Its order is the future's, whatever the scenario says.
@supporting(ledger_supports(options=[option for option in EVERY_OPTION if option != "tail_first"]))
def make_belady(scenario: Scenario) -> LedgerAdapter:
    return LedgerAdapter(scenario, eviction=lambda num_blocks: BeladyOrder(num_blocks, next_use))


def make_with(eviction: str):
    if eviction == BeladyOrder.name:
        return make_belady

    @supporting(ledger_supports(evictions=(eviction,)))
    def make(scenario: Scenario) -> LedgerAdapter:
        return LedgerAdapter(scenario)

    return make


ORDERS = (*eviction_order_names(), BeladyOrder.name)


@pytest.mark.parametrize("eviction", ORDERS)
def test_drawn_histories_hold_every_promise(eviction: str, kit_histories: Scale) -> None:
    played = run_machine(make_with(eviction), max_examples=kit_histories(60), steps=40)
    assert played.commands >= LEAST_COMMANDS


@pytest.mark.parametrize("eviction", ORDERS)
def test_random_histories_hold_every_promise(eviction: str, kit_histories: Scale) -> None:
    played = explore(make_with(eviction), kit_histories(40), seed=ORDERS.index(eviction) * 1_000)
    assert played.commands >= LEAST_COMMANDS


def test_the_default_order_decides_like_a_manager_in_lists(kit_histories: Scale) -> None:
    """One group of full attention, block id for block id: hits, tables, free queue and findable blocks."""

    @supporting(ledger_supports(kinds=("full",), max_groups=1))
    def make(scenario: Scenario) -> LedgerAdapter:
        return LedgerAdapter(scenario)

    played = explore(make, kit_histories(100), seed=50_000, rival=list_manager.make)
    assert played.commands >= LEAST_COMMANDS


def test_the_rival_takes_part_in_drawn_histories_too(kit_histories: Scale) -> None:
    run_machine(make_ledger, rival=list_manager.make, max_examples=kit_histories(40), steps=40)


def test_of_a_window_of_one_token_nothing_is_kept() -> None:
    """No later token attends to anything before it, so vLLM 0.32 registers no block and finds none."""
    trial = Trial(make_ledger, Scenario(num_blocks=5, groups=(GroupShape("sliding", 4, 1),)))
    trial.do(New("a", ((0, 5),)))
    trial.do(Allocate("a", 5))
    trial.do(ReleaseOutOfWindow("a"))
    trial.do(New("b", ((1, 5),)))
    trial.do(Allocate("b", 5))
    trial.do(New("c", ((0, 5),)))
    trial.do(Match("c"))
    assert trial.requests["c"].found.num_hit_tokens == 0
    assert not trial.view.keyed
    trial.finish()
