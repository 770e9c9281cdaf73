"""Prints the commands that compare runs: ab, block-size, optimum, sweep. Each takes the document of `--json`."""

from collections.abc import Mapping
from typing import Any

from ..figures import Document, figure_at, millions, percent, seconds, shown
from .console import console, headline, print_assumptions, table


def print_ab(document: Mapping[str, Any]) -> None:
    """Print what differs and why, then every figure side by side."""
    out = headline("What differs, and its effect")
    for sentence in document["explanation"]:
        out.print(f"- {sentence}", markup=False, soft_wrap=True)
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
    out.print(f"Same in both: {document['trace']['name']}{', ' if same else ''}{same}", markup=False, soft_wrap=True)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else shown(value)


def print_block_sizes(document: Mapping[str, Any]) -> None:
    """Print the answer, a row per block size, and the assumptions."""
    out = headline(document["answer"]["sentence"])
    columns = ("tokens", "blocks", "hit rate", "TTFT p50", "TTFT p99", "TPOT p99", "tokens/s", "preempted", "worst gap")
    rows = [_cells(row, document["answer"]["block_size"]) for row in document["rows"] if "error" not in row]
    title = "Block sizes (* the answer; worst gap: largest distance of a figure from the best size)"
    out.print(table(title, columns, rows, left=()))
    for row in document["rows"]:
        if "error" in row:
            out.print(f"{row['block_size']}: {row['error']}", markup=False, soft_wrap=True)
    out.print(f"Pool: {document['pool']}")
    out.print(
        "Not modelled: the cost of long block tables, of hashing and of events, all of which favour large blocks."
    )
    print_assumptions(document["assumptions"], "at the smallest size; ")


def _cells(row: Mapping[str, Any], chosen: int) -> tuple[str, ...]:
    figures = row["figures"]
    return (
        f"{row['block_size']:,}" + (" *" if row["block_size"] == chosen else "  "),
        f"{figures['assumptions.num_blocks']:,}",
        percent(figures["prefix_cache.hit_rate"]),
        seconds(figures["ttft_s.p50"]),
        seconds(figures["ttft_s.p99"]),
        seconds(figures["tpot_s.p99"]),
        f"{figures['throughput.output_tokens_per_s']:,.1f}",
        f"{figures['preemptions.total']:,}",
        percent(row["most_behind"]),
    )


def print_worth(document: Mapping[str, Any]) -> None:
    """Print the answer, the policies, and the assumptions."""
    out = headline(document["answer"]["sentence"])
    pool = document["pool"]
    rows = [
        (row["policy"], percent(row["token_hit_rate"]), millions(row["hit_tokens"]), millions(row["computed_tokens"]))
        for row in document["policies"]
    ]
    title = f"Pool of {pool['num_blocks']:,} blocks of {pool['block_size']} tokens"
    out.print(table(title, ("eviction", "served", "tokens served", "tokens computed"), rows))
    print_assumptions(document["assumptions"])


def print_sweep(document: Document, figures: list[str] | None) -> None:
    """Print a row per point (the options that differ, then the figures or the error), and the best point."""
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
            cells = [shown(figure_at(row["result"], figure)) for figure in figures] or ["done"]
        rows.append((mark, *options, *cells))
    out = console()
    out.print(table(f"{document['command']}: {len(rows):,} points", ("", *names, *(figures or ["outcome"])), rows))
    if document["num_not_done"]:
        out.print(f"{document['num_not_done']:,} points did not run: the sweep was interrupted")
    if document["num_failed"]:
        out.print(f"{document['num_failed']:,} points failed; running the sweep again retries them")
    if best:
        found = "no point meets the requirements" if best["index"] is None else f"{shown(best['value'])}"
        chosen = ", ".join(f"{name} {best['options'][name]}" for name in names) if best["options"] else ""
        out.print(f"[bold]Best[/bold] ({best['of']} {best['figure']}): {found}  {chosen}", soft_wrap=True)
