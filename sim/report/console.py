"""Prints JSON, tables and progress bars for every command."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..figures import shown


def print_json(payload: Any) -> None:
    """Print one JSON document with its keys in the given order. Raises ValueError for NaN."""
    json.dump(payload, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("\n")


def print_result(result: Any, as_text: Callable[[Any], None], json: bool) -> None:
    """Print a document, or a result with `to_dict`, as JSON or by `as_text`."""
    if json:
        print_json(result if isinstance(result, dict) else result.to_dict())
    else:
        as_text(result)


def console(stderr: bool = False):
    """A rich console. Without a terminal it is 120 columns wide, so that tables in files are not wrapped at 80."""
    from rich.console import Console

    stream_is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if stream_is_terminal else 120, highlight=False)


def headline(text: str):
    """Print a bold line of plain text; returns the console."""
    out = console()
    out.print(text, style="bold", markup=False, soft_wrap=True)
    return out


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


class Bar(AbstractContextManager["Bar"]):
    """A progress bar on standard error; without a terminal it does nothing and loads no library.

    Attributes:
        is_shown: whether there is a terminal.
    """

    def __init__(self, description: str = "", total: float | None = None) -> None:
        self.is_shown = sys.stderr.isatty()
        if self.is_shown:
            from rich import progress as rich

            columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn())
            self._bar = rich.Progress(
                *columns, rich.TimeRemainingColumn(), console=console(stderr=True), transient=True
            )
            self._task = self._bar.add_task(description, total=total)

    def __enter__(self) -> "Bar":
        if self.is_shown:
            self._bar.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        if self.is_shown:
            self._bar.__exit__(*reason)

    def update(self, **changes: Any) -> None:
        """Change the description, how much is `completed`, or the `total`; or `advance` by some."""
        if self.is_shown:
            self._bar.update(self._task, **changes)

    def count(self, completed: int) -> None:
        """Show how much is done."""
        self.update(completed=completed)

    def part(self, text: str, completed: int, total: int | None) -> None:
        """Show the current part of a study, and how much of it is done."""
        self.update(description=text, completed=completed, total=total)

    def part_ended(self, part: str, reason: str | None) -> None:
        """Print one line for a part of a study: done, or why it was skipped."""
        if self.is_shown:
            said = "done" if reason is None else f"skipped, {reason}"
            console(stderr=True).print(f"{part}: {said}", markup=False)
