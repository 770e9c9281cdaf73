"""A failure is a short program that runs as printed, and a file that plays again without Hypothesis."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kvledger.testing import (
    Allocate,
    Append,
    Evict,
    Fork,
    Free,
    GroupShape,
    History,
    KitFailure,
    Match,
    New,
    Scenario,
    Supports,
    Trial,
    explore,
    failure_of,
    load_history,
    make_ledger,
    replay_file,
    run_machine,
    shorten,
    supporting,
    survey,
)
from kvledger.testing.commands import COMMANDS, from_json, to_json, to_source

from tests.properties import list_manager, token_manager
from tests.properties.list_manager import ListManager


class Leaky(ListManager):
    """Loses the last block of every request that finishes."""

    def free(self, request_id: str) -> None:
        if self.tables.get(request_id):
            self.tables[request_id].pop()
        super().free(request_id)

    preempt = ListManager.free

    def abort(self, request_id: str) -> None:
        if request_id in self.tables:
            self.preempt(request_id)


@supporting(Supports(options=["ordered"], waived=["no_orphans"]))
def make_leaky(scenario: Scenario) -> Leaky:
    return Leaky(scenario)


LONG = History(
    Scenario(num_blocks=12, groups=(GroupShape("full", 8),), watermark_blocks=1),
    (
        New("a", ((0, 20), (1, 3))),
        Match("a"),
        Allocate("a", 23, adopt=True),
        New("b", ((0, 9),)),
        Allocate("b", 9),
        Append(("a", "b"), 1),
        Fork("b", "c"),
        Evict((1,)),
        Free("a"),
    ),
)


# A block that a fork shares is not lost, but its count is wrong.
LEAKS = {"conservation", "ref_counts"}


def leak() -> KitFailure:
    failure = failure_of(LONG, make_leaky)
    assert failure is not None
    return failure


def test_a_failure_names_the_promise_and_shows_the_state_before_and_after() -> None:
    report = leak().report()
    assert "conservation: held + evictable + clean + null == num_blocks, after every commit." in report
    assert "a leak" in report
    assert "before the last command" in report
    assert "table of 'b', group 0" in report


def test_a_failure_is_shortened_to_what_breaks_the_promise() -> None:
    short = shorten(leak(), make_leaky)
    assert [type(command) for command in short.history.commands] == [New, Allocate, Free]
    assert short.history.scenario == Scenario(num_blocks=2)
    assert short.violation.name == "conservation"


def test_the_printed_program_runs_and_fails_by_itself(tmp_path: Path) -> None:
    short = shorten(leak(), make_leaky)
    program = tmp_path / "program.py"
    program.write_text(short.history.to_program("tests.kit_tests.test_failures:make_leaky"))
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env={"PYTHONPATH": root})
    assert done.returncode == 1
    assert "kvledger.testing.failure.KitFailure" in done.stderr
    assert "conservation" in done.stderr


def test_a_factory_made_inside_a_function_is_named_and_not_imported() -> None:
    @supporting(Supports(waived=["no_orphans"]))
    def make(scenario: Scenario) -> Leaky:
        return Leaky(scenario)

    failure = failure_of(LONG, make)
    assert failure is not None
    program = failure.history.to_program(failure.factory)
    compile(program, "program", "exec")
    assert "make = ...  # the factory that test_a_factory_made_inside_a_function" in program
    assert "trial = Trial(make, " in program


def test_a_manager_whose_events_cannot_be_folded_is_a_failure_like_any_other() -> None:
    class Unfoldable(ListManager):
        def rebuild(self) -> None:
            raise ZeroDivisionError("oh")

    trial = Trial(Unfoldable, Scenario(num_blocks=4))
    with pytest.raises(KitFailure, match=r"no_crash.*\n.*its events cannot be folded: ZeroDivisionError: oh"):
        trial.do(New("a", ((0, 4),)))


def test_a_saved_history_plays_again_without_hypothesis(tmp_path: Path) -> None:
    path = shorten(leak(), make_leaky).save_to(tmp_path)
    assert path.name == "tests-kit_tests-test_failures-make_leaky-conservation.json"
    assert load_history(path).invariant == "conservation"
    with pytest.raises(KitFailure, match="conservation"):
        replay_file(path, make_leaky)
    replay_file(path, list_manager.make)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"format": "something else"}))
    with pytest.raises(ValueError, match="no regression file"):
        load_history(path)


def test_every_command_survives_json_and_prints_as_what_makes_it() -> None:
    for command in LONG.commands:
        assert from_json(json.loads(json.dumps(to_json(command)))) == command
        assert eval(to_source(command), dict(COMMANDS)) == command


def test_a_scenario_prints_as_what_makes_it() -> None:
    names = {"Scenario": Scenario, "GroupShape": GroupShape}
    assert eval(LONG.scenario.to_source(), names) == LONG.scenario
    assert Scenario.from_json(json.loads(json.dumps(LONG.scenario.to_json()))) == LONG.scenario


def test_exploring_stops_at_the_first_failure_and_saves_it(tmp_path: Path) -> None:
    with pytest.raises(KitFailure) as found:
        explore(make_leaky, 50, shorten_s=2, save_to=tmp_path)
    assert found.value.violation.name in LEAKS
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_hypothesis_finds_it_too(tmp_path: Path) -> None:
    with pytest.raises(KitFailure) as found:
        run_machine(make_leaky, max_examples=50, shorten_s=2, save_to=tmp_path)
    assert found.value.violation.name in LEAKS
    assert len(found.value.history.commands) <= 4


def test_a_survey_reports_every_kind_of_failure_once() -> None:
    found = survey(make_leaky, 20, shorten_s=0.2)
    assert {promise for promise, _ in found} <= LEAKS
    assert ("conservation", "Free") in found


def test_the_same_seed_plays_the_same_history() -> None:
    first, second = explore(list_manager.make, 5, seed=7), explore(list_manager.make, 5, seed=7)
    assert first == second != explore(list_manager.make, 5, seed=8)


def test_an_exception_of_the_manager_is_a_failure_like_any_other() -> None:
    class Falls(ListManager):
        def free(self, request_id: str) -> None:
            raise ZeroDivisionError("oh")

    trial = Trial(Falls, Scenario(num_blocks=4))
    trial.do(New("a", ((0, 4),)))
    trial.do(Allocate("a", 4))
    with pytest.raises(KitFailure, match=r"no_crash.*\n.*ZeroDivisionError: oh"):
        trial.do(Free("a"))


def test_a_waived_promise_ends_the_history_quietly() -> None:
    @supporting(Supports(waived=["conservation"]))
    def make(scenario: Scenario) -> Leaky:
        return Leaky(scenario)

    trial = Trial(make, LONG.scenario)
    for command in LONG.commands:
        trial.do(command)
    assert trial.stopped_by == "conservation"
    trial.finish()


@pytest.mark.parametrize("make", [list_manager.make, token_manager.make], ids=["list", "token"])
def test_the_managers_of_the_tests_keep_every_promise(make, kit_histories=100) -> None:
    explore(make, kit_histories)
    run_machine(make, max_examples=30)


def test_a_refused_fork_leaves_nothing_of_the_child_behind() -> None:
    """The name is free: what comes by it has its own prompt, up to whose last boundary states are kept."""
    trial = Trial(make_ledger, Scenario(num_blocks=5, groups=(GroupShape("state", 4),), retention_interval=0))
    trial.do(New("ended", ((0, 3),)))
    trial.do(Fork("ended", "child"))
    trial.do(New("child", ((0, 9),)))
    trial.do(Allocate("child", 8))
    assert sorted(trial.view.keyed or ()) == [1]
