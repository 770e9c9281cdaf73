"""The table of `kvledger sampling`."""

from ..figures import percent
from ..scenario.sampling import SamplingResult
from .console import console, table


def print_sampling(result: SamplingResult) -> None:
    """Print what sharing saved."""
    figures = result.report.as_dict()
    rows = [
        ("blocks saved by sharing, over all steps", percent(figures["memory_saving"])),
        ("the same, mean over requests", percent(figures["mean_memory_saving_per_request"])),
        ("forks", f"{figures['num_forks']:,}"),
        ("blocks copied on write", f"{figures['num_copied_blocks']:,}"),
        ("copied blocks per step", f"{figures['copied_blocks_per_step']:.3f}"),
        ("output tokens per step", f"{figures['output_tokens_per_step']:.3f}"),
        ("most blocks of one request", f"{figures['max_held_blocks']:,}"),
    ]
    out = console()
    settings = ", ".join(f"{name} {value}" for name, value in result.kind.items() if name != "kind")
    out.print(
        f"[bold]{result.kind['kind']}[/bold] ({settings}) of {result.report.num_requests:,} requests of "
        f"{result.trace['name']}"
    )
    out.print(table(None, ("figure", "value"), rows))
    out.print(f"[dim]Each request runs alone; blocks of {result.block_size} tokens; prefix caching is off.[/dim]")
