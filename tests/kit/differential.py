"""Two managers, one history: the first command after which their decisions differ, with both states side by side."""

from typing import Any

import attrs
from kvledger.testing.commands import Command
from kvledger.testing.failure import History, KitFailure
from kvledger.testing.promises import Promise
from kvledger.testing.protocol import ManagerFactory
from kvledger.testing.scenario import Scenario
from kvledger.testing.trial import Trial
from kvledger.testing.view import AllocatorView

SAME_DECISIONS = Promise("same_decisions", "Two managers that are given one history make the same decisions.")

# Options that show in the arguments of commands; the others show in the scenario, or in what is checked.
_ARGUMENTS = frozenset({"external", "async_loads", "lookahead", "drafts", "rollback", "reserved"})
# Capabilities that are no commands.
_OWN = frozenset({"rebuild"})


class Differential:
    """Plays every command on two managers and compares hits, tables, free queues and findable blocks.

    Plays like a `Trial` of the first manager, whose other promises are checked too; the rival is trusted with those
    about its state. Only what both are made for is played.
    """

    def __init__(self, make: ManagerFactory, rival: ManagerFactory, scenario: Scenario) -> None:
        self.scenario = scenario
        self.trial = Trial(make, scenario)
        self.rival = Trial(rival, scenario, checks_state=False)
        self._play_what_both_can()

    def _play_what_both_can(self) -> None:
        trial, rival = self.trial, self.rival
        only_ours = _ARGUMENTS - rival.supports.options
        trial.supports = attrs.evolve(trial.supports, options=trial.supports.options - only_ours)
        both = trial.capabilities & rival.capabilities
        trial.capabilities, rival.capabilities = (
            both | (trial.capabilities & _OWN),
            both | (rival.capabilities & _OWN),
        )

    def do(self, command: Command) -> None:
        """Play one command on both.

        Raises:
            KitFailure: a promise of either is broken, or they differ; then `before` is the rival's state and `after`
                the first manager's.
        """
        self.trial.do(command)
        self.rival.do(command)
        if self.trial.stopped_by or self.rival.stopped_by:
            return
        ours, theirs = self._decisions(self.trial), self._decisions(self.rival)
        for what, mine in ours.items():
            if mine is not None and theirs[what] is not None and mine != theirs[what]:
                violation = SAME_DECISIONS.broken(
                    f"{what}: {mine} of {self.trial.factory}, {theirs[what]} of {self.rival.factory}"
                )
                history = History(self.scenario, tuple(self.trial.commands), SAME_DECISIONS.name)
                titles = (self.rival.factory, self.trial.factory)
                raise KitFailure(history, violation, self.trial.factory, self.rival.view, self.trial.view, titles)

    def finish(self) -> None:
        """End every request on the first manager, and see that its pool serves the longest request that fits."""
        self.trial.finish()

    @staticmethod
    def _decisions(trial: Trial) -> dict[str, Any]:
        view = trial.view
        found = {name: request.found for name, request in trial.requests.items() if request.found}
        return {
            "hit tokens": {name: prefix.num_hit_tokens for name, prefix in found.items()},
            "hit blocks": {name: prefix.blocks for name, prefix in found.items()},
            "tables": {name: [list(table) for table in groups] for name, groups in view.tables.items()},
            "free queue": view.free.tolist() if "ordered" in trial.supports.options else sorted(view.free.tolist()),
            "findable blocks": _findable(view),
        }


def _findable(view: AllocatorView) -> Any:
    if view.keyed is None:
        return None
    if view.key_prefix is None:
        return dict.fromkeys(view.keyed)
    prefix_of = view.key_prefix
    return {block: (group, tuple(prefix_of(key))) for block, (group, key) in sorted(view.keyed.items())}
