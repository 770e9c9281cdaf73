"""`kvledger replay`: what happens to a trace on given hardware."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
    from ..logs.run_log import RunLog
    from ..traces import Trace


def replay(
    trace: TraceFiles = None,
    workload: WorkloadName = None,
    fit: FitTo = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "--config", help="Model name or config.json: its groups, and a planned pool."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Device preset, such as H100, with --model.")] = None,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="Blocks of the pool, the null block included. Needed without --model and --gpu.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block; 16, or what the model needs, unless given.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of the GPU's total memory for this engine.")
    ] = 0.9,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="GPUs a layer.")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages.")] = 1,
    quantization: Annotated[
        str | None, typer.Option(help="Weights: none, fp8, int8, int4, ...; the model's own unless given.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="Storage of keys and values.")] = "auto",
    kv_cache_memory_bytes: Annotated[
        str | None, typer.Option(help="Bytes for the KV cache per GPU, instead of the utilization.")
    ] = None,
    trace_block_size: TraceBlockSize = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request, tokens. Unless given: what the pool holds, at most 1,048,576.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens that one step computes at most.")] = 8192,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse cached prefixes.")] = True,
    enable_chunked_prefill: Annotated[bool, typer.Option(help="Compute long prompts over several steps.")] = True,
    long_prefill_token_threshold: Annotated[
        int, typer.Option(help="Most prompt tokens of one request a step; 0: no such limit.")
    ] = 0,
    scheduling_policy: Annotated[str, typer.Option(help="fcfs or priority.")] = "fcfs",
    preemption_victim: Annotated[
        str, typer.Option(help="Who gives way when blocks run out: last-admitted or least-computed.")
    ] = "last-admitted",
    watermark_blocks: Annotated[int, typer.Option(help="Blocks that an admission leaves free.")] = 0,
    eviction: Annotated[str, typer.Option(help="Order in which cached blocks are evicted.")] = "lru",
    preemption_mode: Annotated[str, typer.Option(help="recompute (vLLM V1) or swap to host memory.")] = "recompute",
    swap_space_blocks: Annotated[int, typer.Option(help="Blocks of host memory, with --preemption-mode swap.")] = 0,
    swap_link_gb_s: Annotated[
        float | None, typer.Option(help="GB/s between a GPU and host memory: swapped blocks take time. Needed to swap.")
    ] = None,
    swap_bytes_per_block: Annotated[
        int | None, typer.Option(help="Bytes of a block on one GPU; the model's unless given.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Drafts that a decode step verifies a request.")] = 0,
    draft_acceptance_rate: Annotated[
        float | None, typer.Option(help="Probability that a draft is right if the one before was; needed with drafts.")
    ] = None,
    async_scheduling: Annotated[bool, typer.Option(help="Decide each step while the one before it runs.")] = False,
    latency: Annotated[
        str | None,
        typer.Option(help="linear, roofline or table; unless given, roofline with --model and linear without."),
    ] = None,
    base_ms: Annotated[float | None, typer.Option(help="Linear: fixed cost of a step; 5 unless given.")] = None,
    us_per_prefill_token: Annotated[
        float | None, typer.Option(help="Linear: each prefill token; 25 unless given.")
    ] = None,
    us_per_decoding_sequence: Annotated[
        float | None, typer.Option(help="Linear: each decoding sequence; 20 unless given.")
    ] = None,
    latency_table: Annotated[str | None, typer.Option(help="Table: a CSV of measured steps.")] = None,
    closed_loop: Annotated[
        bool | None,
        typer.Option(
            "--closed-loop/--open-loop",
            help="Whether a session's next turn waits for the answer before it and thinks, or comes at its recorded "
            "time. Unless given: closed where the trace has think times.",
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Parallel samples of each request, as n requests of one prompt.")] = 1,
    trace_format: TraceFormatName = None,
    timestamp_unit: TimestampUnit = None,
    tokenizer: TokenizerName = None,
    request_rate: RequestRate = None,
    on_bad_row: OnBadRow = None,
    skip_first: SkipFirst = 0,
    limit: Limit = None,
    rate_scale: RateScale = 1.0,
    seed: Seed = None,
    requests_out: Annotated[
        str | None, typer.Option(help="A row for each finished request, to FILE.csv, .jsonl or .parquet.")
    ] = None,
    series_out: Annotated[
        str | None, typer.Option(help="KV cache usage, running and waiting over time, to FILE.csv, .jsonl or .parquet.")
    ] = None,
    prometheus_out: Annotated[
        str | None, typer.Option(help="The final state as Prometheus text under vLLM's metric names, to FILE.")
    ] = None,
    openmetrics_out: Annotated[
        str | None,
        typer.Option(
            help="The same every 15 s of the run, as OpenMetrics that Prometheus takes in as history, to FILE."
        ),
    ] = None,
    openmetrics_start: Annotated[
        int | None, typer.Option(help="When that run is to have started: seconds since 1970.")
    ] = None,
    perfetto_out: Annotated[
        str | None, typer.Option(help="Engine steps and requests for ui.perfetto.dev, to FILE.json or .json.gz.")
    ] = None,
    plots: Annotated[
        str | None, typer.Option(help="Folder for the plots (load over time, latencies) as SVG and PNG files.")
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="Record every commit in this folder: see kvledger log and kvledger log replay.")
    ] = None,
    log_flush: Annotated[
        str | None, typer.Option(help="When commits reach the disk: commit, 100commits or 50ms (unless given).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the tables.")] = False,
) -> None:
    """Replay a trace through allocator, scheduler and latency model: latency, hits, preemptions, occupancy.

    Example: kvledger replay --workload conversation --num-gpu-blocks-override 50000 --block-size 512
    Example: kvledger replay --workload conversation --model llama-3.1-8b --gpu H100
    """
    options = dict(locals())

    from contextlib import ExitStack
    from pathlib import Path

    from ...core.errors import InputError
    from ...core.quantities import parse_bytes
    from ...core.scheduler.config import SchedulerConfig
    from ..engine.drafts import DraftAcceptance
    from ..engine.replay import replay as replay_trace
    from ..exports.run_exports import ExportOptions, RunExports
    from ..report.console import print_json, progress
    from ..report.plot_files import write_plots
    from ..report.plots import replay_plots
    from ..report.replay import print_replay, trace_as_dict
    from ..scenario.replay_setup import LatencyOptions, PoolOptions, make_latency, make_pool
    from ..scenario.trace_source import open_trace_or_workload
    from ..study.parts import latency_distributions
    from ..workloads.samples import SampledTrace

    pool = make_pool(
        PoolOptions(
            model=model,
            gpu=gpu,
            gpu_memory_utilization=gpu_memory_utilization,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_memory_bytes=None
            if kv_cache_memory_bytes is None
            else parse_bytes(kv_cache_memory_bytes, "--kv-cache-memory-bytes"),
            num_gpu_blocks_override=num_gpu_blocks_override,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            watermark_blocks=watermark_blocks,
            eviction=eviction,
        )
    )
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
        # With drafts the seed has an effect on any trace.
        seed=None if trace and request_rate is None and draft_acceptance_rate is not None else seed,
        skip_first=skip_first,
        limit=limit,
        rate_scale=rate_scale,
    )
    if n != 1:
        source = SampledTrace(source, n)
    step_latency = make_latency(
        LatencyOptions(
            latency=latency,
            base_ms=base_ms,
            us_per_prefill_token=us_per_prefill_token,
            us_per_decoding_sequence=us_per_decoding_sequence,
            latency_table=latency_table,
            swap_link_gb_s=swap_link_gb_s,
            swap_bytes_per_block=swap_bytes_per_block,
        ),
        pool,
    )
    if (preemption_mode == "swap") != (swap_link_gb_s is not None):
        raise InputError("--preemption-mode swap and --swap-link-gb-s go together: copies take time")
    if (num_speculative_tokens > 0) != (draft_acceptance_rate is not None):
        raise InputError("--num-speculative-tokens and --draft-acceptance-rate go together; neither has a default")
    drafts = None if draft_acceptance_rate is None else DraftAcceptance(draft_acceptance_rate, seed or 0)
    exports = RunExports(
        ExportOptions(
            requests_out=requests_out,
            series_out=series_out,
            prometheus_out=prometheus_out,
            openmetrics_out=openmetrics_out,
            openmetrics_start=openmetrics_start,
            perfetto_out=perfetto_out,
        ),
        pool.allocator,
        pool.facts,
        inputs=[*(trace or ()), *(name for name in (latency_table, model) if name is not None)],
    )
    if log is None and log_flush is not None:
        raise InputError(f"--log-flush {log_flush} has no effect without --log; leave it out")
    recorder = None if log is None else start_log(log, log_flush or "50ms", options, source)
    # On a terminal the requests are counted first, for an estimate of the time left.
    bar, task = progress("Replaying", total=sum(1 for _ in source) if sys.stderr.isatty() else None)
    with ExitStack() as opened:
        for part in (exports, bar, *([] if recorder is None else [recorder])):
            opened.enter_context(part)
        report = replay_trace(
            source if recorder is None else recorder.trace,
            allocator=pool.allocator,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=enable_chunked_prefill,
                long_prefill_token_threshold=long_prefill_token_threshold,
                policy=scheduling_policy,
                preemption_victim=preemption_victim,
                preemption_mode=preemption_mode,
                swap_space_blocks=swap_space_blocks,
                num_speculative_tokens=num_speculative_tokens,
            ),
            latency=step_latency,
            drafts=drafts,
            async_scheduling=async_scheduling,
            trace_block_size=source.info.trace_block_size,
            closed_loop=closed_loop,
            listeners=[*exports.listeners, *([] if recorder is None else [recorder])],
            on_finished=exports.on_finished,
            macro_steps=exports.macro_steps,
            on_progress=None if bar.disable else lambda count: bar.update(task, completed=count),
        )
        report.assumptions = {**pool.facts, **report.assumptions}
        exports.publish(report)
    document = {"trace": trace_as_dict(source.info, source.info.trace_block_size), **report.to_json()}
    if plots is not None:
        write_plots(replay_plots(document, latency_distributions(report.snapshot or {})), Path(plots))
    if json:
        print_json(document)
    else:
        print_replay(document)


def start_log(directory: str, flush: str, options: dict[str, Any], source: "Trace") -> "RunLog":
    """The log that a replay writes: a listener, and the trace that it notes as it is read."""
    from ..traces.event_log import need_log_libraries

    need_log_libraries()
    from ...backends.sinks.log.flush_policy import FlushPolicy
    from ..logs.run_log import RunLog

    return RunLog(directory, command="replay", options=options, trace=source, flush=FlushPolicy.parse(flush))
