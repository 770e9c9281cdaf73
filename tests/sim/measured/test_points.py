"""Tables of measured serving points: what a row asks, and which rows cannot be asked."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.measured.points import MeasuredPoint, read_points

ROW = {
    "id": "a", "backend": "vllm", "backend_version": "0.19.0", "model_path": "meta-llama/Llama-3.1-8B-Instruct",
    "system": "h200_sxm", "precision": "fp8", "mode": "agg", "isl": "1024", "osl": "128", "batch_size": "16",
    "tp_size": "2", "pp_size": "1", "attention_dp_size": "1", "moe_tp_size": "", "moe_ep_size": "",
    "silicon_ttft_ms": "50.5", "silicon_tpot_ms": "7.5",
}  # fmt: skip


def write_points(path: Path, *rows: Mapping[str, str]) -> Path:
    full = [{**ROW, **row} for row in rows]
    lines = [",".join(ROW), *(",".join(row[name] for name in ROW) for row in full)]
    path.write_text("\n".join(lines) + "\n")
    return path


def point(path: Path, **changed: str) -> MeasuredPoint:
    ((found,), left_out) = read_points(write_points(path, changed))
    assert left_out == []
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "points.csv"


def test_a_row_is_a_model_on_a_card_under_a_number_of_users(path: Path) -> None:
    found = point(path)
    assert (found.geometry.name, found.device.name, found.quantization) == ("llama-3.1-8b", "H200", "fp8")
    assert (found.concurrency, found.input_len, found.output_len) == (16, 1024, 128)
    assert (found.tensor_parallel_size, found.data_parallel_size, found.expert_parallel_size) == (2, 1, 1)
    assert (found.ttft_ms, found.tpot_ms) == (50.5, 7.5)
    assert (found.name, found.engine, found.engine_version, found.place) == ("a", "vllm", "0.19.0", "points.csv:2")
    assert found.pair == "H200 | llama-3.1-8b | fp8"


def test_precisions_are_quantizations_and_quantized_copies_are_known(path: Path) -> None:
    assert point(path, precision="bf16").quantization == "none"
    assert point(path, precision="fp4").quantization == "nvfp4"
    assert point(path, precision="fp4").is_requantized
    assert point(path).is_requantized  # an fp8 copy of a bf16 checkpoint
    assert not point(path, precision="bf16").is_requantized
    # The makers of gpt-oss quantized it themselves, whatever the table calls it.
    assert point(path, model_path="openai/gpt-oss-120b", precision="fp4").quantization == "auto"


def test_rows_with_data_parallel_attention_give_the_users_and_the_gpus_of_a_rank(path: Path) -> None:
    found = point(path, model_path="deepseek-ai/DeepSeek-V3", tp_size="8", attention_dp_size="8", moe_ep_size="8")
    assert (found.tensor_parallel_size, found.data_parallel_size, found.expert_parallel_size) == (1, 8, 8)
    assert found.concurrency == 16 * 8


def test_experts_on_more_gpus_than_one_attention_takes_mean_several_ranks(path: Path) -> None:
    found = point(path, model_path="openai/gpt-oss-120b", tp_size="2", moe_tp_size="2", moe_ep_size="4")
    assert (found.tensor_parallel_size, found.data_parallel_size, found.expert_parallel_size) == (2, 4, 4)
    assert found.concurrency == 16 * 4
    assert point(path, model_path="openai/gpt-oss-120b", tp_size="2", moe_ep_size="2").data_parallel_size == 1


def test_a_latency_that_was_not_measured_is_none(path: Path) -> None:
    assert point(path, silicon_ttft_ms="").ttft_ms is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_path": "nobody/Unknown-7B-FP8"}, "model nobody/Unknown-7B-FP8 is not built in"),
        ({"mode": "disagg"}, "mode 'disagg': prefill and decode on separate engines"),
        ({"system": "abacus"}, "'abacus' is no preset"),
        ({"isl": "long"}, "isl is 'long'"),
        ({"isl": "10.5"}, "isl is '10.5'"),
        ({"batch_size": ""}, "batch_size is ''"),
        ({"tp_size": "0"}, "tp_size is '0'"),
        ({"silicon_tpot_ms": "-1"}, "silicon_tpot_ms is '-1'"),
        ({"silicon_tpot_ms": "inf"}, "silicon_tpot_ms is 'inf'"),
    ],
)
def test_a_row_that_cannot_be_asked_is_left_out_with_its_line_and_the_reason(
    changed: dict[str, str], reason: str, path: Path
) -> None:
    points, (left_out,) = read_points(write_points(path, {}, changed))
    assert len(points) == 1
    assert (left_out.place, left_out.name) == ("points.csv:3", "a")
    assert reason in left_out.reason


def test_rows_of_other_engines_are_passed_over(path: Path) -> None:
    write_points(path, {}, {"backend": "sglang"})
    assert len(read_points(path)[0]) == 2
    (found,), left_out = read_points(path, "sglang")
    assert (found.place, left_out) == ("points.csv:3", [])
    with pytest.raises(InputError, match=r"points.csv: no row of trtllm"):
        read_points(path, "trtllm")


def test_files_that_are_no_tables_are_refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"points.csv: No such file"):
        read_points(path)
    path.write_text("id,backend\na,vllm\n")
    with pytest.raises(InputError, match=r"points.csv:1: the header lacks model_path, system, mode"):
        read_points(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"points.csv: not a CSV file"):
        read_points(path)
    path.write_text(",".join(ROW) + "\n")
    with pytest.raises(InputError, match=r"points.csv: no row of any engine"):
        read_points(path)
