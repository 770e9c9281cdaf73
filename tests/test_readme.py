"""The README's examples run and print what it shows, and its commands and links exist."""

import contextlib
import io
import re
from pathlib import Path

from kvledger.sim.commands.cli import COMMANDS, GROUPS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_notebook_runs_and_its_plan_is_the_one_shown() -> None:
    notebook, _ = fenced("python")
    names = {}
    exec(compile(notebook, "README.md", "exec"), names)
    assert f"# {names['s'].plan()}\n" in notebook


def test_the_example_prints_what_the_readme_shows_below_it() -> None:
    _, example = fenced("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert [printed.getvalue()] == fenced("text")


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
