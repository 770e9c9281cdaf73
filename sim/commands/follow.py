"""`kvledger follow`: the shadow ledger of a running server, from its KV events."""

from typing import Annotated

import typer

from ..logs.follow_options import FollowOptions
from .declare import command


@command()
def follow(
    asked: FollowOptions,
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
        from ..logs.follow import Follower
    except ModuleNotFoundError as error:
        raise InputError(f"KV events need {error.name}: pip install 'kvledger[events]'") from None
    from ..logs.shadow_ledger import ASSUMPTIONS
    from ..report.logs import LINE_HEADER, describe_report, line_of

    with Follower(asked) as follower, ExitStack() as serving:
        if asked.prometheus_port is not None:
            from ...backends.sinks.metrics.endpoint import PrometheusEndpoint
            from ..logs.shadow_ledger import ShadowMetrics

            metrics = ShadowMetrics(follower.ledger, follower.order.counts)
            serving.enter_context(PrometheusEndpoint(metrics, asked.prometheus_port))
        if not json:
            print(LINE_HEADER, flush=True)
        try:
            last = follower.run(lambda report: print(dumps(report) if json else line_of(report), flush=True))
        except KeyboardInterrupt:
            last = follower.ledger.report(follower.order.counts)
    if json:
        print(dumps({**last, "assumptions": ASSUMPTIONS}))
    else:
        for line in describe_report(last, ASSUMPTIONS):
            print(line)
