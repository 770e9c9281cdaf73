"""How many engines keep an SLO on a trace: full replays of fleets of different sizes and shapes."""

from collections.abc import Callable

import attrs

from .changed_trace import ChangedTrace
from .fleet import EngineParts, FleetShape, replay_fleet
from .request_record import RequestRecord
from .routing import make_router
from .slo import Slo, SloTally
from .slo_search import SearchResult, Trial, highest_meeting, smallest_meeting
from .traces import Trace


class _Missed(Exception):
    """The SLO cannot be met any more: the rest of the run would change nothing."""


@attrs.frozen(kw_only=True)
class Setting:
    """One set of assumptions under which fleets are tried.

    Attributes:
        open_trace: gives the trace afresh; called once a run.
        parts: of every engine.
        slo: what must be kept.
        routing: name of the router.
        routing_load_weight: of prefix-aware routing.
        data_parallel_size: ledgers a replica.
        event_delay_s: see `FleetShape`.
    """

    open_trace: Callable[[], Trace]
    parts: EngineParts
    slo: Slo
    routing: str = "prefix-aware"
    routing_load_weight: float | None = None
    data_parallel_size: int = 1
    event_delay_s: float = 0.0


def try_fleet(setting: Setting, num_replicas: int, num_requests: int | None = None) -> Trial:
    """Replay the trace on `num_replicas` replicas.

    Args:
        setting: everything else.
        num_replicas: replicas of the fleet.
        num_requests: how many requests the trace holds. Where it is given, the run ends as soon as more of them have
            missed a limit than the SLO leaves room for; the trial then has no figures but how far it came.
    """
    tally = SloTally(setting.slo)
    trace = setting.open_trace()
    routed = 0

    def on_progress(count: int) -> None:
        nonlocal routed
        routed = count

    def on_finished(record: RequestRecord) -> None:
        tally.finished(record)
        if num_requests is not None and tally.is_lost(num_requests):
            raise _Missed

    router = make_router(setting.routing, setting.routing_load_weight)
    shape = FleetShape(
        num_replicas=num_replicas,
        data_parallel_size=setting.data_parallel_size,
        event_delay_s=setting.event_delay_s,
    )
    try:
        report = replay_fleet(
            trace,
            shape=shape,
            parts=attrs.evolve(setting.parts, on_finished=on_finished),
            router=router,
            trace_block_size=trace.info.trace_block_size,
            on_progress=on_progress,
        )
    except _Missed:
        return Trial(value=num_replicas, verdict=tally.lost(), figures={"stopped_after_requests": routed})
    return Trial(
        value=num_replicas,
        verdict=tally.verdict(report.requests["total"]),
        figures={
            "requests": report.requests,
            "ttft_s": report.latencies["ttft_s"],
            "tpot_s": report.latencies["tpot_s"],
            "prefix_cache_hit_rate": report.prefix_cache["hit_rate"],
            "preemptions": report.preemptions["total"],
            "output_tokens_per_s": report.throughput["output_tokens_per_s"],
            "mean_busy_share": sum(one["busy_share"] for one in report.replicas) / len(report.replicas),
            "assumptions": report.assumptions,
        },
    )


def smallest_fleet(setting: Setting, *, start: int = 1, most: int, check_neighbours: bool = True) -> SearchResult:
    """The smallest number of replicas that keeps the SLO.

    Runs that miss it end early, but for the one below the answer (or the largest, where none keeps it): both sides of
    the bracket are full replays.
    """
    num_requests = sum(1 for _ in setting.open_trace())
    found = smallest_meeting(
        lambda count: try_fleet(setting, count, num_requests),
        start=start,
        most=most,
        check_neighbours=check_neighbours,
    )
    if found.answer == 1:
        return found
    nearest = found.trial(most if found.answer is None else found.answer - 1)
    if "stopped_after_requests" not in nearest.figures:
        return found
    full = try_fleet(setting, int(nearest.value))
    return attrs.evolve(found, trials=tuple(full if one is nearest else one for one in found.trials))


def highest_rate(setting: Setting, num_replicas: int) -> SearchResult:
    """How many times as fast as recorded the trace may come for `num_replicas` replicas to keep the SLO.

    The answer is a full replay; runs that miss the SLO end early.
    """
    num_requests = sum(1 for _ in setting.open_trace())

    def run(rate: float) -> Trial:
        faster = attrs.evolve(setting, open_trace=lambda: ChangedTrace(setting.open_trace(), rate=rate))
        return attrs.evolve(try_fleet(faster, num_replicas, num_requests), value=rate)

    return highest_meeting(run)
