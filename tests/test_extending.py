"""The recipes of docs/extending.md run, have the length that they state, and their names appear in help texts."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
TEXT = PAGE.read_text(encoding="utf-8")
STATED_LINES = dict(re.findall(r"^\| \[[^\]]+\]\(#([\w-]+)\) \| (\d+) lines \|", TEXT, re.MULTILINE))


def plugin_of(recipe: str) -> str:
    """The first code block of a recipe."""
    (section,) = (part for part in TEXT.split("\n## ") if part.partition("\n")[0].lower().replace(" ", "-") == recipe)
    source = ""
    for part in doctest.DocTestParser().parse(section):
        if isinstance(part, doctest.Example):
            source += part.source
        elif source and part.strip():
            break
    return source


def run(*arguments: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_has_six_recipes() -> None:
    assert len(STATED_LINES) == 6


def test_every_example_prints_what_it_shows() -> None:
    run("-W", "error", "-m", "doctest", PAGE)


@pytest.mark.parametrize("recipe", STATED_LINES)
def test_a_recipe_is_as_long_as_it_states(recipe: str) -> None:
    assert len(plugin_of(recipe).splitlines()) == int(STATED_LINES[recipe])


def test_recipes_work_as_plug_in_files_and_appear_in_help(tmp_path: Path) -> None:
    options = []
    for recipe in STATED_LINES:
        path = tmp_path / f"{recipe.replace('-', '_')}.py"
        path.write_text(plugin_of(recipe))
        options += ["--plugin", path]
    shown = run("-m", "kvledger", *options, "fleet", "--help", COLUMNS="200")
    # Long lists are wrapped, at dashes too.
    shown = "".join(shown.split())
    assert [name for name in ("reused-last", "plain", "per-token", "random") if f",{name}." not in shown] == []
