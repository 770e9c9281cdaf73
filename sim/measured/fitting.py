"""Fit the factors of measured kernels to measured serving points, and test them on points that were left out.

Three levels: factors that all servers share; one for the experts of each generation of GPUs and quantization; and
two for each pair of card and model, on steps with and without prompt tokens. The lower two are pulled towards 1 by the
little that few points say. Errors are relative (logarithms), and points that are far off count little.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from ..latency.kernel_factors import CLASSES, KernelFactors, kernels_of
from ..latency.kernel_tables import INSTALL
from .point_kernels import PointKernels

Floats = NDArray[np.float64]

# What is expected of a server before any was measured: (factor or seconds, how far from it is no surprise).
EXPECTED: Mapping[str, tuple[float, float]] = {
    "gemm": (1.0, 0.2),
    "experts": (1.0, 0.2),
    "attention_decode": (1.0, 0.3),
    "attention_prefill": (1.0, 0.3),
    "collectives": (1.0, 0.3),
    "head": (1.0, 0.3),
    "elementwise": (1.0, 1.0),
    "layer_s": (15e-6, 10e-6),
    "uncaptured_layer_s": (200e-6, 200e-6),
    "prefill_step_s": (8e-3, 8e-3),
    "step_s": (0.5e-3, 0.5e-3),
    "sequence_s": (2e-6, 3e-6),
}
_ERROR = 0.06  # relative error of a good prediction; repeated measurements differ by about as much
_PULL = 2.0  # how much an expected value counts beside the points
_TTFT_WEIGHT = 0.6  # repeated measurements of TTFT differ about twice as much as those of TPOT
_KERNELS_SPREAD = 0.35  # expected spread of the logarithm of a factor of one kind of kernels
_PAIR_SPREADS = (0.3, 0.4)  # the same of a pair's factors: steps that a CUDA graph holds, and the others
_BINS = 20  # entries of a condensed schedule, with prompt tokens and without
_SHARE_INSIDE = 0.9
_FOLDS = 5


@attrs.frozen(kw_only=True)
class Errors:
    """Relative errors of predictions, `predicted / measured - 1`, with the points in their order."""

    ttft: Floats
    tpot: Floats

    @staticmethod
    def of(predicted: tuple[Floats, Floats], measured: tuple[Floats, Floats]) -> "Errors":
        """From means in seconds, each (TTFT, TPOT)."""
        return Errors(ttft=predicted[0] / measured[0] - 1, tpot=predicted[1] / measured[1] - 1)


@attrs.frozen(kw_only=True, eq=False)
class FittedFactors:
    """The document of a fit, as kernel_factors.json holds it, and its errors in and out of sample.

    Attributes:
        document: `all`, `kernels`, `pairs`, `source`.
        in_sample: errors on the points of the fit.
        held_points: errors on every fifth of the points in turn, fitted to the others.
        held_pairs, held_models, held_cards: errors on each pair of card and model, on each model on all cards, and on
            each card with all models, fitted to the others.
    """

    document: Mapping[str, Any]
    in_sample: Errors
    held_points: Errors
    held_pairs: Errors
    held_models: Errors
    held_cards: Errors

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean absolute errors, medians and bias of TTFT and TPOT, in sample and out of sample."""
        out: dict[str, dict[str, float]] = {}
        for name in ("in_sample", "held_points", "held_pairs", "held_models", "held_cards"):
            errors: Errors = getattr(self, name)
            row: dict[str, float] = {}
            for latency, each in (("ttft", errors.ttft), ("tpot", errors.tpot)):
                row[f"{latency}_mape"] = float(np.mean(np.abs(each)))
                row[f"{latency}_median"] = float(np.median(np.abs(each)))
                row[f"{latency}_bias"] = float(np.mean(each))
            out[name] = row
        return out


class _Points:
    """The steps of all points in arrays, condensed to a few entries each."""

    def __init__(self, points: Sequence[PointKernels]) -> None:
        condensed = [_condensed(point) for point in points]
        self.points = points
        self.kernels = np.concatenate([part[0] for part in condensed])
        self.is_uncaptured = np.concatenate([part[1] for part in condensed])
        self.num_sampled = np.concatenate([part[2] for part in condensed])
        self.in_ttft = np.concatenate([part[3] for part in condensed])
        self.in_tpot = np.concatenate([part[4] for part in condensed])
        sizes = [len(part[1]) for part in condensed]
        self.starts = np.cumsum([0, *sizes[:-1]])
        self.owner = np.repeat(np.arange(len(points)), sizes)
        self.layers = np.array([point.model.num_layers for point in points])[self.owner]
        self.measured = (
            np.array([point.point.ttft_ms for point in points], dtype=float) / 1e3,
            np.array([point.point.tpot_ms for point in points], dtype=float) / 1e3,
        )
        self.http_s = np.array([point.point.http_s for point in points])
        self.pairs, self.pair = np.unique([point.point.pair for point in points], return_inverse=True)
        names = [kernels_of(p.point.device, p.dtypes) if "experts" in p.kernels else "" for p in points]
        self.kinds, self.kind = np.unique(names, return_inverse=True)

    def means(
        self, shared: Floats, of_kind: Floats, of_pair: tuple[Floats, Floats] | None = None
    ) -> tuple[Floats, Floats]:
        """Mean TTFT and TPOT of every point.

        `shared` are factors in the order of `EXPECTED`, `of_kind` those of experts, `of_pair` those of steps without
        and with prompt tokens.
        """
        values = dict(zip(EXPECTED, shared.tolist(), strict=True))
        kernels = self.kernels.copy()
        kernels[:, CLASSES.index("experts")] *= of_kind[self.kind][self.owner]
        columns: dict[str, Floats] = dict(zip(CLASSES, kernels.T, strict=True))
        if of_pair is not None:
            values |= {
                name: each[self.pair][self.owner] for name, each in zip(("step", "prefill"), of_pair, strict=True)
            }
        with attrs.validators.disabled():  # arrays, with a factor for each step
            factors = KernelFactors(**values)
        seconds = factors.seconds(columns, self.is_uncaptured, self.num_sampled, self.layers)
        ttft, tpot = (np.add.reduceat(seconds * weight, self.starts) for weight in (self.in_ttft, self.in_tpot))
        return ttft + self.http_s, tpot


def fit_kernel_factors(points: Sequence[PointKernels], source: str) -> FittedFactors:
    """Fit all levels to points, and predict each point from fits that have not seen it.

    Points without both latencies are left out; `source` says in a sentence what was measured. Raises InputError: no
    point is left.
    """
    points = [each for each in points if each.point.ttft_ms is not None and each.point.tpot_ms is not None]
    if not points:
        raise InputError(f"no point has both latencies, and kernel times of its card: {INSTALL}")
    data = _Points(points)
    everything = np.ones(len(points), dtype=bool)
    fitted = _fit(data, everything)
    folds = np.random.default_rng(0).integers(_FOLDS, size=len(points))
    held_points = _held_out(data, [folds == fold for fold in range(_FOLDS)])
    held_pairs, held_models, held_cards = (
        _held_out(data, [names == name for name in np.unique(names)])
        for names in (
            data.pair,
            np.array([each.point.geometry.name for each in points]),
            np.array([each.point.device.name for each in points]),
        )
    )
    return FittedFactors(
        document=_document(data, fitted, source, held_points, held_pairs),
        in_sample=Errors.of(data.means(*fitted), data.measured),
        held_points=held_points,
        held_pairs=held_pairs,
        held_models=held_models,
        held_cards=held_cards,
    )


_Fitted = tuple[Floats, Floats, tuple[Floats, Floats]]


def _held_out(data: _Points, parts: Iterable[NDArray[np.bool_]]) -> Errors:
    """Errors on each part, by a fit to all other points."""
    found = (np.empty(len(data.points)), np.empty(len(data.points)))
    for part in parts:
        means = data.means(*_fit(data, ~part))
        for out, mean in zip(found, means, strict=True):
            out[part] = mean[part]
    return Errors.of(found, data.measured)


def _fit(data: _Points, included: NDArray[np.bool_]) -> _Fitted:
    """Shared factors, those of kinds of kernels, and those of pairs: without CUDA graphs, and with them."""
    from scipy.optimize import least_squares

    expected, spread = np.array(list(EXPECTED.values())).T
    sizes = np.cumsum([len(expected), len(data.kinds), len(data.pairs)])
    weights = np.where(included, 1.0, 0.0) / _ERROR

    def levels(values: Floats) -> _Fitted:
        shared, of_kind, steps, prefills = np.split(values, sizes)
        return shared * spread, np.exp(of_kind), (np.exp(steps), np.exp(prefills))

    def residuals(values: Floats) -> Floats:
        ttft, tpot = data.means(*levels(values))
        errors = (np.log(tpot / data.measured[1]), _TTFT_WEIGHT * np.log(ttft / data.measured[0]))
        pulls = (values - start) / scales
        return np.concatenate([*(_bounded(error * weights) for error in errors), _PULL * pulls])

    num_pairs = len(data.pairs)
    start = np.concatenate([expected / spread, np.zeros(len(data.kinds) + 2 * num_pairs)])
    scales = np.repeat([1.0, _KERNELS_SPREAD, *_PAIR_SPREADS], [len(expected), len(data.kinds), num_pairs, num_pairs])
    least = np.where(np.arange(len(start)) < len(expected), 0.0, -2.0)
    return levels(np.asarray(least_squares(residuals, start, bounds=(least, np.inf), ftol=1e-5, xtol=1e-4).x))


def _bounded(errors: Floats) -> Floats:
    """Errors whose squares grow as the error itself where they are large (pseudo-Huber)."""
    return np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))


def _condensed(point: PointKernels) -> tuple[Floats, NDArray[np.bool_], Floats, Floats, Floats]:
    """A point's steps as a few mean ones: alike in their prompts and in the time of their kernels."""
    kernels = np.stack(
        [np.broadcast_to(point.kernels.get(name, 0.0), point.is_uncaptured.shape) for name in CLASSES], 1
    )
    weight = point.in_ttft / point.in_ttft.sum() + point.in_tpot / point.in_tpot.sum()
    order = np.lexsort((kernels.sum(1), point.is_uncaptured))
    passed = np.cumsum(weight[order])
    bins = np.minimum((passed / passed[-1] * 2 * _BINS).astype(int), 2 * _BINS - 1) * 2 + point.is_uncaptured[order]
    starts = np.flatnonzero(np.diff(bins, prepend=-1))

    def mean(values: Floats) -> Floats:
        total = np.add.reduceat(weight[order], starts)
        return np.add.reduceat((values.T * weight).T[order], starts) / (total[:, None] if values.ndim > 1 else total)

    in_ttft, in_tpot = (np.add.reduceat(each[order], starts) for each in (point.in_ttft, point.in_tpot))
    return mean(kernels), point.is_uncaptured[order][starts], mean(point.num_sampled), in_ttft, in_tpot


def _document(data: _Points, fitted: _Fitted, source: str, held_points: Errors, held_pairs: Errors) -> dict[str, Any]:
    shared, of_kind, of_pair = fitted

    def spread(errors: Errors, which: NDArray[np.bool_] | slice = slice(None)) -> list[float]:
        """What bounds the logarithm of measured / predicted in 90 % of the points."""
        return [
            round(float(np.expm1(np.quantile(np.abs(np.log1p(each[which])), _SHARE_INSIDE))), 3)
            for each in (errors.tpot, errors.ttft)
        ]

    pairs: list[dict[str, Any]] = []
    for number in range(len(data.pairs)):
        point = next(p for p, pair in zip(data.points, data.pair, strict=True) if pair == number)
        pairs.append(
            {
                "device": point.point.device.name,
                "model": point.point.geometry.name,
                "dtypes": point.dtypes,
                "points": int(np.count_nonzero(data.pair == number)),
                "step": round(float(of_pair[0][number]), 4),
                "prefill": round(float(of_pair[1][number]), 4),
                "spread": spread(held_points),
            }
        )
    kinds = [
        {"kernels": str(name), "experts": round(float(factor), 4)}
        for name, factor in zip(data.kinds, of_kind, strict=True)
        if name
    ]
    values = {name: float(f"{value:.4g}") for name, value in zip(EXPECTED, shared.tolist(), strict=True)}
    return {"source": source, "all": {**values, "spread": spread(held_pairs)}, "kernels": kinds, "pairs": pairs}
