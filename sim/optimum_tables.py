"""`kvledger optimum` on a terminal."""

from collections.abc import Mapping
from typing import Any

from .console import console, percent, table
from .replay_report import shown
from .reuse_report import millions


def print_worth(document: Mapping[str, Any]) -> None:
    """The answer, the policies, and what it rests on (`document` is that of `--json`)."""
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(document['answer']['sentence'])}[/bold]", soft_wrap=True)
    pool = document["pool"]
    rows = [
        (
            row["policy"],
            percent(row["token_hit_rate"]),
            millions(row["hit_tokens"]),
            millions(row["computed_tokens"]),
        )
        for row in document["policies"]
    ]
    title = f"A pool of {pool['num_blocks']:,} blocks of {pool['block_size']} tokens"
    out.print(table(title, ("eviction", "served", "tokens served", "tokens computed"), rows))
    out.print("[bold]Assumptions[/bold] (change them with the options of the same names)")
    rows = [(name, shown(value)) for name, value in document["assumptions"].items()]
    out.print(table(None, ("assumption", "value"), rows, left=(0, 1)))
