"""What the README promises: its example runs and prints what stands below it, its commands and links are there."""

import contextlib
import io
import re
from pathlib import Path

from kvledger.sim.commands.cli import COMMANDS, GROUPS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> str:
    (block,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return block


def test_the_example_prints_what_stands_below_it() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(fenced("python"), "README.md", "exec"), {})
    assert printed.getvalue() == fenced("text")


def test_the_table_names_commands_that_exist() -> None:
    named = re.findall(r"^\| `kvledger (\w+)` \|", README, re.MULTILINE)
    assert named[0] == "study"
    assert set(named) <= {*COMMANDS, *GROUPS}


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert all((ROOT / link).is_file() for link in links)


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets == ["study", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
