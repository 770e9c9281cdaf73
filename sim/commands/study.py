"""`kvledger study`: plan, curve, replay and compare of one trace on one deployment, as one report."""

from typing import Annotated

import typer

from .trace_options import (
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


def study(
    trace: TraceFiles = None,
    workload: WorkloadName = None,
    model: Annotated[
        str | None, typer.Option("--model", "--config", help="Built-in model by name, or the path of a config.json.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Device preset: A10, L4, L40S, A100-80GB, H100, H200, B200, MI300X.")
    ] = None,
    total_memory: Annotated[str | None, typer.Option(help="What the driver reports, e.g. 79.19GiB.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Fraction of TOTAL memory; 0.9 unless given.")
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Pool size per GPU, pinned (8GiB or bytes); utilization is ignored.")
    ] = None,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="Blocks of the pool, whatever would fit.")] = None,
    max_model_len: Annotated[
        str | None, typer.Option(help="Longest request (8192, 32K), auto or -1 for the longest that fits.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests that run at the same time.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens that one step computes at most.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a block; 16 unless the model needs more.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Storage of keys and values.")] = "auto",
    quantization: Annotated[
        str | None, typer.Option(help="Weights: none, fp8, int8, int4, ...; the model's own unless given.")
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option("--tensor-parallel-size", "-tp", help="GPUs that split heads.")
    ] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages of layers.")
    ] = 1,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse cached prefixes.")] = True,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    startup_log: Annotated[
        str | None, typer.Option(help="A real start-up log of the deployment: calibrates the ledger.")
    ] = None,
    capacities: Annotated[
        str | None, typer.Option(help="Sizes of the curve in blocks of the trace; multiples of the pool unless given.")
    ] = None,
    trace_block_size: TraceBlockSize = None,
    trace_format: TraceFormatName = None,
    timestamp_unit: TimestampUnit = None,
    tokenizer: TokenizerName = None,
    request_rate: RequestRate = None,
    on_bad_row: OnBadRow = None,
    skip_first: SkipFirst = 0,
    limit: Limit = None,
    rate_scale: RateScale = 1.0,
    seed: Seed = None,
    output: Annotated[str, typer.Option(help="Folder of the report: study.json and index.html.")] = "kvledger-report",
    plots: Annotated[str | None, typer.Option(help="Folder for the page's plots as SVG and PNG files.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print study.json instead of the tables; the report is written all the same.")
    ] = False,
) -> None:
    """Plan, curve, replay and comparison of one trace on one deployment: the answer first, and a page to keep.

    Example: kvledger study --workload conversation --model llama-3.1-8b --gpu H100
    """
    given = dict(locals())

    from ..cli import EXIT_DOES_NOT_FIT
    from ..study.run import run_study

    if not run_study(given):
        raise typer.Exit(EXIT_DOES_NOT_FIT)
