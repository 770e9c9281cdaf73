"""Result files of benchmark clients as points: what they state, and loads that were not fixed."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.measured.results import read_result
from kvledger.sim.scenario.scenario import Scenario

SERVER = Scenario(model="llama-3.1-8b", gpu="H200", tensor_parallel_size=2, quantization="fp8")
SUMMARY: dict[str, Any] = {
    "request_rate": "inf", "max_concurrency": 8, "completed": 10, "total_input_tokens": 5000,
    "total_output_tokens": 400, "mean_ttft_ms": 60.0, "mean_tpot_ms": 9.0,
}  # fmt: skip


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def detailed(starts: list[float], seconds: float = 1.0) -> dict[str, Any]:
    """As `--save-detailed` writes it: each request takes so long, a tenth of it to its first token."""
    count = len(starts)
    return {
        **SUMMARY, "start_times": starts, "input_lens": [100, 300] * (count // 2), "output_lens": [10] * count,
        "ttfts": [seconds / 10] * count, "itls": [[seconds / 10] * 9] * count,
    }  # fmt: skip


def test_a_summary_of_vllm_bench_is_a_point_of_its_means(tmp_path: Path) -> None:
    point = read_result(write(tmp_path / "bench.json", SUMMARY), SERVER)
    assert (point.concurrency, point.input_len, point.output_len, point.shortest) == (8, 500, 40, 1.0)
    assert (point.ttft_ms, point.tpot_ms) == (60.0, 9.0)
    assert (point.geometry.name, point.device.name, point.quantization) == ("llama-3.1-8b", "H200", "fp8")
    assert (point.tensor_parallel_size, point.is_requantized, point.name) == (2, True, "bench.json")


def test_a_run_request_by_request_shows_its_users_and_the_spread_of_its_lengths(tmp_path: Path) -> None:
    starts = [round(0.25 * (place % 4) + 1.001 * (place // 4), 6) for place in range(40)]
    point = read_result(write(tmp_path / "bench.json", detailed(starts)), SERVER)
    assert point.concurrency == 4
    assert point.shortest == pytest.approx((100 / 300 + 1) / 2)
    assert point.input_len * (1 + point.shortest) / 2 == pytest.approx(200, abs=1)
    assert point.ttft_ms == pytest.approx(100)
    assert point.tpot_ms == pytest.approx(100)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({**SUMMARY, "max_concurrency": None}, "request_rate inf, max_concurrency None: no fixed load"),
        ({**SUMMARY, "request_rate": 4.0}, "request_rate 4.0, max_concurrency 8: no fixed load"),
        ({**SUMMARY, "completed": 0}, "no request was answered"),
        (detailed([3.0 * (place // 4) for place in range(40)]), "no fixed load: up to 4 requests"),
        (detailed([0.0] * 40), "no fixed load: up to 40 requests"),
        ({"something": "else"}, "no run that is known here"),
    ],
)
def test_files_without_a_fixed_load_are_refused(document: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_result(write(tmp_path / "bench.json", document), SERVER)


def test_the_server_must_be_named_and_the_file_be_there(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with pytest.raises(InputError, match="give the --model and --gpu of the server"):
        read_result(path, Scenario(model="llama-3.1-8b"))
    with pytest.raises(InputError, match=r"bench.json: No such file"):
        read_result(path, SERVER)
