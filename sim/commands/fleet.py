"""`kvledger fleet`: what happens to a trace on several engines behind a router."""

from typing import Annotated, Any

import typer

from .replay import replay
from .shared_options import takes_options_of

EXPORTS = (
    "requests_out",
    "series_out",
    "prometheus_out",
    "openmetrics_out",
    "openmetrics_start",
    "perfetto_out",
)
NOT_OF_THE_COMMAND = ("n", "log", "log_flush")
# A search over many fleets writes no files and sends requests at their recorded times.
NOT_OF_A_FLEET = (*NOT_OF_THE_COMMAND, *EXPORTS, "closed_loop")


@takes_options_of(replay, leave_out=NOT_OF_THE_COMMAND)
def fleet(
    replicas: Annotated[int | None, typer.Option(help="Servers of the fleet; 2 unless given.")] = None,
    prefill_replicas: Annotated[
        int | None, typer.Option(help="Instead: servers that compute prompts only, with --decode-replicas.")
    ] = None,
    decode_replicas: Annotated[
        int | None, typer.Option(help="Servers that produce the output tokens, with --prefill-replicas.")
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "-dp", help="Ranks of a server, each with a ledger of its own.")
    ] = 1,
    routing: Annotated[
        str, typer.Option(help="round-robin, least-outstanding-work, sticky (conversations stay) or prefix-aware.")
    ] = "prefix-aware",
    routing_load_weight: Annotated[
        float | None, typer.Option(help="Prefix-aware: weight of outstanding prompt tokens; 1 unless given.")
    ] = None,
    decode_routing: Annotated[
        str | None, typer.Option(help="Of the decode servers; least-outstanding-work unless given.")
    ] = None,
    transfer_gb_s: Annotated[
        float | None,
        typer.Option(help="GB/s out of a prefill GPU and into a decode GPU (inf: no time). Needed with them."),
    ] = None,
    transfer_latency_ms: Annotated[
        float | None, typer.Option(help="Before the first byte of each transfer; 0 unless given.")
    ] = None,
    transfer_sharing: Annotated[
        str | None, typer.Option(help="Transfers on one link: fair, or fifo; fair unless given.")
    ] = None,
    transfer_bytes_per_block: Annotated[
        int | None, typer.Option(help="Bytes of a block on one GPU; the model's unless given.")
    ] = None,
    first_token_from: Annotated[
        str | None,
        typer.Option(
            help="Who sends the first token: prefill, or decode, which computes it again; prefill unless given."
        ),
    ] = None,
    event_delay_ms: Annotated[float, typer.Option(help="From an engine's commit to the router's knowing of it.")] = 0.0,
    host_blocks: Annotated[
        int | None, typer.Option(help="Host memory of each engine for evicted blocks, in blocks.")
    ] = None,
    host_gb_s: Annotated[
        float | None, typer.Option(help="GB/s between a GPU and host memory, each way (inf: no time). Needed with it.")
    ] = None,
    ssd_blocks: Annotated[int | None, typer.Option(help="SSD behind the host memory, in blocks.")] = None,
    ssd_gb_s: Annotated[float | None, typer.Option(help="GB/s from the SSD (inf: no time). Needed with it.")] = None,
    tier_bytes_per_block: Annotated[
        int | None, typer.Option(help="Bytes of a block on one GPU; the model's unless given.")
    ] = None,
    **given: Any,
) -> None:
    """Route a trace to several engines: latency, hits and load of the fleet and of each engine in it.

    With --prefill-replicas and --decode-replicas, each prompt is computed on one engine and copied to another.

    Example: kvledger fleet --workload conversation --replicas 4 --model llama-3.1-8b --gpu H100 --block-size 64

    Example: kvledger fleet --workload conversation --prefill-replicas 2 --decode-replicas 2 --transfer-gb-s 50 \
        --model llama-3.1-8b --gpu H100 --block-size 64
    """
    import attrs

    from ..exports.run_exports import ExportOptions, RunExports
    from ..fleet.disaggregated_replay import replay_disaggregated
    from ..fleet.disaggregation import DisaggregatedShape
    from ..fleet.fleet import FleetShape, replay_fleet
    from ..fleet.routing import make_router
    from ..report.console import print_json, progress
    from ..report.fleet import print_fleet
    from ..report.replay import trace_as_dict
    from ..scenario.engine_options import open_source, read_engine
    from ..scenario.fleet_options import DisaggregationOptions, TierOptions, with_tiers

    engine = with_tiers(
        read_engine(given),
        TierOptions(
            host_blocks=host_blocks,
            host_gb_s=host_gb_s,
            ssd_blocks=ssd_blocks,
            ssd_gb_s=ssd_gb_s,
            tier_bytes_per_block=tier_bytes_per_block,
        ),
    )
    pools = DisaggregationOptions(
        replicas=replicas,
        prefill_replicas=prefill_replicas,
        decode_replicas=decode_replicas,
        decode_routing=decode_routing,
        transfer_gb_s=transfer_gb_s,
        transfer_latency_ms=transfer_latency_ms,
        transfer_sharing=transfer_sharing,
        transfer_bytes_per_block=transfer_bytes_per_block,
        first_token_from=first_token_from,
    )
    router = make_router(routing, routing_load_weight)
    disaggregated = pools.shape(data_parallel_size, event_delay_ms / 1e3)
    shape = disaggregated or FleetShape(
        num_replicas=pools.num_replicas, data_parallel_size=data_parallel_size, event_delay_s=event_delay_ms / 1e3
    )
    source = open_source(given)
    exports = RunExports(
        ExportOptions(**{name: given[name] for name in EXPORTS}),
        engine.pool.allocator,
        engine.pool.facts,
        inputs=[*(given["trace"] or ()), *(given[name] for name in ("latency_table", "model") if given[name])],
        engines=shape.engine_names,
    )
    parts = attrs.evolve(
        engine.parts,
        listeners_of=exports.listeners_of,
        on_finished_on=exports.on_finished_on,
        macro_steps=exports.macro_steps,
        histograms=exports.histograms,
    )
    bar, task = progress("Replaying", total=given["limit"])

    def on_progress(count: int) -> None:
        bar.update(task, completed=count)

    with exports, bar:
        if isinstance(shape, DisaggregatedShape):
            report = replay_disaggregated(
                source,
                shape=shape,
                parts=parts,
                transfer=pools.transfer(engine.pool),
                prefill_router=router,
                decode_router=pools.decode_router(),
                trace_block_size=source.info.trace_block_size,
                closed_loop=given["closed_loop"],
                on_progress=on_progress,
            )
        else:
            report = replay_fleet(
                source,
                shape=shape,
                parts=parts,
                router=router,
                trace_block_size=source.info.trace_block_size,
                closed_loop=given["closed_loop"],
                on_progress=on_progress,
            )
        report.assumptions = {**engine.pool.facts, **report.assumptions}
        exports.publish(report)
    document = {"trace": trace_as_dict(source.info, source.info.trace_block_size), **report.to_json()}
    if given["json"]:
        print_json(document)
    else:
        print_fleet(document)
