"""`kvledger sampling`: what sharing saves when one prompt has many continuations."""

from typing import Annotated

import typer

from .trace_options import (
    FitTo,
    Limit,
    OnBadRow,
    Seed,
    SkipFirst,
    TimestampUnit,
    TokenizerName,
    TraceBlockSize,
    TraceFiles,
    TraceFormatName,
    WorkloadName,
)

# Every request is decoded token by token in several branches, so that a sample of them is what one wants to see first.
DEFAULT_LIMIT = 100


def sampling(
    trace: TraceFiles = None,
    workload: WorkloadName = None,
    fit: FitTo = None,
    n: Annotated[int | None, typer.Option("--n", help="Parallel samples of each prompt.")] = None,
    beam_width: Annotated[int | None, typer.Option(help="Beams of each prompt.")] = None,
    beam_replaced: Annotated[
        float | None, typer.Option(help="Chance that a beam is replaced by a copy of another in a step; 0.1.")
    ] = None,
    draft_tree: Annotated[
        str | None, typer.Option(help="Tree of drafts: children at each depth, such as 3,2,1.")
    ] = None,
    draft_acceptance_rate: Annotated[
        float | None, typer.Option(help="Chance that a depth of the tree is accepted, with --draft-tree.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens in a block.")] = 16,
    trace_format: TraceFormatName = None,
    timestamp_unit: TimestampUnit = None,
    trace_block_size: TraceBlockSize = None,
    tokenizer: TokenizerName = None,
    on_bad_row: OnBadRow = None,
    skip_first: SkipFirst = 0,
    limit: Limit = DEFAULT_LIMIT,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Run each request alone with its samples, beams or drafts, and count the blocks that sharing saves.

    Example: kvledger sampling --workload sharegpt --beam-width 4
    """
    from ..engine.sampling import run_sampling
    from ..report.console import console, percent, print_json, progress, table
    from ..report.replay import trace_as_dict
    from ..scenario.sampling_setup import read_sampling
    from ..scenario.trace_source import open_trace_or_workload

    how = read_sampling(n, beam_width, beam_replaced, draft_tree, draft_acceptance_rate)
    source = open_trace_or_workload(
        trace,
        workload,
        fit=fit,
        trace_format=trace_format,
        timestamp_unit=timestamp_unit,
        trace_block_size=trace_block_size,
        tokenizer=tokenizer,
        on_bad_row=on_bad_row,
        # What is drawn here has the seed too.
        seed=None if trace else seed,
        skip_first=skip_first,
        limit=limit,
    )
    bar, task = progress("Sampling", total=limit)
    with bar:
        report = run_sampling(
            source,
            how,
            block_size=block_size,
            seed=seed or 0,
            on_progress=lambda count: bar.update(task, completed=count),
        )
    figures = report.as_dict()
    if json:
        document = {
            "trace": trace_as_dict(source.info, source.info.trace_block_size),
            "sampling": how.as_dict(),
            "block_size": block_size,
            "seed": seed or 0,
            **figures,
        }
        print_json(document)
        return
    rows = [
        ("blocks saved by sharing, over all steps", percent(figures["memory_saving"])),
        ("the same, mean over requests", percent(figures["mean_memory_saving_per_request"])),
        ("forks", f"{figures['num_forks']:,}"),
        ("blocks copied on write", f"{figures['num_copied_blocks']:,}"),
        ("copied blocks a step", f"{figures['copied_blocks_per_step']:.3f}"),
        ("output tokens a step", f"{figures['output_tokens_per_step']:.3f}"),
        ("most blocks of one request", f"{figures['max_held_blocks']:,}"),
    ]
    out = console()
    settings = ", ".join(f"{name} {value}" for name, value in how.as_dict().items() if name != "kind")
    out.print(
        f"[bold]{how.as_dict()['kind']}[/bold] ({settings}) of {report.num_requests:,} requests of {source.info.name}"
    )
    out.print(table(None, ("what", "value"), rows))
    out.print(f"[dim]Each request runs alone; blocks of {block_size} tokens; prefix caching is off.[/dim]")
