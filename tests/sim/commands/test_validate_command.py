"""`kvledger validate`, and `replay` with kernels that were profiled, from the command line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sim.latency.test_kernel_profile import write_profile
from tests.sim.measured.test_points import write_points
from tests.sim.measured.test_results import SUMMARY

Run = Callable[..., tuple[int, str, str]]
SHORT = {"isl": "256", "osl": "32", "tp_size": "1", "precision": "bf16"}


@pytest.fixture
def points(tmp_path: Path) -> Path:
    """A server of an H200 under six loads, one that the roofline times, and two rows that cannot be asked."""
    measured = [
        {**SHORT, "id": f"c{users}", "batch_size": users, "silicon_ttft_ms": ttft, "silicon_tpot_ms": tpot}
        for users, ttft, tpot in (
            *(("1", "40", "9"), ("2", "42", "9.2"), ("4", "50", "9.5")),
            *(("8", "60", "10"), ("16", "80", "11.5"), ("32", "120", "14")),
        )
    ]
    others = [{**SHORT, "system": "l4"}, {"mode": "disagg"}, {"model_path": "nobody/unknown"}]
    return write_points(tmp_path / "points.csv", *measured, *others)


def document(run: Run, *arguments: object) -> dict[str, Any]:
    code, out, err = run("validate", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.usefixtures("kernel_database")
def test_predictions_are_told_by_card_pair_and_load_beside_what_was_left_out(kvledger: Run, points: Path) -> None:
    found = document(kvledger, points)
    assert found["coverage"] == pytest.approx(7 / 9)
    assert [row["reason"] for row in found["left_out"]] == [
        "mode 'disagg': prefill and decode on separate engines",
        "model nobody/unknown is not built in",
    ]
    assert [(row["group"], row["points"]) for row in found["by_card"]] == [("H200", 6), ("L4", 1)]
    assert [row["group"] for row in found["by_pair"]] == ["H200 | llama-3.1-8b | bf16", "L4 | llama-3.1-8b | bf16"]
    rows = {row["name"]: row for row in found["points"]}
    assert {row["rests_on"] for name, row in rows.items() if name != "a"} == {"kernels"}
    assert rows["a"]["rests_on"] == "roofline"
    assert rows["c1"]["tpot_error"] == pytest.approx(rows["c1"]["tpot_ms"] / 9 - 1)
    assert rows["c1"]["tpot_ms"] < rows["c32"]["tpot_ms"]
    assert all(sum(row["shares"].values()) == pytest.approx(1) for row in rows.values())
    assert all(share >= 0 for row in rows.values() for share in row["shares"].values())
    mean = sum(abs(row["tpot_error"]) for row in rows.values()) / 7
    assert found["all"][0]["tpot_mape"] == pytest.approx(mean)


@pytest.mark.usefixtures("kernel_database")
def test_the_tables_are_printed(kvledger: Run, points: Path) -> None:
    code, out, err = kvledger("validate", points)
    assert (code, err) == (0, "")
    assert "7 of 9 measured points predicted (77.8 %)" in out
    for title in ("By card", "By concurrency, up to", "The 10 points that are furthest off in TPOT", "Left out"):
        assert title in out
    assert "1 rows: mode 'disagg'" in out
    assert "Of TPOT: " in out
    assert f"{1 << 30}" not in out


@pytest.mark.usefixtures("kernel_database")
def test_a_fit_written_to_a_file_gives_the_same_figures_as_that_file_in_a_later_run(
    kvledger: Run, points: Path, tmp_path: Path
) -> None:
    path = tmp_path / "factors.json"
    shipped, fitted = document(kvledger, points), document(kvledger, points, "--fit", path)
    assert set(fitted["fit"]) == {"in_sample", "held_points", "held_pairs", "held_models", "held_cards"}
    again = document(kvledger, points, "--calibration", path)
    assert {**fitted, "fit": None} == {**again, "fit": None}
    errors = [found["by_card"][0]["tpot_mape"] for found in (shipped, fitted)]
    assert errors[1] < errors[0]
    assert {row["is_calibrated"] for row in fitted["points"] if row["rests_on"] == "kernels"} == {True}
    code, out, _ = kvledger("validate", points, "--fit", path)
    assert code == 0
    assert "every fifth point left out in turn" in out


@pytest.mark.usefixtures("kernel_database")
def test_shares_of_kernels_count_the_factors_of_whole_steps(kvledger: Run, points: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.json"
    half = {"step": 0.5, "prefill": 0.5}
    path.write_text(json.dumps({"source": "half", "all": half, "kernels": [], "pairs": []}))
    rows = [row for row in document(kvledger, points, "--calibration", path)["points"] if row["rests_on"] == "kernels"]
    assert [row["shares"]["host"] for row in rows] == pytest.approx([0] * 6, abs=1e-9)  # no costs of the host are given


def refused(run: Run, *arguments: object) -> str:
    code, out, err = run("validate", *arguments)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.usefixtures("kernel_database")
def test_bad_files_end_with_one_line_and_exit_code_2(kvledger: Run, points: Path, tmp_path: Path) -> None:
    assert "nowhere.csv: No such file" in refused(kvledger, tmp_path / "nowhere.csv")
    assert "no row of sglang" in refused(kvledger, points, "--engine", "sglang")
    assert "own.json: No such file" in refused(kvledger, points, "--calibration", tmp_path / "own.json")
    (tmp_path / "own.json").write_text("{}")
    assert "own.json: not a file of factors" in refused(kvledger, points, "--calibration", tmp_path / "own.json")
    assert "--fit" in refused(kvledger, points, "--fit", tmp_path / "no" / "folder.json")
    bare = tmp_path / "bare.csv"
    bare.write_text("id,backend\na,vllm\n")
    assert "bare.csv:1: the header lacks model_path" in refused(kvledger, bare)
    only = write_points(tmp_path / "only.csv", {"mode": "disagg"})
    assert "no row can be asked; the first: mode 'disagg'" in refused(kvledger, only)


@pytest.mark.usefixtures("no_kernel_database")
def test_a_fit_needs_points_with_measured_kernels(kvledger: Run, points: Path, tmp_path: Path) -> None:
    found = document(kvledger, points)
    assert {row["rests_on"] for row in found["points"]} == {"roofline"}
    assert "kernel times" in refused(kvledger, points, "--fit", tmp_path / "factors.json")


BENCHMARK = ("replay", "--concurrency", 4, "--isl", 200, "--osl", 20, "--num-prompts", 20)
LLAMA = ("--model", "llama-3.1-8b", "--gpu", "H200")


def test_a_replay_takes_its_steps_from_profiled_kernels(kvledger: Run, tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "server")
    code, out, err = kvledger(*BENCHMARK, *LLAMA, "--kernel-profile", folder, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["requests"]["finished"] == 20
    assumptions = report["assumptions"]
    assert set(assumptions["kernel_sources"].values()) == {"profiled (server)"}
    assert assumptions["time_in_measured_kernels"] == "100.0% of all steps"
    code, _, err = kvledger(*BENCHMARK, *LLAMA, "--kernel-profile", tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err


@pytest.mark.usefixtures("kernel_database")
def test_a_replay_says_what_share_of_its_time_rests_on_measured_kernels(kvledger: Run) -> None:
    code, out, _ = kvledger(*BENCHMARK, *LLAMA, "--json")
    assert code == 0
    assumptions = json.loads(out)["assumptions"]
    assert assumptions["kernel_sources"]["gemm"] == "measured (bfloat16)"
    assert 0 < float(assumptions["time_in_measured_kernels"].partition("%")[0]) <= 100


@pytest.mark.usefixtures("kernel_database")
def test_a_result_file_is_one_point_of_the_server_that_options_name(
    kvledger: Run, points: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({**SUMMARY, "completed": 100, "total_input_tokens": 25600, "total_output_tokens": 3200}))
    found = document(kvledger, path, *LLAMA)
    (row,) = found["points"]
    assert (row["concurrency"], row["input_len"], row["output_len"]) == (8, 256, 32)
    assert row["tpot_error"] == pytest.approx(row["tpot_ms"] / 9 - 1)
    assert row["rests_on"] == "kernels"
    assert "give the --model and --gpu" in refused(kvledger, path)
    assert "--gpu H200 has no effect on a table" in refused(kvledger, points, "--gpu", "H200")


def test_factors_beside_a_fit_are_refused(kvledger: Run, points: Path, tmp_path: Path) -> None:
    code, _, err = kvledger("validate", points, "--fit", tmp_path / "new.json", "--calibration", "old.json")
    assert code == 2
    assert "--calibration old.json has no effect with --fit" in err
