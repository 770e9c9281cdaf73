"""The rule-based state machine: Hypothesis draws the scenario, the rules and every choice in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from kvledger.testing.commands import Command
from kvledger.testing.differential import Differential
from kvledger.testing.explore import Played, player_for, reported
from kvledger.testing.failure import KitFailure
from kvledger.testing.protocol import ManagerFactory, supports_of
from kvledger.testing.rules import RULES, Rule
from kvledger.testing.scenario import Scenario
from kvledger.testing.strategies import Drawn, scenarios
from kvledger.testing.trial import Trial


class AllocatorMachine(RuleBasedStateMachine):
    """Plays rules on a manager; `machine_for` makes the subclass with the rules and the manager."""

    played: Played
    player: Trial | Differential | None = None
    failure: KitFailure | None = None

    @property
    def trial(self) -> Trial:
        """The trial of the manager under test."""
        assert self.player is not None
        return self.player.trial if isinstance(self.player, Differential) else self.player

    def do(self, command: Command) -> None:
        """Play one command."""
        assert self.player is not None
        self.played.commands += 1
        try:
            self.player.do(command)
        except KitFailure as failure:
            self.failure = failure
            raise

    def teardown(self) -> None:
        """End every request and look for what was lost on the way, unless something is broken already."""
        if self.player is not None and self.failure is None:
            self.player.finish()


def _method_of(one: Rule) -> Any:
    def act(self: AllocatorMachine, data: st.DataObject) -> None:
        one.act(self.trial, Drawn(data.draw), self.do)

    def applies(self: AllocatorMachine) -> bool:
        return self.trial.capabilities.issuperset(one.needs)

    act.__name__, act.__doc__ = one.name, one.act.__doc__
    return precondition(applies)(rule(data=st.data())(act))


def machine_for(
    make: ManagerFactory,
    scenario_strategy: st.SearchStrategy[Scenario] | None = None,
    rival: ManagerFactory | None = None,
) -> type[AllocatorMachine]:
    """A state machine that plays histories on the managers that `make` makes.

    Args:
        make: the factory; what it supports bounds the histories.
        scenario_strategy: which scenarios; by default all that the factory supports.
        rival: a second factory; where it supports the scenario too, both must decide alike.
    """
    chosen = scenario_strategy if scenario_strategy is not None else scenarios(supports_of(make))

    @initialize(scenario=chosen)
    def start(self: AllocatorMachine, scenario: Scenario) -> None:
        self.player = player_for(make, scenario, rival)
        self.played.histories += 1

    body: dict[str, Any] = {one.name: _method_of(one) for one in RULES}
    return type("KVAllocatorMachine", (AllocatorMachine,), {**body, "start": start, "played": Played()})


def run_machine(
    make: ManagerFactory,
    scenario_strategy: st.SearchStrategy[Scenario] | None = None,
    rival: ManagerFactory | None = None,
    max_examples: int = 50,
    steps: int = 30,
    derandomize: bool = True,
    shorten_s: float = 10.0,
    save_to: Path | None = None,
) -> Played:
    """Play histories until one fails or `max_examples` have been played.

    Hypothesis looks for a failure; `shorten` makes it short, because leaving out commands of a recorded history takes
    milliseconds where shrinking the choices that led to it takes minutes.

    Raises:
        KitFailure: a short failing history; saved in the folder `save_to`, if there is one.
    """
    machine: Callable[[], AllocatorMachine] = machine_for(make, scenario_strategy, rival)
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=steps,
                phases=(Phase.explicit, Phase.generate),
                derandomize=derandomize,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            ),
        )
    except KitFailure as failure:
        raise reported(failure, make, rival, shorten_s, save_to) from None
    return machine.played
