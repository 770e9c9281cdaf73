"""Makes a failing history short: leaves out commands, then simplifies what is left, while the same promise breaks."""

import time
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import attrs
from kvledger.testing.commands import Append, Command, Fork, New, TokenRuns
from kvledger.testing.differential import Differential
from kvledger.testing.failure import History, KitFailure
from kvledger.testing.protocol import FactoryError, ManagerFactory, supports_of
from kvledger.testing.scenario import Scenario
from kvledger.testing.trial import Trial

# Of a manager that mostly waits, so much more time may pass than it computes.
_WAITING_FACTOR = 10


class Budget:
    """Seconds of this process's own computing, so that a busy machine shortens as well as an idle one."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.process_time() + seconds
        self._latest_s = time.monotonic() + _WAITING_FACTOR * seconds

    @property
    def left_s(self) -> float:
        """What is left, in seconds; 0 or less where it is spent."""
        return min(self._end_s - time.process_time(), self._latest_s - time.monotonic())


def shorten(
    failure: KitFailure, make: ManagerFactory, rival: ManagerFactory | None = None, budget_s: float = 10.0
) -> KitFailure:
    """The same broken promise by a shorter and simpler history; the given failure if there is none.

    Plays candidates until nothing gets simpler or `budget_s` seconds of computing are spent.
    """
    search = _Search(failure, make, rival, Budget(budget_s))
    ways = (
        search.leave_out_requests,
        search.leave_out_commands,
        search.leave_out_forks,
        search.simplify_commands,
        search.simplify_scenario,
        search.leave_out_pairs,
    )
    # A later way takes more time, so it waits until the earlier ones get nowhere.
    while not search.is_over and any(way() for way in ways):
        pass
    return search.best


class _Search:
    """The best failure so far, and the ways to a better one. Each way says whether it found one."""

    def __init__(self, failure: KitFailure, make: ManagerFactory, rival: ManagerFactory | None, budget: Budget) -> None:
        self.best = failure
        self._make, self._rival, self._budget = make, rival, budget
        self._supports = supports_of(make)

    @property
    def is_over(self) -> bool:
        return self._budget.left_s <= 0

    def leave_out_requests(self) -> bool:
        """Try without everything that one request does."""
        improved = False
        for name in [command.request for command in self._commands if isinstance(command, New)][::-1]:
            commands = [_without(command, name) for command in self._commands]
            improved |= self._fails(self._scenario, tuple([command for command in commands if command is not None]))
        return improved

    def leave_out_forks(self) -> bool:
        """Try without a fork, its parent doing what the child does."""
        improved = False
        for fork in [command for command in self._commands if isinstance(command, Fork)]:
            commands = [_renamed(command, fork.child, fork.parent) for command in self._commands if command != fork]
            improved |= self._fails(self._scenario, tuple(commands))
        return improved

    def leave_out_pairs(self) -> bool:
        """Try without two commands that make sense only together, wherever they stand."""
        for first, second in combinations(range(len(self._commands)), 2):
            commands = self._commands
            if self._fails(self._scenario, (*commands[:first], *commands[first + 1 : second], *commands[second + 1 :])):
                return True
        return False

    def leave_out_commands(self) -> bool:
        """Try without halves, quarters, ... and single commands, from the end."""
        improved = False
        size = max(len(self._commands) // 2, 1)
        while size:
            stop = len(self._commands)
            while stop > 0 and not self.is_over:
                start = max(stop - size, 0)
                commands = self._commands
                improved |= self._fails(self._scenario, (*commands[:start], *commands[stop:]))
                stop = start
            size //= 2
        return improved

    def simplify_commands(self) -> bool:
        """Try smaller numbers, fewer requests and default arguments, command by command."""
        improved = False
        for index in range(len(self._commands) - 1, -1, -1):
            for simpler in _simpler_values(self._commands[index]):
                commands = list(self._commands)
                if index < len(commands):
                    commands[index] = simpler
                    improved |= self._fails(self._scenario, tuple(commands))
        return improved

    def simplify_scenario(self) -> bool:
        """Try a smaller pool, fewer groups and default rules."""
        improved = False
        for simpler in _simpler_scenarios(self._scenario):
            improved |= self._fails(simpler, self._commands)
        return improved

    @property
    def _scenario(self) -> Scenario:
        return self.best.history.scenario

    @property
    def _commands(self) -> tuple[Command, ...]:
        return self.best.history.commands

    def _fails(self, scenario: Scenario, commands: tuple[Command, ...]) -> bool:
        if self.is_over or not self._supports.allows(scenario):
            return False
        failure = failure_of(History(scenario, commands), self._make, self._rival)
        if failure is None or failure.violation.name != self.best.violation.name:
            return False
        self.best = failure
        return True


def _without(command: Command, name: str) -> Command | None:
    """The command without a part in it for this request; None if nothing is left of it."""
    if isinstance(command, Append):
        others = tuple([other for other in command.requests if other != name])
        return attrs.evolve(command, requests=others) if others else None
    named = (command.parent, command.child) if isinstance(command, Fork) else (getattr(command, "request", None),)
    return None if name in named else command


def _renamed(command: Command, old: str, new: str) -> Command:
    """The command with another request in this one's place."""
    if isinstance(command, Append):
        return attrs.evolve(command, requests=tuple(dict.fromkeys([new if r == old else r for r in command.requests])))
    fields = {name: new for name in ("request", "parent", "child") if getattr(command, name, None) == old}
    return attrs.evolve(command, **fields)


def failure_of(history: History, make: ManagerFactory, rival: ManagerFactory | None = None) -> KitFailure | None:
    """How a history fails, or None if it does not, or makes no sense (it names a request that never arrived)."""
    try:
        player = Trial(make, history.scenario) if rival is None else Differential(make, rival, history.scenario)
        for command in history.commands:
            player.do(command)
    except KitFailure as failure:
        return failure
    except (LookupError, ValueError, TypeError, FactoryError):
        return None
    return None


def _simpler_values(command: Command) -> Iterator[Command]:
    if isinstance(command, New):
        yield from [attrs.evolve(command, prompt=prompt) for prompt in _simpler_prompts(command.prompt)]
        return
    for field in attrs.fields(type(command)):
        for simpler in _simpler(getattr(command, field.name), field.default):
            yield attrs.evolve(command, **{field.name: simpler})


def _simpler_prompts(prompt: TokenRuns) -> Iterator[TokenRuns]:
    if len(prompt) > 1:
        yield from [(*prompt[:i], *prompt[i + 1 :]) for i in range(len(prompt))]
    for i, (token, count) in enumerate(prompt):
        for smaller in {count // 2, count - 1} - {0, count}:
            yield (*prompt[:i], (token, smaller), *prompt[i + 1 :])


def _simpler(value: Any, default: Any) -> Iterator[Any]:
    if default is not attrs.NOTHING and value != default:
        yield default
    if isinstance(value, tuple) and len(value) > 1:
        yield from [(*value[:i], *value[i + 1 :]) for i in range(len(value))]
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from [smaller for smaller in (value // 2, value - 1) if 0 <= smaller < value]


def _simpler_scenarios(scenario: Scenario) -> Iterator[Scenario]:
    for field in attrs.fields(Scenario):
        if field.default is not attrs.NOTHING and getattr(scenario, field.name) != field.default:
            yield attrs.evolve(scenario, **{field.name: field.default})
    for i in range(len(scenario.groups) if len(scenario.groups) > 1 else 0):
        yield attrs.evolve(scenario, groups=(*scenario.groups[:i], *scenario.groups[i + 1 :]))
    for num_blocks in dict.fromkeys([scenario.num_blocks // 2, scenario.num_blocks - 1]):
        if 2 <= num_blocks < scenario.num_blocks:
            yield attrs.evolve(scenario, num_blocks=num_blocks)
