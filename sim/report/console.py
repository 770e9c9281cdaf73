"""Prints JSON, tables and progress bars for every command."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..figures import shown

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def print_json(payload: Any) -> None:
    """Print one JSON document with its keys in the given order. Raises ValueError for NaN."""
    json.dump(payload, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("\n")


def console(stderr: bool = False):
    """A rich console. Without a terminal it is 120 columns wide, so that tables in files are not wrapped at 80."""
    from rich.console import Console

    stream_is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if stream_is_terminal else 120, highlight=False)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[int] = (0,)):
    """A rich table; columns with an index in `left` are left-aligned, all others are right-aligned."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        out.add_column(name, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        out.add_row(*(cell if isinstance(cell, str) else f"{cell:,}" for cell in row))
    return out


def print_hanging(out: Any, head: str, text: str) -> None:
    """Print `head text`; continuation lines are indented to the text."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=0)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(head), Text(text))
    out.print(grid)


def print_list(out: Any, title: str, lines: Sequence[str]) -> None:
    """Print a bold title and a bullet per line; nothing without lines."""
    from rich.text import Text

    if lines:
        out.print(Text(title, style="bold"))
        for line in lines:
            print_hanging(out, "  - ", line)
        out.print()


def print_assumptions(assumptions: Mapping[str, Any], where: str = "") -> None:
    """Print a table of assumptions."""
    out = console()
    out.print(f"[bold]Assumptions[/bold] ({where}options of the same names change them)")
    rows = [(name, shown(value)) for name, value in assumptions.items()]
    out.print(table(None, ("assumption", "value"), rows, left=(0, 1)))


class NoProgress:
    """Replaces a progress bar where there is no terminal: same calls, no output, no library loaded."""

    disable = True

    def __enter__(self) -> "NoProgress":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, _: Any, **__: Any) -> None:
        """Nothing to show."""

    def advance(self, _: Any, __: float = 1) -> None:
        """Nothing to show."""


def progress(description: str, total: float | None = None) -> "tuple[Progress | NoProgress, TaskID]":
    """A progress bar on standard error with its only task; silent if that is no terminal."""
    if not sys.stderr.isatty():
        return NoProgress(), cast("TaskID", 0)
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    )
    return bar, bar.add_task(description, total=total)


class PartsProgress:
    """Shows a study's progress on standard error, part by part; silent if that is no terminal."""

    def __init__(self) -> None:
        self._bar, self._task = progress("")

    def __enter__(self) -> "PartsProgress":
        self._bar.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._bar.__exit__(*reason)

    def update(self, text: str, completed: int, total: int | None) -> None:
        """Show the current activity and how much of it is done."""
        self._bar.update(self._task, description=text, completed=completed, total=total)

    def part_ended(self, part: str, reason: str | None) -> None:
        """Print one line for a part: done, or why it was skipped."""
        if not self._bar.disable:
            said = "done" if reason is None else f"skipped, {reason}"
            console(stderr=True).print(f"{part}: {said}", markup=False)
