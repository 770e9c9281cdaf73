"""`kvledger ab` on a terminal: why they differ, then every figure side by side."""

from collections.abc import Mapping
from typing import Any

from .console import console, table
from .replay_report import shown


def print_ab(document: Mapping[str, Any]) -> None:
    """Everything on standard output (`document` is that of `--json`)."""
    from rich.markup import escape

    out = console()
    out.print("[bold]What differs, and what comes of it[/bold]")
    for sentence in document["explanation"]:
        out.print(f"- {escape(sentence)}", soft_wrap=True)
    rows = [
        (
            row["name"],
            _shown(row["a"]),
            _shown(row["b"]),
            "-" if row["difference"] is None else f"{row['difference']:+,.4g}",
            "-" if row["ratio"] is None else f"{row['ratio']:.3g}",
            {"a": "A", "b": "B", None: ""}[row["better"]],
        )
        for row in document["figures"]
    ]
    out.print(table("Side by side", ("figure", "A", "B", "B - A", "B / A", "better"), rows))
    differing = [(row["name"], _shown(row["a"]), _shown(row["b"])) for row in document["assumptions_that_differ"]]
    if differing:
        out.print(table("Assumptions that differ", ("assumption", "A", "B"), differing, left=(0, 1, 2)))
    same = ", ".join(f"{name} {text}" for name, text in document["same"].items())
    out.print(escape(f"The same in both: {document['trace']['name']}{', ' if same else ''}{same}"), soft_wrap=True)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else shown(value)
