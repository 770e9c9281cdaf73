"""The kernels of a point's benchmark: its means are those of a replay of it with the same model."""

from pathlib import Path

import numpy as np
import pytest
from kvledger.core.errors import DoesNotFitError
from kvledger.sim.engine.engine import RunListener
from kvledger.sim.latency.kernels import KernelLatency
from kvledger.sim.latency.roofline import RooflineLatency
from kvledger.sim.measured.point_kernels import kernels_of_point
from kvledger.sim.measured.schedules import BenchmarkQuestion, run_benchmark

from tests.sim.kernel_database import generation_ms
from tests.sim.measured.test_points import point

pytestmark = pytest.mark.usefixtures("kernel_database")
SHORT = {"isl": "512", "osl": "128", "precision": "bf16", "batch_size": "4"}


@pytest.mark.parametrize("tp_size", ["1", "2"])
def test_means_are_those_of_a_replay_with_the_same_model(tp_size: str, tmp_path: Path) -> None:
    found = kernels_of_point(point(tmp_path / "points.csv", **SHORT, tp_size=tp_size))
    assert isinstance(found.model, KernelLatency)
    asked = BenchmarkQuestion(
        concurrency=4, input_len=512, output_len=128, max_num_seqs=1024, max_num_batched_tokens=8192, num_blocks=None
    )
    records = run_benchmark(asked, found.model, RunListener())
    ttft_s = np.mean([record.ttft_s for record in records]) + found.point.http_s
    tpot_s = np.mean([(record.e2e_s - record.ttft_s) / (record.num_output_tokens - 1) for record in records])
    assert found.means_s(found.model.factors) == pytest.approx((ttft_s, tpot_s), rel=1e-3)


def test_longer_contexts_within_an_entry_are_counted_by_their_mean(tmp_path: Path) -> None:
    found = kernels_of_point(point(tmp_path / "points.csv", **{**SHORT, "osl": "4096", "batch_size": "1"}))
    decode_s = found.kernels["attention_decode"] @ found.in_tpot
    mean_context = 0.9 * 512 + 0.9 * 4096 / 2
    assert decode_s == pytest.approx(32 * generation_ms(1, round(mean_context)) / 1e3, rel=0.03)


def test_without_tables_of_the_card_the_roofline_times_the_steps(tmp_path: Path) -> None:
    found = kernels_of_point(point(tmp_path / "points.csv", **SHORT, system="l4"))
    assert isinstance(found.model, RooflineLatency)
    assert found.dtypes == ""


def test_a_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DoesNotFitError):
        kernels_of_point(
            point(tmp_path / "points.csv", **SHORT, model_path="meta-llama/Llama-3.1-70B", system="l4", tp_size="1")
        )
