"""From a trace to a seeded workload of the same shape, and how close the two are."""

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..cache.lru_curve import LruCurve, lru_curve
from ..cache.prompt_blocks import PromptBlocks, read_prompt_blocks
from ..cache.reuse import reuse_times
from ..traces import Trace
from .fit import NO_BLOCKS, FittedParameters, OutputLengths, fit_parameters
from .fitted import fitted_requests
from .stream import Workload, WorkloadModel, open_stream

# How close a fitted workload is to its trace: lengths, arrivals and reuse of both, side by side.

FloatArray = npt.NDArray[np.float64]
PERCENTILES = (10, 50, 90, 99)
# Capacities at which hit rates are compared, as shares of the trace's distinct blocks.
CAPACITY_SHARES = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 1.0)


@attrs.frozen(eq=False)
class Shape:
    """What is compared of a stream of requests; `curve` is None where prompts carry no ids."""

    input_lengths: npt.NDArray[np.int64]
    output_lengths: npt.NDArray[np.int64]
    arrivals_s: FloatArray
    num_block_events: int
    num_distinct_blocks: int
    curve: LruCurve | None
    reuse_times_s: dict[str, float]

    @classmethod
    def of(cls, prompts: PromptBlocks, output_lengths: npt.NDArray[np.int64], has_ids: bool) -> "Shape":
        """The shape of prompts and the lengths of their answers."""
        return cls(
            prompts.input_lengths,
            output_lengths,
            prompts.arrivals_s,
            prompts.num_block_events,
            prompts.num_distinct_blocks,
            lru_curve(prompts) if has_ids else None,
            reuse_times(prompts) if has_ids else {},
        )


def closeness(trace: Shape, workload: Shape) -> dict[str, Any]:
    """Figures of both and their distances.

    `ks` is the Kolmogorov-Smirnov distance: the most by which two distributions differ at any value, 0 to 1. Hit
    rates are LRU, in shares of blocks, at the same capacities in blocks.
    """
    out: dict[str, Any] = {
        "requests": {"trace": len(trace.input_lengths), "workload": len(workload.input_lengths)},
        "input_length": _compared(trace.input_lengths, workload.input_lengths),
        "output_length": _compared(trace.output_lengths, workload.output_lengths),
        "gap_s": _compared(np.diff(trace.arrivals_s), np.diff(workload.arrivals_s)),
        "requests_per_s": {"trace": _rate(trace.arrivals_s), "workload": _rate(workload.arrivals_s)},
        "gap_variation": {"trace": _variation(trace.arrivals_s), "workload": _variation(workload.arrivals_s)},
    }
    if trace.curve is not None and workload.curve is not None:
        sizes = sorted({max(1, round(share * trace.num_distinct_blocks)) for share in CAPACITY_SHARES})
        rates = [
            {
                "num_blocks": size,
                "trace": trace.curve.at(size).hit_blocks / trace.num_block_events,
                "workload": workload.curve.at(size).hit_blocks / workload.num_block_events,
            }
            for size in sizes
        ]
        out["hit_rate"] = rates
        out["largest_hit_rate_difference"] = max(abs(rate["trace"] - rate["workload"]) for rate in rates)
        out["reuse_time_s"] = {"trace": trace.reuse_times_s, "workload": workload.reuse_times_s}
    return out


def closeness_sentence(figures: dict[str, Any]) -> str:
    """The gist, for a note on the terminal."""
    parts = [
        f"mean prompt {figures['input_length']['workload']['mean']:,.0f} tokens beside "
        f"{figures['input_length']['trace']['mean']:,.0f}",
        f"mean answer {figures['output_length']['workload']['mean']:,.1f} beside "
        f"{figures['output_length']['trace']['mean']:,.1f}",
        f"{figures['requests_per_s']['workload']:,.3g} requests a second beside "
        f"{figures['requests_per_s']['trace']:,.3g}",
    ]
    if "hit_rate" in figures:
        parts.append(f"LRU hit rates within {figures['largest_hit_rate_difference'] * 100:.1f} points")
    return "fitted workload beside its trace: " + ", ".join(parts)


def _compared(trace: npt.NDArray[Any], workload: npt.NDArray[Any]) -> dict[str, Any]:
    return {"trace": _figures(trace), "workload": _figures(workload), "ks": _ks_distance(trace, workload)}


def _figures(values: npt.NDArray[Any]) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        "mean": float(values.mean()),
        **{f"p{percent}": float(np.percentile(values, percent, method="inverted_cdf")) for percent in PERCENTILES},
    }


def _ks_distance(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float | None:
    if not len(one) or not len(other):
        return None
    values = np.concatenate((one, other))
    ranks = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)]
    return float(np.abs(ranks[0] - ranks[1]).max())


def _rate(arrivals_s: FloatArray) -> float | None:
    span = float(arrivals_s[-1] - arrivals_s[0]) if len(arrivals_s) else 0.0
    return (len(arrivals_s) - 1) / span if span else None


def _variation(arrivals_s: FloatArray) -> float | None:
    """Deviation of the gaps over their mean: 1 for a Poisson process, more for bursts."""
    gaps = np.diff(arrivals_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    return float(gaps.std()) / mean if mean else None


@attrs.frozen(eq=False)
class FittedWorkload:
    """A model of a trace. `open` gives workloads of it; `closeness` compares one with the trace.

    model = fit_workload(open_trace("conversation_trace.jsonl.gz"))
    replay(model.open(seed=1, limit=100_000), ...)
    """

    parameters: FittedParameters
    shape: Shape

    def model(self, closeness: dict[str, Any] | None = None) -> WorkloadModel:
        """The workload model; `closeness` goes into what the report says of it."""
        parameters = self.parameters
        return WorkloadModel(
            name=f"fitted to {parameters.source}",
            resembles=parameters.source,
            parameters=parameters,
            requests=fitted_requests,
            duration_s=parameters.duration_s or 1.0,
            trace_block_size=parameters.block_size,
            stated={**parameters.as_dict(), **({} if closeness is None else {"closeness": closeness})},
            about=None if closeness is None else closeness_sentence(closeness),
            timestamp_unit="us",
            format="fitted workload",
            full_blocks_only=parameters.full_blocks_only,
            links_turns=parameters.links_turns,
            records_think_times=parameters.records_think_times and parameters.links_turns,
        )

    def open(self, *, seed: int = 0, **window: Any) -> Workload:
        """A workload; options as in `open_stream`. It lasts as long as the trace unless told otherwise."""
        return open_stream(self.model(), seed=seed, **window)

    def closeness(self, seed: int = 0) -> dict[str, Any]:
        """Lengths, arrivals and reuse of as many requests as the trace has, beside the trace's own."""
        recorded = OutputLengths(self.open(seed=seed, limit=self.parameters.num_requests))
        prompts = read_prompt_blocks(recorded, NO_BLOCKS if self.parameters.block_size is None else None)
        generated = Shape.of(prompts, recorded.as_array(), self.parameters.block_size is not None)
        return closeness(self.shape, generated)


def fit_workload(trace: Trace) -> FittedWorkload:
    """Fit a workload to a trace: one pass over it, at 4 bytes a block event.

    Raises:
        InputError: the trace cannot be read.
    """
    parameters, prompts, output_lengths = fit_parameters(trace)
    return FittedWorkload(parameters, Shape.of(prompts, output_lengths, parameters.block_size is not None))


def open_fitted(trace: Trace, *, seed: int = 0, **window: Any) -> Workload:
    """Fit to a trace, measure how close the fit is, and open a workload that states both."""
    fitted = fit_workload(trace)
    return open_stream(fitted.model(fitted.closeness(seed)), seed=seed, **window)
