"""Predictions of measured serving points, and their errors."""

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ...core.errors import InputError, KVLedgerError
from ..figures import Document
from ..latency.kernel_factors import KernelFactors, factors_in, read_factors
from ..latency.kernels import KernelLatency
from ..scenario.options import LATENCY, OUTPUT, TRAFFIC, option, options, texts_of
from ..scenario.results import Table
from ..scenario.scenario import Scenario
from .fitting import FittedFactors, fit_kernel_factors
from .point_kernels import PointKernels, kernels_of_point
from .points import LeftOut, MeasuredPoint, read_points
from .results import is_result, read_result


@attrs.frozen(kw_only=True)
class Prediction:
    """A point beside what the model says of it.

    Attributes:
        point: what was measured.
        ttft_ms, tpot_ms: predicted means.
        ttft_range_ms, tpot_range_ms: 90 % of measurements are expected inside; None if that is not known.
        shares: share of each class of kernels, and of the host, in TPOT.
        rests_on: `kernels` or `roofline`.
        is_calibrated: whether servers of this model on this card were measured for the factors.
    """

    point: MeasuredPoint
    ttft_ms: float
    tpot_ms: float
    ttft_range_ms: tuple[float, float] | None
    tpot_range_ms: tuple[float, float] | None
    shares: Mapping[str, float]
    rests_on: str
    is_calibrated: bool

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """Predicted / measured - 1 of TTFT and TPOT."""
        pairs = ((self.ttft_ms, self.point.ttft_ms), (self.tpot_ms, self.point.tpot_ms))
        ttft, tpot = (None if measured is None else predicted / measured - 1 for predicted, measured in pairs)
        return ttft, tpot

    @property
    def is_inside(self) -> tuple[bool | None, bool | None]:
        """Whether the measured TTFT and TPOT lie in the ranges."""
        found: list[bool | None] = []
        for span, measured in (
            (self.ttft_range_ms, self.point.ttft_ms),
            (self.tpot_range_ms, self.point.tpot_ms),
        ):
            found.append(None if span is None or measured is None else span[0] <= measured <= span[1])
        return found[0], found[1]

    def to_row(self) -> Document:
        """Plain values."""
        point, (ttft, tpot) = self.point, self.errors
        return {
            "name": point.name,
            "device": point.device.name,
            "model": point.geometry.name,
            "precision": point.precision,
            **{name: getattr(point, name) for name in _SHOWN},
            "ttft_ms": self.ttft_ms,
            "tpot_ms": self.tpot_ms,
            "measured_ttft_ms": point.ttft_ms,
            "measured_tpot_ms": point.tpot_ms,
            "ttft_error": ttft,
            "tpot_error": tpot,
            "rests_on": self.rests_on,
            "is_calibrated": self.is_calibrated,
            "shares": dict(self.shares),
        }


_SHOWN = (
    *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size"),
    *("concurrency", "input_len", "output_len", "engine_version"),
)


@attrs.frozen(kw_only=True, repr=False)
class ValidationResult:
    """Predictions of every point of a table that can be asked.

    Attributes:
        predictions: one for each point.
        left_out: rows without a prediction, and why.
        fitted: the fit to these points, if it was asked for.
    """

    predictions: Sequence[Prediction]
    left_out: Sequence[LeftOut]
    fitted: FittedFactors | None = None

    @property
    def coverage(self) -> float:
        """Share of the rows that have a prediction."""
        return len(self.predictions) / (len(self.predictions) + len(self.left_out))

    def summary(self, group: Callable[[Prediction], Any] = lambda _: "all") -> Table:
        """Mean absolute errors, bias and coverage of the intervals, by group."""
        groups: dict[Any, list[Prediction]] = {}
        for prediction in self.predictions:
            groups.setdefault(group(prediction), []).append(prediction)
        return Table.of_rows([{"group": str(name), **_summary(groups[name])} for name in sorted(groups)])

    def to_frame(self) -> Any:
        """A data frame with a row for each point."""
        return Table.of_rows([{**p.to_row(), "shares": None} for p in self.predictions]).to_frame()

    def to_dict(self) -> Document:
        """What `--json` prints."""
        return {
            "coverage": self.coverage,
            **({} if self.fitted is None else {"fit": self.fitted.summary()}),
            **{name: list(self.summary(group)) for name, group in GROUPS.items()},
            "points": [prediction.to_row() for prediction in self.predictions],
            "left_out": [attrs.asdict(row) for row in self.left_out],
        }

    def __repr__(self) -> str:
        """Count and errors."""
        (row,) = self.summary()
        return f"<ValidationResult: {len(self.predictions):,} points, TPOT {row['tpot_mape']:.1%}>"


_BUCKETS = (4, 16, 64, 256, 1 << 30)

GROUPS: Mapping[str, Callable[[Prediction], Any]] = {
    "all": lambda _: "all",
    "by_card": lambda p: p.point.device.name,
    "by_pair": lambda p: p.point.pair,
    "by_concurrency": lambda p: _BUCKETS[bisect_left(_BUCKETS, p.point.concurrency)],
    "by_calibration": lambda p: "calibrated pairs" if p.is_calibrated else f"other pairs ({p.rests_on})",
}
"""How points are grouped, by the names that `to_dict` has for it."""


def _summary(predictions: Sequence[Prediction]) -> Document:
    row: Document = {"points": len(predictions)}
    for number, name in enumerate(("ttft", "tpot")):
        errors = [error for p in predictions if (error := p.errors[number]) is not None]
        inside = [inside for p in predictions if (inside := p.is_inside[number]) is not None]
        row[f"{name}_mape"] = float(np.mean(np.abs(errors))) if errors else None
        row[f"{name}_median"] = float(np.median(np.abs(errors))) if errors else None
        row[f"{name}_bias"] = float(np.mean(errors)) if errors else None
        row[f"{name}_inside"] = float(np.mean(inside)) if inside else None
    return row


def predict(kernels: PointKernels, document: Mapping[str, Any] | None = None) -> Prediction:
    """Predict one point; the factors of a `document` replace the shipped ones."""
    model, factors = kernels.model, KernelFactors()
    if isinstance(model, KernelLatency):
        point = kernels.point
        known = document is not None
        factors = factors_in(document, point.device, point.geometry.name, model.dtypes) if known else model.factors
    is_measured = isinstance(model, KernelLatency)
    ttft_s, tpot_s = kernels.means_s(factors)
    spans = [None, None]
    if factors.spread is not None and is_measured:
        spans = [
            (value * 1e3 / (1 + spread), value * 1e3 * (1 + spread))
            for value, spread in zip((tpot_s, ttft_s), factors.spread, strict=True)
        ]
    in_tpot = np.where(kernels.is_uncaptured, factors.prefill, factors.step) * kernels.in_tpot
    shares = {
        name: float(getattr(factors, name) * seconds @ in_tpot) / tpot_s for name, seconds in kernels.kernels.items()
    }
    return Prediction(
        point=kernels.point,
        ttft_ms=ttft_s * 1e3,
        tpot_ms=tpot_s * 1e3,
        ttft_range_ms=spans[1],
        tpot_range_ms=spans[0],
        shares={**shares, "host": 1 - sum(shares.values())},
        rests_on="kernels" if is_measured else "roofline",
        is_calibrated=factors.is_of_pair,
    )


@options
class ValidateOptions:
    """A table of measured points, and what to do with it."""

    file: str = option(
        attrs.NOTHING, TRAFFIC, "CSV table of measured serving points, or result file of a benchmark client"
        " (docs/latency.md).", is_argument=True,
    )  # fmt: skip
    engine: str = option("vllm", TRAFFIC, "Rows of this engine only; all for every engine.")
    calibration: str | None = option(
        None, LATENCY, "Factors of an earlier --fit in place of the shipped ones.", metavar="FILE"
    )
    fit: str | None = option(None, OUTPUT, "Fit the factors to these points and write them here.", metavar="FILE")


def validate(
    asked: ValidateOptions,
    scenario: Scenario | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ValidationResult:
    """Predict every point of a table; with `fit`, by factors fitted to them, which are written to that file.

    A result file is one point; `scenario` has the fields `SHAPE` of the server that was measured. `on_progress` gets
    the points done and all points. Raises InputError: a file cannot be read or written, or no point can be asked.
    """
    server, left_out = scenario or Scenario(), list[LeftOut]()
    if asked.fit is not None and asked.calibration is not None:
        raise InputError(
            f"--calibration {asked.calibration} has no effect with --fit, which fits factors anew; leave one out"
        )
    if is_result(Path(asked.file)):
        if asked.engine != "vllm":
            raise InputError(
                f"--engine {asked.engine} has no effect on a result file, which is one point; leave it out"
            )
        points = [read_result(Path(asked.file), server)]
    elif given := texts_of(server):
        name, value = next(iter(given.items()))
        raise InputError(f"--{name} {value} has no effect on a table, whose rows state their servers; leave it out")
    else:
        points, left_out = read_points(Path(asked.file), None if asked.engine == "all" else asked.engine)
    kernels: list[PointKernels] = []
    for done, point in enumerate(points, start=1):
        try:
            kernels.append(kernels_of_point(point))
        except KVLedgerError as error:
            left_out.append(LeftOut(point.place, point.name, str(error)))
        if on_progress is not None:
            on_progress(done, len(points))
    if not kernels:
        raise InputError(f"{asked.file}: no row can be asked; the first: {left_out[0].reason}")
    if asked.fit is None:
        document = None if asked.calibration is None else read_factors(Path(asked.calibration))
        return ValidationResult(predictions=[predict(each, document) for each in kernels], left_out=left_out)
    measured = [
        each
        for each in kernels
        if isinstance(each.model, KernelLatency) and None not in (each.point.ttft_ms, each.point.tpot_ms)
    ]
    fitted = fit_kernel_factors(measured, f"fitted to {len(measured):,} points of {Path(asked.file).name}")
    try:
        Path(asked.fit).write_text(json.dumps(fitted.document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--fit {asked.fit}: {error.strerror or error}") from error
    return ValidationResult(
        predictions=[predict(each, fitted.document) for each in kernels], left_out=left_out, fitted=fitted
    )
