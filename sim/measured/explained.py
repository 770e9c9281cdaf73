"""A measured run beside its simulation: errors, what they consist of, and factors that explain them."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ...core.types import LatencyModel
from ..engine.metrics import RequestRecord
from ..engine.replay import ReplayReport, replay
from ..figures import Document
from ..latency.kernel_factors import CalibratedLatency, KernelFactors
from ..latency.kernels import KernelLatency
from ..scenario.engine import Engine, engine_of
from ..scenario.options import OUTPUT, TRAFFIC, option, options
from ..scenario.results import Table
from ..scenario.scenario import Scenario
from .runs import MeasuredRun, read_run

Floats = NDArray[np.float64]
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("mean", "p50", "p90", "p99")
# Factors that a calibration tries: without effect, smallest, largest, and the first step of the search.
CANDIDATES: Mapping[str, tuple[float, float, float, float]] = {
    "step_s": (0.0, 0.0, 10e-3, 1e-3),
    "prefill_step_s": (0.0, 0.0, 100e-3, 5e-3),
    "step": (1.0, 0.3, 3.0, 0.1),
    "prefill": (1.0, 0.3, 3.0, 0.1),
}
_WORTH = 0.0005  # what a further factor must take off the mean error
# The sets of factors that are tried, the smaller ones first.
_SETS_BY_SIZE = (
    [(name,) for name in CANDIDATES],
    [("step_s", "prefill_step_s"), ("step", "prefill_step_s"), ("step", "prefill")],
)
_WORST = 10


@options
class ExplainOptions:
    """A measured run, and what to do with it."""

    run: str = option(
        attrs.NOTHING, TRAFFIC, "Result file of a benchmark client, request by request (docs/real_runs.md).",
        is_argument=True,
    )  # fmt: skip
    tokens: str | None = option(
        None, TRAFFIC, "File with the token ids of every prompt, so that prefix hits are known.", metavar="FILE"
    )
    calibrate: str | None = option(
        None, OUTPUT, "Fit the few factors that explain the run and write them here, for --calibration.", metavar="FILE"
    )
    output: str | None = option(None, OUTPUT, "Write a page with plots into this folder.", metavar="FOLDER")


@attrs.frozen(kw_only=True, eq=False)
class Simulated:
    """What a replay of the run says: arrays with a number for each request, in the run's order.

    Attributes:
        ttft_s, tpot_s, e2e_s, queue_s: seconds; NaN for the TPOT of one token.
        num_preemptions, num_cached_tokens: of each request.
        report: the replay.
    """

    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    queue_s: Floats
    num_preemptions: Floats
    num_cached_tokens: Floats
    report: ReplayReport


@attrs.frozen(kw_only=True)
class Calibration:
    """The fewest factors that explain a run.

    Attributes:
        factors: by name; the others stay as they were.
        before, after: mean error of the fitted requests and of the others, without and with them.
        document: what `--calibration` reads.
    """

    factors: Mapping[str, float]
    before: tuple[float, float]
    after: tuple[float, float]
    document: Mapping[str, Any]


@attrs.frozen(kw_only=True, eq=False, repr=False)
class ExplainedRun:
    """A run, its simulation, and why they differ.

    Attributes:
        run, simulated: both sides.
        calibration, calibrated: the factors, and the simulation with them; None unless asked for.
        planned_blocks: the pool that the plan gives, where the run states its own; None elsewhere.
        planned: the simulation with that pool.
        assumptions: of the replay.
    """

    run: MeasuredRun
    simulated: Simulated
    calibration: Calibration | None
    calibrated: Simulated | None
    planned_blocks: int | None
    planned: Simulated | None
    assumptions: Document

    def errors(self, simulated: Simulated | None = None) -> Table:
        """Measured and predicted statistics of each latency, and their relative errors."""
        rows: list[Document] = []
        for name in LATENCIES:
            measured, predicted = _measured(self.run, name), getattr(simulated or self.simulated, name)
            for statistic in STATISTICS:
                one, other = _statistic(measured, statistic), _statistic(predicted, statistic)
                rows.append(
                    {
                        "latency": name,
                        "statistic": statistic,
                        "measured_s": one,
                        "predicted_s": other,
                        "error": other / one - 1,
                    }
                )
        return Table.of_rows(rows)

    def shares(self) -> dict[str, float]:
        """Seconds by which each phase of a request is too long on average; they add up to the error of the mean E2E."""
        run, simulated = self.run, self.simulated
        ttft = simulated.ttft_s - _measured(run, "ttft_s")
        e2e = simulated.e2e_s - _measured(run, "e2e_s")
        out = {"decoding": float(np.mean(e2e - ttft))}
        if all(request.queue_s is not None for request in run.requests):
            queue = simulated.queue_s - np.array([request.queue_s for request in run.requests], dtype=float)
            return {"queueing": float(np.mean(queue)), "prompt": float(np.mean(ttft - queue)), **out}
        return {"queueing and prompt": float(np.mean(ttft)), **out}

    def worst(self) -> Table:
        """The requests whose E2E differs most, with both lives."""
        run, simulated = self.run, self.simulated
        gaps = np.abs(simulated.e2e_s - _measured(run, "e2e_s"))
        rows: list[Document] = []
        for place in np.argsort(-gaps, kind="stable")[:_WORST].tolist():
            request = run.requests[place]
            rows.append(
                {
                    "request": request.name,
                    "sent_s": request.sent_s,
                    "input_len": request.input_len,
                    "output_len": request.output_len,
                    **{f"measured_{name}": getattr(request, name) for name in LATENCIES},
                    **{f"predicted_{name}": _plain(getattr(simulated, name).item(place)) for name in LATENCIES},
                    "measured_queue_s": request.queue_s,
                    "predicted_queue_s": _plain(simulated.queue_s.item(place)),
                    "predicted_preemptions": int(simulated.num_preemptions[place]),
                }
            )
        return Table.of_rows(rows)

    def load(self) -> Table | None:
        """Requests running and waiting, and the share of the pool in use, per sample on both sides."""
        series, own = self.run.series, self.simulated.report.series
        if series is None or not len(series):
            return None
        names = {
            "running": "num_requests_running",
            "waiting": "num_requests_waiting",
            "kv_cache_usage": "kv_cache_usage",
        }
        times = series.columns["time_s"]
        columns: dict[str, Sequence[float]] = {"time_s": times}
        for name, ours in names.items():
            if name in series.columns:
                columns[f"measured_{name}"] = series.columns[name]
                columns[f"predicted_{name}"] = np.interp(times, own["time_s"], own[ours]).tolist()
        return Table(columns)

    def sentences(self) -> list[str]:
        """What the differences consist of, in words."""
        shares, e2e = self.shares(), float(np.mean(_measured(self.run, "e2e_s")))
        total = sum(shares.values())
        parts = ", ".join(f"{name} {seconds:+.3f} s" for name, seconds in shares.items())
        out = [f"A request takes {abs(total):.3f} s {_longer(total)} than measured ({total / e2e:+.1%}): {parts}."]
        if self.calibration is not None and self.calibration.factors:
            chosen = ", ".join(f"{name} {_shown(name, value)}" for name, value in self.calibration.factors.items())
            before, after = self.calibration.before, self.calibration.after
            out.append(
                f"Step times explain the error from {before[1]:.1%} down to {after[1]:.1%} on the requests that were "
                f"not fitted, with {chosen}."
            )
        elif self.calibration is not None:
            out.append("No change of step times makes the simulation fit better: kernels run as they were timed.")
        if self.planned is not None:
            change = float(np.mean(self.planned.e2e_s) - np.mean(self.simulated.e2e_s))
            out.append(
                f"Memory: the server has {self.assumptions['num_blocks']:,} blocks, the plan {self.planned_blocks:,}; "
                f"with the plan's pool a request would take {change:+.3f} s."
            )
        cached = float(self.simulated.num_cached_tokens.sum())
        if all(request.hash_ids is None for request in self.run.requests):
            out.append("Cache: the prompts' tokens are not given (--tokens), so no prefix hit is simulated.")
        else:
            inputs = sum(request.input_len for request in self.run.requests)
            out.append(f"Cache: {cached / inputs:.1%} of the prompts' tokens are found in the simulated cache.")
        load = self.load()
        if load is not None:
            for name in ("running", "waiting"):
                if f"measured_{name}" in load.columns:
                    one, other = (np.mean(load.columns[f"{side}_{name}"]) for side in ("measured", "predicted"))
                    out.append(f"Requests {name}: {other:.1f} on average, measured {one:.1f}.")
        return out

    def to_dict(self) -> Document:
        """What `--json` prints."""
        load = self.load()
        return {
            "run": {
                "name": self.run.name,
                "format": self.run.format,
                "requests": len(self.run.requests),
                "failed": self.run.num_failed,
                "facts": dict(self.run.facts),
            },
            "errors": list(self.errors()),
            "explanation": self.sentences(),
            "shares_s": self.shares(),
            "worst": list(self.worst()),
            "preemptions": self.simulated.report.preemptions["total"],
            "load": None if load is None else {name: list(values) for name, values in load.columns.items()},
            "calibration": None
            if self.calibration is None
            else {
                "factors": dict(self.calibration.factors),
                "error_before": {"fitted": self.calibration.before[0], "others": self.calibration.before[1]},
                "error_after": {"fitted": self.calibration.after[0], "others": self.calibration.after[1]},
                "errors": list(self.errors(self.calibrated)),
            },
            "assumptions": self.assumptions,
        }

    def to_frame(self) -> Any:
        """A data frame with a row for each request: both sides."""
        columns: dict[str, Sequence[Any]] = {"request": [request.name for request in self.run.requests]}
        for name in LATENCIES:
            columns[f"measured_{name}"] = _measured(self.run, name).tolist()
            columns[f"predicted_{name}"] = getattr(self.simulated, name).tolist()
        return Table(columns).to_frame()

    def __repr__(self) -> str:
        """Errors of the means."""
        means = {row["latency"]: row["error"] for row in self.errors() if row["statistic"] == "mean"}
        return f"<ExplainedRun: {', '.join(f'{name} {error:+.1%}' for name, error in means.items())}>"


def explain_run(
    scenario: Scenario, asked: ExplainOptions, on_part: Callable[[str], None] = lambda _: None
) -> ExplainedRun:
    """Replay a measured run on the engine of a scenario, and compare request by request.

    What files beside the run state of the server fills in what the scenario leaves open.

    Raises:
        InputError: a file cannot be read or written, or the scenario lacks something.
        DoesNotFitError: a request of the run does not fit.
    """
    if asked.calibrate is not None and not Path(asked.calibrate).resolve().parent.is_dir():
        raise InputError(f"--calibrate {asked.calibrate}: its folder does not exist")
    run = read_run(Path(asked.run), None if asked.tokens is None else Path(asked.tokens))
    scenario = with_facts(scenario, run)
    engine = engine_of(scenario)
    on_part("Replaying the run")
    simulated = simulate(run, engine, engine.parts.latency)
    planned_blocks, planned = None, None
    if "num_gpu_blocks_override" in run.facts and scenario.gpu is not None:
        on_part("Replaying it on the planned pool")
        by_plan = engine_of(scenario.evolve(num_gpu_blocks_override=None))
        planned_blocks = by_plan.pool.allocator.num_blocks
        planned = simulate(run, by_plan, by_plan.parts.latency)
    calibration, calibrated = None, None
    if asked.calibrate is not None:
        on_part("Calibrating")
        calibration = calibrate(run, engine, simulated)
        calibrated = simulate(run, engine, _with_factors(engine.parts.latency, calibration.factors))
        try:
            Path(asked.calibrate).write_text(json.dumps(calibration.document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--calibrate {asked.calibrate}: {error.strerror or error}") from error
    return ExplainedRun(
        run=run,
        simulated=simulated,
        calibration=calibration,
        calibrated=calibrated,
        planned_blocks=planned_blocks,
        planned=planned,
        assumptions={**engine.pool.facts, **simulated.report.assumptions},
    )


def with_facts(scenario: Scenario, run: MeasuredRun) -> Scenario:
    """The scenario with the run's own facts where it was left open.

    Raises InputError: an option contradicts what the run states.
    """
    plain = Scenario()
    changes: dict[str, Any] = {}
    for name, stated in {**run.facts, **({"http_ms": 0.0} if run.in_engine else {})}.items():
        given = getattr(scenario, name)
        if given == getattr(plain, name):
            changes[name] = stated
        elif given != stated:
            option_name = name.replace("_", "-")
            raise InputError(f"--{option_name} {given}: {run.name} says {stated}; leave the option out")
    return scenario.evolve(**changes)


def simulate(run: MeasuredRun, engine: Engine, latency: LatencyModel) -> Simulated:
    """Replay a run.

    Raises DoesNotFitError: a request can never fit.
    """
    records: dict[int, RequestRecord] = {}

    def finished(record: RequestRecord) -> None:
        records[int(record.request_id)] = record

    known = any(request.hash_ids is not None for request in run.requests)
    report = replay(
        run.traffic(),
        allocator=engine.parts.allocator,
        scheduler=engine.parts.scheduler,
        latency=latency,
        trace_block_size=run.hash_block_size if known else None,
        drafts=engine.parts.drafts_of(0),
        async_scheduling=engine.parts.async_scheduling,
        http_s=engine.parts.http_s,
        on_finished=finished,
    )
    missing = [request.name for place, request in enumerate(run.requests, start=1) if place not in records]
    if missing:
        first = report.rejections[0] if report.rejections else "it did not finish"
        raise InputError(f"{len(missing):,} requests of the run do not run here, the first is {missing[0]}: {first}")
    ordered = [records[place] for place in range(1, len(run.requests) + 1)]

    def column(name: str) -> Floats:
        return np.array([np.nan if (v := getattr(record, name)) is None else v for record in ordered], dtype=float)

    return Simulated(
        ttft_s=column("ttft_s"),
        tpot_s=column("tpot_s"),
        e2e_s=column("e2e_s"),
        queue_s=column("queue_time_s"),
        num_preemptions=column("num_preemptions"),
        num_cached_tokens=column("num_cached_tokens"),
        report=report,
    )


def calibrate(run: MeasuredRun, engine: Engine, simulated: Simulated) -> Calibration:
    """Fit the fewest factors of step times to every second tenth of a run, and judge them on the others.

    A pair of factors is taken only where it brings the mean error of the fitted requests further down than the best one
    alone, by a twentieth of a percentage point.
    """
    fitted = np.arange(len(run.requests)) * 10 // len(run.requests) % 2 == 0
    latency = engine.parts.latency

    def error_of(factors: Mapping[str, float], which: NDArray[np.bool_]) -> float:
        return _error(run, simulate(run, engine, _with_factors(latency, factors)), which) if factors else best

    best, chosen = _error(run, simulated, fitted), dict[str, float]()
    before = (best, _error(run, simulated, ~fitted))
    for sets in _SETS_BY_SIZE:
        error, factors = min(
            (_least_error(names, lambda factors: error_of(factors, fitted)) for names in sets), key=lambda each: each[0]
        )
        if error < best - _WORTH:
            best, chosen = error, factors
    after = before if not chosen else (best, error_of(chosen, ~fitted))
    return Calibration(factors=chosen, before=before, after=after, document=_document(run, latency, chosen))


def _least_error(
    names: Sequence[str], error_of: Callable[[Mapping[str, float]], float]
) -> tuple[float, dict[str, float]]:
    """The least error that some factors reach, and their values."""
    from scipy.optimize import minimize

    units = np.array([1e-3 if name.endswith("_s") else 1.0 for name in names])  # the search moves in milliseconds
    neutral, least, most, first = np.array([CANDIDATES[name] for name in names]).T

    def factors_of(values: Floats) -> dict[str, float]:
        return dict(zip(names, (values * units).tolist(), strict=True))

    found = minimize(
        lambda values: error_of(factors_of(np.asarray(values))),
        neutral / units,
        method="Nelder-Mead",
        bounds=list(zip(least / units, most / units, strict=True)),
        options={
            "maxfev": 14 * len(names),
            "xatol": 0.02,
            "fatol": 1e-4,
            "initial_simplex": np.vstack([neutral / units, neutral / units + np.diag(first / units)]),
        },
    )
    return float(found.fun), factors_of(np.asarray(found.x))


def _document(run: MeasuredRun, latency: LatencyModel, chosen: Mapping[str, float]) -> dict[str, Any]:
    source = f"calibrated to every second tenth of {run.name} ({run.format}, {len(run.requests):,} requests)"
    known = attrs.asdict(_factors_of(latency, chosen))
    plain = attrs.asdict(KernelFactors())
    values = {name: value for name, value in known.items() if value != plain[name] and name not in _NOT_KEPT}
    return {"source": source, "all": values, "kernels": [], "pairs": []}


_NOT_KEPT = ("source", "spread", "is_of_pair")


def _factors_of(latency: LatencyModel, chosen: Mapping[str, float]) -> KernelFactors:
    known = latency.factors if isinstance(latency, KernelLatency | CalibratedLatency) else KernelFactors()
    scaled = {
        name: value * getattr(known, name) if name in ("step", "prefill") else value + getattr(known, name)
        for name, value in chosen.items()
    }
    return attrs.evolve(known, **scaled)


def _with_factors(latency: LatencyModel, chosen: Mapping[str, float]) -> LatencyModel:
    """The model with chosen factors on top of its own."""
    factors = _factors_of(latency, chosen)
    if isinstance(latency, KernelLatency | CalibratedLatency):
        return attrs.evolve(latency, factors=factors)
    return CalibratedLatency.of(latency, factors)


def _error(run: MeasuredRun, simulated: Simulated, which: NDArray[np.bool_]) -> float:
    """Mean absolute relative error of mean, median and p99 of TTFT, TPOT and E2E over some requests."""
    errors: list[float] = []
    for name in LATENCIES:
        measured, predicted = _measured(run, name)[which], getattr(simulated, name)[which]
        errors += [abs(_statistic(predicted, s) / _statistic(measured, s) - 1) for s in ("mean", "p50", "p99")]
    return float(np.mean(errors))


def _measured(run: MeasuredRun, name: str) -> Floats:
    return np.array([np.nan if (v := getattr(r, name)) is None else v for r in run.requests], dtype=float)


def _statistic(values: Floats, name: str) -> float:
    return float(np.nanmean(values) if name == "mean" else np.nanpercentile(values, int(name[1:])))


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _longer(seconds: float) -> str:
    return "longer" if seconds > 0 else "less"


def _shown(name: str, value: float) -> str:
    return f"{value * 1e3:.2f} ms" if name.endswith("_s") else f"x {value:.3f}"
