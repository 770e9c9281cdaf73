"""Hypothesis strategies for the parts of a history, for tests of one's own."""

from collections.abc import Callable

from hypothesis import strategies as st
from kvledger.testing.choices import choose_groups, choose_prompt, choose_scenario
from kvledger.testing.commands import Command, TokenRuns
from kvledger.testing.failure import History, KitFailure
from kvledger.testing.protocol import ManagerFactory, Supports, supports_of
from kvledger.testing.rules import RULES
from kvledger.testing.scenario import GroupShape, Scenario
from kvledger.testing.trial import Trial


class Drawn:
    """Hypothesis as a `Chooser`."""

    def __init__(self, draw: Callable[[st.SearchStrategy[int]], int]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        """A whole number, both ends included; Hypothesis shrinks towards `low`."""
        return self._draw(st.integers(low, high))


@st.composite
def group_sets(draw: st.DrawFn, supports: Supports) -> tuple[GroupShape, ...]:
    """Groups of layers that share a pool."""
    return choose_groups(Drawn(draw), supports)


@st.composite
def scenarios(draw: st.DrawFn, supports: Supports, eviction: str | None = None) -> Scenario:
    """A pool that a few requests fill, and rules that the manager supports."""
    return choose_scenario(Drawn(draw), supports, eviction)


@st.composite
def prompts(draw: st.DrawFn, scenario: Scenario) -> TokenRuns:
    """The tokens of a prompt, as runs; many share a prefix that ends near a block's edge."""
    return choose_prompt(Drawn(draw), scenario)


@st.composite
def histories(draw: st.DrawFn, make: ManagerFactory, num_rules: int = 10) -> History:
    """A whole history as data, made by playing it on the manager that `make` makes."""
    trial = Trial(make, draw(scenarios(supports_of(make))))
    rules = [rule for rule in RULES if trial.capabilities.issuperset(rule.needs)]

    def do(command: Command) -> None:
        try:
            trial.do(command)
        except KitFailure:
            trial.stopped_by = "a broken promise"  # the history so far is what was asked for

    for _ in range(num_rules):
        draw(st.sampled_from(rules)).act(trial, Drawn(draw), do)
    return History(trial.scenario, tuple(trial.commands))
