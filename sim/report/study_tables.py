"""Prints a study on a terminal of 80 columns: the answer, four tables, the report's files, what to try next."""

from pathlib import Path
from typing import Any

from ..figures import Document, memory, millions, percent
from .console import console, print_list, table
from .curve import compare_table
from .replay import latency_table


def print_study(document: Document, page: Path, data: Path) -> None:
    """Everything on standard output (`document` is the study's JSON)."""
    from rich.text import Text

    out = console()
    out.print(Text(document["title"]["heading"], style="bold"))
    out.print(Text(document["title"]["subtitle"], style="dim"))
    if "window" in document["title"]:
        out.print(Text(document["title"]["window"], style="dim"))
    out.print()
    out.print(_answer_table(document))
    if document["curve"] is not None and document["derived"]["claims_reuse"]:
        out.print(_curve_table(document["curve"]))
    if document["replay"] is not None:
        out.print(latency_table(document["replay"], "Latency, including queueing"))
    if document["compare"] is not None:
        out.print(compare_table(document["compare"]["allocators"]))
    if document["what_if"]:
        out.print(_what_if_table(document["what_if"]))
    _print_lists(out, document)
    out.print(Text("Report", style="bold"))
    out.print(Text(f"  {page}  (opens in a browser without a network)"), soft_wrap=True)
    out.print(Text(f"  {data}  (every figure with its unit, source and assumption)"), soft_wrap=True)
    out.print()
    out.print(Text("Try next", style="bold"))
    for step in document["next"]:
        out.print(Text(f"  {step['question']}"))
        out.print(Text(f"    {step['command']}", style="cyan"), soft_wrap=True)


def _answer_table(document: Document) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=False, title=None, padding=(0, 1, 1, 0))
    out.add_column("question", width=22, overflow="fold")
    out.add_column("answer", overflow="fold")
    for sentence in document["answer"]["sentences"]:
        out.add_row(Text(sentence["question"], style="bold"), Text(sentence["text"]))
    return out


def _curve_table(curve: Document) -> Any:
    in_bytes = "bytes" in curve["infinite"]
    pool = curve["at_pool"]["lru"]["num_blocks"] if curve["at_pool"] is not None else None
    optimum = curve["policies"]["optimum"]
    rows: list[tuple[str, ...]] = []
    for point, best in zip(curve["points"], optimum, strict=True):
        pools = "-" if not pool else f"{point['num_blocks'] / pool:.2g}"
        rows.append((pools, f"{point['num_blocks']:,}", *_hit_cells(point, best, in_bytes)))
    rows.append(
        (
            "no limit",
            f"{curve['infinite']['num_blocks']:,}",
            *_hit_cells(curve["infinite"], curve["infinite"], in_bytes),
        )
    )
    columns = ("pools", f"blocks of {curve['block_size']}", "memory" if in_bytes else "tokens", "LRU", "optimum")
    return table("Prompt tokens served by the prefix cache", columns, rows, left=())


def _hit_cells(point: Document, best: Document, in_bytes: bool) -> tuple[str, str, str]:
    size = memory(point["bytes"]) if in_bytes else millions(point["tokens"])
    return size, percent(point["token_hit_rate"], 1), percent(best["token_hit_rate"], 1)


def _what_if_table(rows: list[Document]) -> Any:
    columns = ("one option changed", "GPUs", "blocks", "tokens", "LRU")
    cells = [
        (
            row["option"],
            f"{row['gpus']}",
            f"{row['num_gpu_blocks']:,}",
            millions(row["kv_cache_tokens"]),
            "-" if row["lru_token_hit_rate"] is None else percent(row["lru_token_hit_rate"], 1),
        )
        for row in rows
    ]
    return table("What changes the answer", columns, cells)


def _print_lists(out: Any, document: Document) -> None:
    plan = document["plan"]
    lists = {
        "Not in this report": [f"{part}: {reason}" for part, reason in document["not_done"].items()],
        "Warnings": [warning for part in ("plan", "curve") if document[part] for warning in document[part]["warnings"]],
        "Smallest single change that makes it fit": _remedies(plan),
        "Assumed, because not given (the report lists every assumption)": [] if plan is None else plan["assumptions"],
    }
    for title, lines in lists.items():
        print_list(out, title, lines)


def _remedies(plan: Document | None) -> list[str]:
    if plan is None:
        return []
    return [
        " ".join(str(word) for word in (remedy["option"], remedy["value"]) if word is not None)
        + f" ({remedy['num_blocks']:,} blocks; {remedy['cost']})"
        for diagnosis in plan["diagnoses"]
        for remedy in diagnosis["remedies"]
    ]
