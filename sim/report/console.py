"""What every command shares for talking to a person or to a program: JSON, tables, progress, figures with units."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def print_json(payload: Any) -> None:
    """One JSON document on standard output, keys in the order given; NaN is refused rather than printed."""
    json.dump(payload, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
    sys.stdout.write("\n")


def console(stderr: bool = False):
    """A rich console. Off a terminal it is 120 columns wide, so that logs and pipes do not fold tables at 80."""
    from rich.console import Console

    stream_is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, width=None if stream_is_terminal else 120, highlight=False)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[Any]], left: Sequence[int] = (0,)):
    """A rich table; the columns whose index is in `left` are left-aligned, all others (figures) right-aligned."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for i, name in enumerate(columns):
        out.add_column(name, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        out.add_row(*(cell if isinstance(cell, str) else f"{cell:,}" for cell in row))
    return out


class NoProgress:
    """What stands for a progress bar off a terminal: it takes the same calls, shows nothing, and loads no library."""

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
    """A progress bar with the time left on a terminal's standard error, or silence elsewhere, and its only task."""
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
    """A study's progress on a terminal's standard error, part by part; silence elsewhere."""

    def __init__(self) -> None:
        self._bar, self._task = progress("")

    def __enter__(self) -> "PartsProgress":
        self._bar.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._bar.__exit__(*reason)

    def update(self, text: str, completed: int, total: int | None) -> None:
        """Show what is being done and how far it is."""
        self._bar.update(self._task, description=text, completed=completed, total=total)

    def part_ended(self, part: str, reason: str | None) -> None:
        """Print one line for a part: done, or why it was left out."""
        if not self._bar.disable:
            said = "done" if reason is None else f"left out, {reason}"
            console(stderr=True).print(f"{part}: {said}", markup=False)
