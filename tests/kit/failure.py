"""A broken promise, as a short program that shows it, the state before and after, and a file that plays it again."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
from kvledger.testing.commands import Command, from_json, to_json, to_source
from kvledger.testing.invariants import InvariantViolation
from kvledger.testing.scenario import Scenario
from kvledger.testing.view import AllocatorView

FORMAT = "kvledger-regression/1"


@attrs.frozen
class History:
    """A scenario, and the commands that are played on it."""

    scenario: Scenario
    commands: tuple[Command, ...]
    invariant: str = ""

    def to_program(self, factory: str) -> str:
        """A runnable program that plays the history on the manager that `factory` ("module:name") makes."""
        names = sorted({type(command).__name__ for command in self.commands})
        shapes = ["GroupShape", "Scenario"] if "GroupShape" in self.scenario.to_source() else ["Scenario"]
        module, _, name = factory.partition(":")
        maker, _, inner = name.rpartition(".<locals>.")
        lines = [
            f"from kvledger.testing import {', '.join(sorted([*names, *shapes, 'Trial']))}",
            f"{inner} = ...  # the factory that {maker} in {module} makes" if maker else f"from {module} import {name}",
            "",
            f"trial = Trial({inner or name}, {self.scenario.to_source()})",
            *[f"trial.do({to_source(command)})" for command in self.commands],
        ]
        return "\n".join(lines)

    def save(self, path: Path) -> Path:
        """Write a regression file: JSON that `load_history` reads and that plays without Hypothesis."""
        data = {
            "format": FORMAT,
            "invariant": self.invariant,
            "scenario": self.scenario.to_json(),
            "commands": [to_json(command) for command in self.commands],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
        return path


def load_history(path: Path) -> History:
    """Read a regression file.

    Raises:
        ValueError: the file is not one.
    """
    data: dict[str, Any] = json.loads(path.read_text())
    if data.get("format") != FORMAT:
        raise ValueError(f"{path} is no regression file: its format is {data.get('format')!r}, not {FORMAT!r}")
    commands = tuple([from_json(command) for command in data["commands"]])
    return History(Scenario.from_json(data["scenario"]), commands, data["invariant"])


class KitFailure(AssertionError):  # a finding: pytest shows it as a failed assertion
    """The shortest history found so far that breaks a promise, ready to be read and run.

    Attributes:
        history: what was played.
        violation: which promise broke, and how.
        saved_as: the regression file, once there is one.
    """

    def __init__(
        self,
        history: History,
        violation: InvariantViolation,
        factory: str,
        before: AllocatorView | None,
        after: AllocatorView | None,
        titles: tuple[str, str] = ("before the last command", "after it"),
    ) -> None:
        self.history, self.violation, self.factory = history, violation, factory
        self.before, self.after, self.titles = before, after, titles
        self.saved_as: Path | None = None
        super().__init__(self.report())

    def report(self) -> str:
        """The program, the table and the sentence."""
        indented = "\n".join(["    " + line for line in self.history.to_program(self.factory).splitlines()])
        parts = [f"\n{indented}"]
        if self.after is not None:
            parts.append(state_table(self.before, self.after, self.titles))
        parts.append(f"{self.violation.name}: {self.violation.sentence}\nfound: {self.violation.detail}")
        if self.saved_as is not None:
            parts.append(f"Saved as {self.saved_as}; the next run plays it first.")
        return "\n\n".join(parts)

    def save_to(self, folder: Path) -> Path:
        """Save the history under the names of the manager and the broken promise."""
        name = re.sub(r"\W+", "-", f"{self.factory}-{self.violation.name}").strip("-")
        self.saved_as = self.history.save(folder / f"{name}.json")
        return self.saved_as


def state_table(before: AllocatorView | None, after: AllocatorView, titles: tuple[str, str]) -> str:
    """Two states side by side."""
    left, right = ({} if before is None else _rows(before)), _rows(after)
    rows = [("", *titles)]
    rows += [(key, left.get(key, "-"), right.get(key, "-")) for key in {**left, **right}]
    widths = [max([len(row[i]) for row in rows]) for i in range(3)]
    return "\n".join(["  ".join([cell.ljust(widths[i]) for i, cell in enumerate(row)]).rstrip() for row in rows])


def _rows(view: AllocatorView) -> dict[str, str]:
    rows: dict[str, str] = {}
    for name, groups in view.tables.items():
        for group, table in enumerate(groups):
            rows[f"table of {name!r}, group {group}"] = _listed(list(table))
    rows["free queue"] = _listed(view.free.tolist())
    if view.ref_cnt is not None:
        counts = [f"{block}:{count}" for block, count in enumerate(view.ref_cnt.tolist()) if count]
        rows["ref_cnt (block:count)"] = _listed(counts)
    if view.keyed is not None:
        rows["findable blocks"] = _listed(sorted(view.keyed))
    return rows


def _listed(values: Sequence[Any]) -> str:
    shown = " ".join([str(value) for value in values[:24]])
    return shown + (" ..." if len(values) > 24 else "") if values else "(none)"
