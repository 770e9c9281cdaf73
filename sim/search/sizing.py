"""Searches how many engines keep an SLO on a trace, by replaying fleets of different sizes."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ..engine.metrics import RequestRecord
from ..fleet.fleet import EngineParts, FleetShape, replay_fleet
from ..fleet.routing import make_router
from ..traces import Trace
from ..traces.derived import ChangedTrace
from .kept import digest, kept
from .slo import TRIAL_KEYS, SearchResult, Slo, SloTally, Trial, highest_meeting, smallest_meeting

TRIAL_FORMAT = 3  # raised whenever a run of the same inputs may give other figures


class _Missed(Exception):
    """The SLO cannot be met any more, so the rest of the run is skipped."""


@attrs.frozen(kw_only=True)
class Setting:
    """Everything about a run except the number of replicas.

    Attributes:
        open_trace: opens the trace again; called once per run.
        parts, slo, routing, routing_load_weight, data_parallel_size, event_delay_s: of every fleet.
        named: plain values that identify this setting among kept trials.
        kept_in: folder of finished trials; None: they are not kept.
    """

    open_trace: Callable[[], Trace]
    parts: EngineParts
    slo: Slo
    routing: str = "prefix-aware"
    routing_load_weight: float | None = None
    data_parallel_size: int = 1
    event_delay_s: float = 0.0
    named: Mapping[str, Any] = attrs.field(factory=dict)
    kept_in: str | None = None

    def at_rate(self, rate: float) -> "Setting":
        """The same setting with requests arriving `rate` times as fast."""
        changed = {**self.named, "rate": rate}
        return attrs.evolve(self, open_trace=lambda: ChangedTrace(self.open_trace(), rate=rate), named=changed)


class SearchWatch:
    """Callbacks of a search, which keep its runs and do nothing else.

    Attributes:
        trials: the runs of the current search by value; a full replay replaces a run that stopped early.
    """

    def __init__(self) -> None:
        self.trials: dict[float, Trial] = {}

    def starts(self, value: float, num_requests: int | None) -> None:
        """A run of `value` starts; the trace has `num_requests` requests, if known."""

    def routed(self, num_requests: int) -> None:
        """`num_requests` requests of the run have arrived."""

    def ended(self, trial: Trial) -> None:
        """A run ended."""
        self.trials[trial.value] = trial

    def left(self, num_runs: int) -> None:
        """At most `num_runs` runs are left."""

    def shape(self, text: str) -> None:
        """The search of one shape of engine starts."""

    def tornado(self, num_done: int, num_rows: int) -> None:
        """`num_done` assumptions of the tornado are done."""


def try_fleet(
    setting: Setting,
    num_replicas: int,
    *,
    num_requests: int | None = None,
    value: float | None = None,
    watch: SearchWatch | None = None,
) -> Trial:
    """Replay the trace on `num_replicas` replicas, or read the kept run.

    With `num_requests`, those of the trace, the run stops as soon as too many of them missed a limit; the trial then
    only says at which request it stopped. `value` is the trial's, `num_replicas` unless given.
    """
    watch = watch or SearchWatch()
    may_end_early = num_requests is not None
    watch.starts(num_replicas if value is None else value, num_requests)
    named = {**setting.named, "replicas": num_replicas, "may_end_early": may_end_early}
    document = kept(
        setting.kept_in,
        digest(TRIAL_FORMAT, named),
        lambda: _replayed(setting, num_replicas, num_requests, watch).as_dict(),
        required=TRIAL_KEYS,
    )
    trial = Trial.from_dict(document if value is None else {**document, "value": value})
    watch.ended(trial)
    return trial


def _replayed(setting: Setting, num_replicas: int, num_requests: int | None, watch: SearchWatch) -> Trial:
    tally = SloTally(setting.slo)
    trace = setting.open_trace()
    routed = 0

    def on_progress(count: int) -> None:
        nonlocal routed
        routed = count
        watch.routed(count)

    def on_finished(record: RequestRecord) -> None:
        tally.finished(record)
        if num_requests is not None and tally.is_lost(num_requests):
            raise _Missed

    router = make_router(setting.routing, setting.routing_load_weight)
    shape = FleetShape(
        num_replicas=num_replicas, data_parallel_size=setting.data_parallel_size, event_delay_s=setting.event_delay_s
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
            "e2e_s": report.latencies["e2e_s"],
            "prefix_cache_hit_rate": report.prefix_cache["hit_rate"],
            "preemptions": report.preemptions["total"],
            "output_tokens_per_s": report.throughput["output_tokens_per_s"],
            "mean_busy_share": sum(one["busy_share"] for one in report.replicas) / len(report.replicas),
            "assumptions": report.assumptions,
        },
    )


@attrs.frozen(kw_only=True)
class FleetSearch:
    """Searches the smallest number of replicas, up to `most`, that keeps the SLO."""

    most: int
    name: str = "replicas"

    def find(self, setting: Setting, *, start: float | None, probes: int, watch: SearchWatch) -> SearchResult:
        """Search; runs that miss the SLO stop early, except the one below the answer (without one, the largest)."""
        num_requests = sum(1 for _ in setting.open_trace())
        found = smallest_meeting(
            lambda count: try_fleet(setting, count, num_requests=num_requests, watch=watch),
            start=1 if start is None else int(start),
            most=self.most,
            probes=probes,
            on_left=watch.left,
        )
        if found.answer == 1:
            return found
        nearest = found.trial(self.most if found.answer is None else found.answer - 1)
        return _run_to_its_end(found, nearest, lambda: try_fleet(setting, int(nearest.value), watch=watch))

    def replay(self, setting: Setting, value: float) -> Trial:
        """Replay a fleet of `value` replicas."""
        return try_fleet(setting, int(value))


@attrs.frozen(kw_only=True)
class RateSearch:
    """Searches the highest arrival rate, relative to the trace, at which a fleet keeps the SLO."""

    num_replicas: int
    name: str = "rate_scale"

    def find(self, setting: Setting, *, start: float | None, probes: int, watch: SearchWatch) -> SearchResult:
        """Search; runs that miss the SLO stop early, except the one above the answer (without one, the slowest)."""
        num_requests = sum(1 for _ in setting.open_trace())

        def run(rate: float, num_requests: int | None = num_requests) -> Trial:
            faster = setting.at_rate(rate)
            return try_fleet(faster, self.num_replicas, num_requests=num_requests, value=rate, watch=watch)

        found = highest_meeting(run, start=1.0 if start is None else start, probes=probes, on_left=watch.left)
        above = [trial for trial in found.trials if found.answer is None or trial.value > found.answer]
        nearest = next((trial for trial in above if not trial.met), None)
        return found if nearest is None else _run_to_its_end(found, nearest, lambda: run(nearest.value, None))

    def replay(self, setting: Setting, value: float) -> Trial:
        """Replay the fleet at `value` times the rate."""
        return try_fleet(setting.at_rate(value), self.num_replicas, value=value)


Search = FleetSearch | RateSearch


def _run_to_its_end(found: SearchResult, missed: Trial, replay: Callable[[], Trial]) -> SearchResult:
    """Replace a run that stopped early by its full replay."""
    if "stopped_after_requests" not in missed.figures:
        return found
    full = replay()
    return attrs.evolve(found, trials=tuple(full if one is missed else one for one in found.trials))
