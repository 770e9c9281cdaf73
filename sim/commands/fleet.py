"""`kvledger fleet`: what happens to a trace on several engines behind a router."""

from typing import Annotated, Any

import typer

from .replay import replay
from .shared_options import takes_options_of

NOT_OF_A_FLEET = (
    "closed_loop",
    "n",
    "requests_out",
    "series_out",
    "prometheus_out",
    "openmetrics_out",
    "openmetrics_start",
    "perfetto_out",
    "log",
    "log_flush",
)


@takes_options_of(replay, leave_out=NOT_OF_A_FLEET)
def fleet(
    replicas: Annotated[int, typer.Option(help="Servers of the fleet.")] = 2,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "-dp", help="Ranks of a server, each with a ledger of its own.")
    ] = 1,
    routing: Annotated[
        str, typer.Option(help="round-robin, least-outstanding-work, sticky (conversations stay) or prefix-aware.")
    ] = "prefix-aware",
    routing_load_weight: Annotated[
        float | None, typer.Option(help="Prefix-aware: weight of outstanding prompt tokens; 1 unless given.")
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

    Example: kvledger fleet --workload conversation --replicas 4 --model llama-3.1-8b --gpu H100 --block-size 64
    """
    from ..console import print_json, progress
    from ..engine_options import open_source, read_engine
    from ..fleet import FleetShape, replay_fleet
    from ..fleet_tables import print_fleet
    from ..replay_report import trace_as_dict
    from ..routing import make_router
    from ..tier_options import TierOptions, with_tiers

    shape = FleetShape(num_replicas=replicas, data_parallel_size=data_parallel_size, event_delay_s=event_delay_ms / 1e3)
    router = make_router(routing, routing_load_weight)
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
    source = open_source(given)
    bar, task = progress("Replaying", total=given["limit"])
    with bar:
        report = replay_fleet(
            source,
            shape=shape,
            parts=engine.parts,
            router=router,
            trace_block_size=source.info.trace_block_size,
            on_progress=lambda count: bar.update(task, completed=count),
        )
    report.assumptions = {**engine.pool.facts, **report.assumptions}
    document = {"trace": trace_as_dict(source.info, source.info.trace_block_size), **report.to_json()}
    if given["json"]:
        print_json(document)
    else:
        print_fleet(document)
