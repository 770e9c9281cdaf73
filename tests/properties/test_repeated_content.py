"""Where keys name content alone, one block may stand at several places of a request: every promise holds all the same.

`WRITES_ARE_PRIVATE` is among them: no token is written into a block that stands anywhere else, in its own row or not.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from kvledger.testing import Scenario, Trial, check_log
from kvledger.testing.choices import RandomChooser, choose_scenario, pick
from kvledger.testing.rules import RULES

from tests.properties.repeated_content import SUPPORTS, content_trial

HISTORIES = 100
HISTORIES_IN_MEMORY = 20
# A block that stands twice is there for a few commands, and these are what it has to bear.
EMPHASIS = {"truncate": 4, "fork_and_diverge": 2, "evict": 2}

Scale = Callable[[int], int]


def histories(count: int) -> Iterator[tuple[RandomChooser, Scenario]]:
    for number in range(count):
        chooser = RandomChooser(number)
        yield chooser, choose_scenario(chooser, SUPPORTS)


def holds_a_block_twice(trial: Trial) -> bool:
    tables = [table for groups in trial.view.tables.values() for table in groups]
    return any(len(set(live)) < len(live) for live in ([block for block in table if block] for table in tables))


def test_every_promise_holds_and_the_log_is_sound(kit_histories: Scale) -> None:
    seen: Counter[str] = Counter()
    for chooser, scenario in histories(kit_histories(HISTORIES)):
        trial = content_trial(scenario)
        tickets = [rule for rule in RULES for _ in range(rule.weight * EMPHASIS.get(rule.name, 1))]
        for _ in range(30):
            num_commands = len(trial.commands)
            held_twice = holds_a_block_twice(trial)
            pick(chooser, tickets).act(trial, chooser, trial.do)
            if held_twice:
                seen.update([type(command).__name__ for command in trial.commands[num_commands:]])
        trial.finish()
        log = trial.manager.log
        assert check_log(log).snapshot() == trial.manager.allocator.state.snapshot()
        assert log.conservation() is None
    for command in ("Allocate", "Append", "Fork", "Truncate", "Preempt", "Evict"):
        assert seen[command] >= 3, f"only {seen[command]} times {command} while a request holds a block twice: {seen}"


def test_simulated_and_real_memory_are_the_same(kit_histories: Scale) -> None:
    pytest.importorskip("torch", reason="real memory needs torch")
    from tests.properties.same_slots import VARIANTS, SameSlots
    from tests.properties.slot_histories import play_commands

    seen: Counter[str] = Counter()
    for chooser, scenario in histories(kit_histories(HISTORIES_IN_MEMORY)):
        variants = (pick(chooser, VARIANTS),)
        witness = play_commands(
            chooser,
            scenario,
            lambda scenario, ledger, variants=variants: SameSlots(scenario.groups, ledger.log.created, variants),
            30,
            content_trial,
        )
        seen.update(witness.seen)
        seen["read"] += witness.num_read
    assert min(seen["shared prefix"], seen["fork"], seen["copy on write"], seen["truncation"]) >= 10, seen
    assert seen["read"] > HISTORIES_IN_MEMORY
