"""`kvledger follow`: the shadow ledger of a running server, from its KV events."""

from typing import Annotated

import typer


def follow(
    endpoint: Annotated[str, typer.Argument(help="Where KV events are published, such as tcp://host:5557; or a file.")],
    replay_endpoint: Annotated[str | None, typer.Option(help="Where missed batches can be asked for.")] = None,
    topic: Annotated[str, typer.Option(help="Prefix of the topics to follow.")] = "",
    snapshots: Annotated[
        bool, typer.Option(help="The producer gives its whole state on request (kvledger's own does).")
    ] = False,
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="Blocks of the server's pool. Unless given: the most that were seen at once.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two lines.")] = 5.0,
    duration: Annotated[float | None, typer.Option(help="Seconds to follow; until interrupted unless given.")] = None,
    continuation_s: Annotated[
        float, typer.Option(help="Blocks right behind a sequence belong to it if they come within so many seconds.")
    ] = 2.0,
    record: Annotated[
        str | None, typer.Option(help="Keep the stream in this file, which can be followed again.")
    ] = None,
    trace_out: Annotated[
        str | None, typer.Option(help="Write the requests seen to this file, a Mooncake trace for kvledger curve.")
    ] = None,
    prometheus_port: Annotated[
        int | None, typer.Option(help="Serve the figures for Prometheus on this port of 127.0.0.1.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a line, the assumptions in the last.")
    ] = False,
) -> None:
    """Follow a server's KV events: occupancy, churn, hits, and what twice the memory would bring, while it runs.

    Example: kvledger follow tcp://127.0.0.1:5557 --replay-endpoint tcp://127.0.0.1:5558 --num-gpu-blocks 8192
    """
    from contextlib import ExitStack
    from json import dumps

    from ...core.errors import InputError

    try:
        from ..logs.follow import Follower, FollowOptions
    except ModuleNotFoundError as error:
        raise InputError(f"KV events need {error.name}: pip install 'kvledger[events]'") from None
    from ..logs.shadow_ledger import ASSUMPTIONS
    from ..report.logs import LINE_HEADER, describe_report, line_of

    if interval <= 0:
        raise InputError(f"--interval is {interval}; it must be above 0 seconds")
    options = FollowOptions(
        source=endpoint,
        replay_endpoint=replay_endpoint,
        topic=topic,
        offers_snapshots=snapshots,
        num_gpu_blocks=num_gpu_blocks,
        continuation_s=continuation_s,
        record=record,
        trace_out=trace_out,
    )
    with Follower(options) as follower, ExitStack() as serving:
        if prometheus_port is not None:
            from ...backends.sinks.metrics.endpoint import PrometheusEndpoint
            from ..logs.shadow_ledger import ShadowMetrics

            metrics = ShadowMetrics(follower.ledger, follower.order.counts)
            serving.enter_context(PrometheusEndpoint(metrics, prometheus_port))
        if not json:
            print(LINE_HEADER, flush=True)
        try:
            last = follower.run(
                interval, duration, lambda report: print(dumps(report) if json else line_of(report), flush=True)
            )
        except KeyboardInterrupt:
            last = follower.ledger.report(follower.order.counts)
    if json:
        print(dumps({**last, "assumptions": ASSUMPTIONS}))
    else:
        for line in describe_report(last, ASSUMPTIONS):
            print(line)
