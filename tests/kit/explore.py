"""Random histories from a seed: fast enough for a thousand commands a second, and needs no Hypothesis."""

from collections.abc import Collection, Iterable
from pathlib import Path

import attrs
from kvledger.testing.choices import RandomChooser, choose_scenario
from kvledger.testing.commands import Command
from kvledger.testing.differential import SAME_DECISIONS, Differential
from kvledger.testing.failure import KitFailure
from kvledger.testing.protocol import ManagerFactory, supports_of
from kvledger.testing.rules import RULES
from kvledger.testing.scenario import Scenario
from kvledger.testing.shorten import Budget, shorten
from kvledger.testing.trial import Trial

# Looking for a shorter history ends after so many that did not happen on one.
_TRIES_IN_VAIN = 500


@attrs.define
class Played:
    """How much has been played."""

    histories: int = 0
    commands: int = 0


def player_for(make: ManagerFactory, scenario: Scenario, rival: ManagerFactory | None) -> Trial | Differential:
    """A differential run where a rival supports the scenario, else a trial."""
    if rival is not None and supports_of(rival).allows(scenario):
        return Differential(make, rival, scenario)
    return Trial(make, scenario)


def explore(
    make: ManagerFactory,
    num_histories: int = 100,
    num_rules: int = 40,
    seed: int = 0,
    rival: ManagerFactory | None = None,
    eviction: str | None = None,
    shorten_s: float = 10.0,
    save_to: Path | None = None,
    without: Collection[str] = (),
) -> Played:
    """Play random histories, a third of them of `num_rules` rules and the others of half and a quarter of that.

    Args:
        make: the factory of the manager.
        num_histories: how many, each with a scenario of its own.
        num_rules: rules in a long history; a rule plays a few commands.
        seed: history i depends on `seed + i` alone.
        rival: a second factory; where it supports the scenario, both must decide alike.
        eviction: the eviction order, if not any that the factory supports.
        shorten_s: seconds to spend on making a failure short; 0 leaves it as it was found.
        save_to: a folder for the regression file.
        without: names of rules that are not played.

    Raises:
        KitFailure: a promise is broken.
    """
    played = Played()
    for i in range(num_histories):
        chooser = RandomChooser(seed + i)
        scenario = choose_scenario(chooser, supports_of(make), eviction)
        try:
            player = player_for(make, scenario, rival)
            _play_one(player, chooser, max(num_rules >> i % 3, 4), played, without)
        except KitFailure as failure:
            raise reported(failure, make, rival, shorten_s, save_to) from None
    return played


def reported(
    failure: KitFailure, make: ManagerFactory, rival: ManagerFactory | None, shorten_s: float, save_to: Path | None
) -> KitFailure:
    """The failure, shortened and saved."""
    if shorten_s:
        needed = rival if failure.violation.name == SAME_DECISIONS.name else None
        failure = shorten(failure, make, needed, shorten_s / 2)
        failure = _found_again_sooner(failure, make, needed, shorten_s / 2)
    if save_to is not None:
        failure.save_to(save_to)
    return failure


def _found_again_sooner(
    failure: KitFailure, make: ManagerFactory, rival: ManagerFactory | None, budget_s: float
) -> KitFailure:
    """The same broken promise by a history with fewer commands, if a random one in the same scenario happens on it.

    Leaving out commands ends where each one is needed by another; starting anew does not.
    """
    best, budget, seed, in_vain = failure, Budget(budget_s), 0, 0
    while budget.left_s > 0 and in_vain < _TRIES_IN_VAIN:
        chooser, seed, in_vain = RandomChooser(seed), seed + 1, in_vain + 1
        most = len(best.history.commands) - 1
        blocks = chooser.integer(2, best.history.scenario.num_blocks + 1)
        player = player_for(make, attrs.evolve(best.history.scenario, num_blocks=blocks), rival)
        try:
            _play_one(player, chooser, most // 2 + 1, Played(), (), most)
        except KitFailure as found:
            if _kind_of(found) == _kind_of(best):
                best, in_vain = shorten(found, make, rival, budget.left_s), 0
    return best


def _play_one(
    player: Trial | Differential,
    chooser: RandomChooser,
    num_rules: int,
    played: Played,
    without: Collection[str],
    most_commands: int | None = None,
) -> None:
    trial = player if isinstance(player, Trial) else player.trial
    rules = [rule for rule in RULES if trial.capabilities.issuperset(rule.needs) and rule.name not in without]
    tickets = [rule for rule in rules for _ in range(rule.weight)]
    played.histories += 1

    def do(command: Command) -> None:
        played.commands += 1
        player.do(command)

    for _ in range(num_rules):
        if most_commands is not None and played.commands >= most_commands:
            return
        tickets[chooser.integer(0, len(tickets) - 1)].act(trial, chooser, do)
    if most_commands is None:
        player.finish()


def survey(
    make: ManagerFactory,
    num_histories: int = 100,
    num_rules: int = 40,
    seed: int = 0,
    rival: ManagerFactory | None = None,
    shorten_s: float = 10.0,
    without: Collection[str] = (),
) -> dict[tuple[str, str], KitFailure]:
    """Every way in which histories break promises: (promise, kind of the last command) -> a short failure.

    Where `explore` stops at the first failure, this notes it and plays the next history. The shortest of each kind is
    made shorter.
    """
    found: list[KitFailure] = []
    for i in range(num_histories):
        try:
            explore(make, 1, num_rules, seed + i, rival, shorten_s=0, without=without)
        except KitFailure as failure:
            found.append(failure)
    short = [reported(failure, make, rival, shorten_s, None) for failure in _shortest_of_each_kind(found).values()]
    return _shortest_of_each_kind(short)


def _shortest_of_each_kind(failures: Iterable[KitFailure]) -> dict[tuple[str, str], KitFailure]:
    from_the_longest = sorted(failures, key=lambda failure: len(failure.history.commands), reverse=True)
    return dict(sorted({_kind_of(failure): failure for failure in from_the_longest}.items()))


def _kind_of(failure: KitFailure) -> tuple[str, str]:
    return failure.violation.name, type(failure.history.commands[-1]).__name__
