"""Two managers, one history: the first command after which they differ, with both states."""

import pytest
from kvledger.testing import (
    Allocate,
    Differential,
    Free,
    KitFailure,
    Match,
    New,
    Scenario,
    Supports,
    explore,
    make_ledger,
    supporting,
)

from tests.properties import list_manager
from tests.properties.list_manager import ListManager


class Stack(ListManager):
    """Reuses what was freed last, with or without a key."""

    def release_blocks(self, blocks) -> None:
        super().release_blocks(blocks)
        gone = [block for block in blocks if not self.ref_cnt[block]]
        self.free_queue = [*gone, *[block for block in self.free_queue if block not in gone]]


@supporting(Supports(options=["ordered"], waived=["no_orphans"]))
def make_stack(scenario: Scenario) -> Stack:
    return Stack(scenario)


def test_the_first_divergence_is_shown_with_both_states() -> None:
    both = Differential(make_ledger, make_stack, Scenario(num_blocks=5))
    both.do(New("a", ((0, 9),)))
    both.do(Match("a"))
    both.do(Allocate("a", 9, adopt=True))
    with pytest.raises(KitFailure) as found:
        both.do(Free("a"))
    assert found.value.violation.name == "same_decisions"
    report = found.value.report()
    assert "free queue: [3, 4, 2, 1] of kvledger.testing.ledger_adapter:make_ledger, [3, 2, 1, 4] of" in report
    assert "tests.kit_tests.test_differential:make_stack" in report.split("free queue")[0]


def test_managers_that_decide_alike_are_found_alike() -> None:
    both = Differential(make_ledger, list_manager.make, Scenario(num_blocks=5))
    for command in (New("a", ((0, 9),)), Match("a"), Allocate("a", 9, adopt=True), Free("a"), Match("a")):
        both.do(command)
    both.finish()


def test_a_divergence_is_shortened_with_both_managers() -> None:
    with pytest.raises(KitFailure) as found:
        explore(make_stack, 50, rival=list_manager.make, shorten_s=2)
    assert found.value.violation.name == "same_decisions"
    assert len(found.value.history.commands) <= 4


class Small(ListManager):
    """Neither goes back nor forks nor decodes in batches."""

    truncate = fork = append = None  # type: ignore[assignment]


@supporting(Supports(options=["ordered"], waived=["no_orphans"]))
def make_small(scenario: Scenario) -> Small:
    return Small(scenario)


def test_only_what_both_managers_can_is_played() -> None:
    played = explore(make_ledger, 60, rival=make_small)
    assert played.commands > 500
    both = Differential(make_ledger, make_small, Scenario(num_blocks=5))
    assert not {"truncate", "fork", "append"} & both.trial.capabilities
    assert {"match", "rebuild"} <= both.trial.capabilities
    assert not {"drafts", "lookahead"} & both.trial.supports.options
