"""`kvledger sweep`: from its options to the points, its document, and its table."""

from typing import Any

import attrs

from ...core.errors import InputError
from ..search.sweep import SWEEPABLE, Point, best_row, content_of, grid, parse_axis, run_sweep
from ..study.answer import at_path
from .console import console, progress, table
from .replay import shown


@attrs.frozen(kw_only=True)
class SweepQuestion:
    """What `kvledger sweep` was asked, as typed."""

    command: str
    files: tuple[str, ...]
    axes: tuple[str, ...]
    fixed: tuple[str, ...]
    minimize: str | None = None
    maximize: str | None = None
    require: tuple[str, ...] = ()
    num_workers: int = 1
    kept_in: str | None = None
    cluster: bool = False

    def __attrs_post_init__(self) -> None:
        if self.command not in SWEEPABLE:
            raise InputError(f"--command is {self.command!r}; it is one of {', '.join(SWEEPABLE)}")
        if self.minimize is not None and self.maximize is not None:
            raise InputError("give --minimize or --maximize, not both: there is one best row")
        if self.require and self.minimize is None and self.maximize is None:
            raise InputError("--require needs --minimize or --maximize: which of the rows that meet it is best?")

    def points(self) -> list[Point]:
        """Every point, in the order of the grid.

        Raises:
            InputError: no axis, an option named twice, or a file that cannot be read.
        """
        if not self.axes:
            raise InputError("a sweep needs --grid NAME=V1,V2,... at least once")
        axes: dict[str, tuple[str, ...]] = {}
        fixed = [self._fixed(text) for text in self.fixed]
        for name, values in map(parse_axis, self.axes):
            if name in axes or name in dict(fixed):
                raise InputError(f"--grid {name} is given twice, or as --set as well")
            axes[name] = values
        content = content_of(self.files)
        return [
            Point(command=self.command, files=self.files, options=(*fixed, *varied), content=content)
            for varied in grid(axes)
        ]

    def _fixed(self, text: str) -> tuple[str, str]:
        name, separator, value = text.partition("=")
        if not name or not separator or not value:
            raise InputError(f"--set is {text!r}; it must look like block-size=64")
        return name.strip().lstrip("-"), value


class Sweep:
    """One run of all points. `document` may be asked for at any moment: it holds the rows that are done by then."""

    def __init__(self, question: SweepQuestion) -> None:
        self._question = question
        self._points = question.points()
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """Run every point.

        Raises:
            KeyboardInterrupt: passed through; the rows done by then are in `document`.
        """
        question = self._question
        bar, task = progress("Points", total=len(self._points))

        def on_row(row: dict[str, Any]) -> None:
            self.rows.append(row)
            bar.advance(task)

        with bar:
            run_sweep(
                self._points,
                num_workers=question.num_workers,
                kept_in=question.kept_in,
                cluster=question.cluster,
                on_row=on_row,
            )

    def document(self) -> dict[str, Any]:
        """`command`, `grid`, `rows` in the order of the grid, and `best`.

        It does not say how many workers there were, nor when: it is the same, byte for byte, for all of them.
        """
        return _document(self._question, self.rows, len(self._points))


def _document(question: SweepQuestion, rows: list[dict[str, Any]], num_points: int) -> dict[str, Any]:
    figure = question.minimize or question.maximize
    index = None if figure is None else best_row(rows, figure, question.maximize is not None, question.require)
    return {
        "command": question.command,
        "trace": list(question.files),
        "grid": {name: list(values) for name, values in map(parse_axis, question.axes)},
        "num_failed": sum("error" in row for row in rows),
        "num_not_done": num_points - len(rows),
        "rows": rows,
        "best": None if figure is None else _best(rows, index, question, figure),
    }


def _best(rows: list[dict[str, Any]], index: int | None, question: SweepQuestion, figure: str) -> dict[str, Any]:
    asked = {
        "figure": figure,
        "of": "smallest" if question.minimize else "largest",
        "require": list(question.require),
    }
    if index is None:
        return {**asked, "index": None, "options": None, "value": None}
    row = rows[index]
    return {**asked, "index": index, "options": row["options"], "value": at_path(row["result"], figure)}


def print_sweep(document: dict[str, Any], figures: list[str] | None) -> None:
    """A row a point: the options that differ, the figures asked for, or the error; then the best."""
    best = document["best"]
    names = list(document["grid"])
    required = [text.replace(">", "<").split("<")[0].strip() for text in best["require"]] if best else []
    figures = figures or list(dict.fromkeys([*([best["figure"]] if best else []), *required]))
    rows: list[tuple[str, ...]] = []
    for index, row in enumerate(document["rows"]):
        mark = "*" if best and best["index"] == index else ""
        options = [row["options"][name] for name in names]
        if "error" in row:
            cells = [row["error"].splitlines()[0], *[""] * (max(len(figures), 1) - 1)]
        else:
            cells = [_cell(row["result"], figure) for figure in figures] or ["done"]
        rows.append((mark, *options, *cells))
    out = console()
    out.print(table(f"{document['command']}: {len(rows):,} points", ("", *names, *(figures or ["outcome"])), rows))
    if document["num_not_done"]:
        out.print(f"{document['num_not_done']:,} points were not done: the sweep was interrupted")
    if document["num_failed"]:
        out.print(f"{document['num_failed']:,} points have no result; they are tried again when the sweep is repeated")
    if best:
        found = "none meets the requirements" if best["index"] is None else f"{shown(best['value'])}"
        chosen = ", ".join(f"{name} {best['options'][name]}" for name in names) if best["options"] else ""
        out.print(f"[bold]Best[/bold] ({best['of']} {best['figure']}): {found}  {chosen}", soft_wrap=True)


def _cell(result: dict[str, Any], path: str) -> str:
    try:
        return shown(at_path(result, path))
    except (KeyError, IndexError, ValueError, TypeError):
        raise InputError(f"there is no figure {path!r} in the result; it has {', '.join(result)}") from None
