"""The table of `kvledger sweep`: a row for each point, and the best of them."""

from typing import Any

from ...core.errors import InputError
from ..figures import at_path, shown
from .console import console, table


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
