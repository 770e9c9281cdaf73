"""`kvledger block-size` on a terminal."""

from collections.abc import Mapping
from typing import Any

from .console import console, percent, table
from .replay_report import seconds, shown


def print_block_sizes(document: Mapping[str, Any]) -> None:
    """The answer, a row a size, and what all of it rests on (`document` is that of `--json`)."""
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(document['answer']['sentence'])}[/bold]", soft_wrap=True)
    columns = (
        "tokens",
        "blocks",
        "hit rate",
        "TTFT p50",
        "TTFT p99",
        "TPOT p99",
        "tokens/s",
        "preempted",
        "most behind",
    )
    rows = [_cells(row, document["answer"]["block_size"]) for row in document["rows"] if "error" not in row]
    out.print(table("Block sizes (* the answer; behind: the best of any size)", columns, rows, left=()))
    for row in document["rows"]:
        if "error" in row:
            out.print(f"{row['block_size']}: {escape(row['error'])}", soft_wrap=True)
    out.print(f"Pool: {document['pool']}")
    out.print("Not charged: the length of block tables, and keys and events by their number; they favour large blocks.")
    out.print("[bold]Assumptions[/bold] (of the smallest size; change them with the options of the same names)")
    assumed = [(name, shown(value)) for name, value in document["assumptions"].items()]
    out.print(table(None, ("assumption", "value"), assumed, left=(0, 1)))


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
