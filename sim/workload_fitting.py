"""From a trace to a seeded workload of the same shape, and how close the two are."""

from typing import Any

import attrs

from .prompt_blocks import read_prompt_blocks
from .traces import Trace
from .workload_closeness import Shape, closeness, closeness_sentence
from .workload_fit import NO_BLOCKS, FittedParameters, OutputLengths, fit_parameters
from .workload_fitted import fitted_requests
from .workload_stream import Workload, WorkloadModel, open_stream


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
