"""The allocators of `kvledger compare` on a terminal: one table and a few sentences."""

from ..baselines.baselines import AllocatorUsage
from ..scenario.compare import CompareResult, assumptions, compare_sentences
from .console import console, table

DEFINITIONS = (
    "Shares of all KV memory, each slot counted once. Tokens: holds a token. Reserved: held by a running request that "
    "will fill it. Internal: held and never filled. External: the allocator's rounding, holes, and what no waiting "
    "request got."
)


def compare_table(usages: list[AllocatorUsage]):
    """The allocators side by side; fits 80 columns."""
    columns = ("Allocator", "Tokens", "Reserved", "Internal", "External", "Batch", "Max", "Preempted")
    rows = [
        (
            usage.name,
            *(f"{share:.1f} %" for share in _shares(usage)),
            f"{usage.mean_batch:,.2f}",
            usage.max_batch,
            usage.preemptions,
        )
        for usage in usages
    ]
    return table("Where the KV memory goes", columns, rows)


def print_compare(result: CompareResult) -> None:
    """Print the table and the sentences."""
    usages, setup = result.usages, result.setup
    out = console()
    trace, window = setup["trace"], setup["window"]
    out.print(
        f"{trace['name']}: {window['num_requests']:,} requests on {setup['num_slots']:,} token slots "
        f"({setup['num_slots_source']}), max_model_len {setup['max_model_len']:,} ({setup['max_model_len_source']}), "
        f"blocks of {setup['block_size']}.",
        markup=False,
    )
    out.print()
    out.print(compare_table(usages))
    out.print(DEFINITIONS, style="dim")
    for sentence in compare_sentences(usages, setup):
        out.print(f"\n{sentence}", markup=False)
    out.print("\nAssumptions", style="bold")
    for assumption in assumptions(usages, setup):
        out.print(f"- {assumption}", markup=False)


def _shares(usage: AllocatorUsage) -> tuple[float, float, float, float]:
    return usage.token_pct, usage.reservation_pct, usage.internal_pct, usage.external_pct
