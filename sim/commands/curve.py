"""`kvledger curve`: prefix-cache hit rate at every capacity, beside the optimum and other policies."""

from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import InputError
from .trace_options import (
    FitTo,
    Limit,
    OnBadRow,
    RateScale,
    RequestRate,
    Seed,
    SkipFirst,
    TimestampUnit,
    TokenizerName,
    TraceBlockSize,
    TraceFiles,
    TraceFormatName,
    WorkloadName,
)

if TYPE_CHECKING:
    from ..traces import Trace

# LRU beside a simpler policy, a cleverer one and the best possible; where blocks are cut smaller, LRU alone.
DEFAULT_POLICIES = "lru,fifo,s3fifo,optimum"


def curve(
    trace: TraceFiles = None,
    workload: WorkloadName = None,
    fit: FitTo = None,
    capacities: Annotated[
        str | None, typer.Option(help="Sizes in blocks, such as 1000,5000,10000; unless given, a 1-2-5 series.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Any of lru,fifo,lfu,s3fifo,sieve,length-aware,belady,optimum; the first one leads in --json. "
            f"Unless given: {DEFAULT_POLICIES}."
        ),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block of the cache; the trace's own unless given.")
    ] = None,
    trace_block_size: TraceBlockSize = None,
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Model name or config.json: shows sizes in bytes too.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Storage of keys and values, with --model.")] = "auto",
    trace_format: TraceFormatName = None,
    timestamp_unit: TimestampUnit = None,
    tokenizer: TokenizerName = None,
    request_rate: RequestRate = None,
    on_bad_row: OnBadRow = None,
    skip_first: SkipFirst = 0,
    limit: Limit = None,
    rate_scale: RateScale = 1.0,
    seed: Seed = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Show how much of the prompts a prefix cache serves, at every capacity.

    Example: kvledger curve --workload conversation --capacities 1000,10000,100000
    """
    from ..cache.capacity_curve import capacity_curve
    from ..report.console import print_json, progress
    from ..report.curve import CountedTrace, print_curve
    from ..scenario.trace_source import open_trace_or_workload

    source = open_trace_or_workload(
        trace,
        workload,
        fit=fit,
        trace_format=trace_format,
        timestamp_unit=timestamp_unit,
        trace_block_size=trace_block_size,
        tokenizer=tokenizer,
        request_rate=request_rate,
        on_bad_row=on_bad_row,
        seed=seed,
        skip_first=skip_first,
        limit=limit,
        rate_scale=rate_scale,
    )
    if model is None and kv_cache_dtype != "auto":
        raise InputError(f"--kv-cache-dtype {kv_cache_dtype} has no effect without --model")
    sizes = None if capacities is None else parse_capacities(capacities)
    policies = [
        name.strip() for name in (_default_policies(source, block_size) if policy is None else policy).split(",")
    ]
    bar, task = progress("Reading the trace")
    with bar:

        def on_point(name: str, num_blocks: int) -> None:
            bar.update(task, description=f"{name} at {num_blocks:,} blocks", advance=1)

        result = capacity_curve(
            CountedTrace(source, lambda count: bar.update(task, completed=count)),
            capacities=sizes,
            policies=policies,
            block_size=block_size,
            on_point=on_point,
        )
    size_bytes = None
    if model is not None:
        from ..scenario.model_bytes import bytes_per_block

        size_bytes = bytes_per_block(model, kv_cache_dtype, result.block_size)
    if json:
        print_json(result.as_dict(size_bytes))
    else:
        print_curve(result, size_bytes)


def parse_capacities(text: str) -> list[int]:
    """`1000,5000` -> [1000, 5000]. Raises `InputError` for anything that is not a whole number."""
    sizes: list[int] = []
    for piece in text.split(","):
        try:
            sizes.append(int(piece))
        except ValueError:
            raise InputError(
                f"--capacities {text}: {piece.strip()!r} is not a whole number of blocks; give sizes such as 1000,5000"
            ) from None
    return sizes


def _default_policies(source: "Trace", block_size: int | None) -> str:
    own = source.info.trace_block_size
    is_cut_smaller = own is not None and block_size is not None and block_size < own
    return "lru" if is_cut_smaller else DEFAULT_POLICIES
