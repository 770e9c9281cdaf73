"""How near the simulator comes to measured servers: errors run by run, and their means against the goals."""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ..latency.calibration import mean_absolute_percentage_error
from .measured_serving import MeasuredServer
from .served_run import ServedRun

GOALS_PCT = {"itl_mean": 10.0, "e2e_mean": 10.0, "ttft_mean": 20.0, "e2e_p99": 25.0, "ttft_p99": 25.0}
"""Mean absolute percentage error over the runs, at most."""

FIGURES = ("itl_mean", "ms_per_token", "e2e_mean", "e2e_p90", "e2e_p99", "ttft_mean", "ttft_p90", "ttft_p99")
_CHUNKS_AGREE = 0.05


@attrs.frozen(kw_only=True)
class ComparedRun:
    """One server: predicted and measured figures, ms, by name.

    Attributes:
        server: what was measured.
        run: what was predicted.
        chunks_per_token: measured text chunks after the first over the stated output tokens after the first.
    """

    server: MeasuredServer
    run: ServedRun
    chunks_per_token: float

    @classmethod
    def of(cls, server: MeasuredServer, run: ServedRun) -> "ComparedRun":
        """Compare a prediction with its record."""
        chunks = server.measured.chunks() / (server.workload.output_tokens - 1)
        return cls(server=server, run=run, chunks_per_token=chunks)

    @property
    def predicted(self) -> dict[str, float]:
        """By the names of `FIGURES`; every token is taken to be a chunk of its own."""
        return {**self.run.latencies, "ms_per_token": self.run.latencies["itl_mean"]}

    @property
    def measured(self) -> dict[str, float]:
        """By the names of `FIGURES`; `ms_per_token` from E2E and TTFT and the stated output length."""
        per_token = self.server.measured.ms_per_token(self.server.workload.output_tokens)
        return {**attrs.asdict(self.server.measured), "ms_per_token": per_token}

    @property
    def relative_errors(self) -> dict[str, float]:
        """Predicted over measured, minus 1, by figure."""
        return {name: self.predicted[name] / self.measured[name] - 1 for name in FIGURES}

    @property
    def chunks_agree(self) -> bool:
        """Whether the client saw about as many text chunks as the output has tokens.

        Where it did not (both Llama-2 runs), either fewer tokens came than stated or several shared a chunk, so the
        record's E2E and its mean gap cannot both be of the stated output; E2E is left out of the goals then.
        """
        return abs(self.chunks_per_token - 1) <= _CHUNKS_AGREE

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        server = self.server
        return {
            "id": server.name,
            "model": server.model,
            "gpu": server.gpu,
            "tensor_parallel_size": server.tensor_parallel_size,
            "predicted_ms": self.predicted,
            "measured_ms": self.measured,
            "error_pct": {name: error * 100 for name, error in self.relative_errors.items()},
            "chunks_per_token_measured": self.chunks_per_token,
            "e2e_in_goals": self.chunks_agree,
            "prefix_hit_rate": self.run.prefix_hit_rate,
            "preemptions": self.run.num_preemptions,
            "finished": self.run.num_finished,
            "assumptions": self.run.assumptions,
        }


def mape_over_runs(runs: Sequence[ComparedRun]) -> dict[str, float]:
    """Mean absolute percentage error of each figure; E2E over the runs whose record agrees with itself."""
    errors: dict[str, list[float]] = {name: [] for name in FIGURES}
    for run in runs:
        for name, error in run.relative_errors.items():
            if run.chunks_agree or not name.startswith("e2e"):
                errors[name].append(error)
    return {name: mean_absolute_percentage_error(values) for name, values in errors.items() if values}


def missed_goals(mape: dict[str, float]) -> Iterable[str]:
    """Figures whose error is above its goal."""
    return [name for name, goal in GOALS_PCT.items() if mape.get(name, 0.0) > goal]
