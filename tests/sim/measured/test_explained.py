"""A measured run beside its simulation: a run that the simulation itself made is explained to the last digit."""

import json
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.errors import InputError
from kvledger.sim.measured.explained import ExplainedRun, ExplainOptions, explain_run
from kvledger.sim.scenario.engine import engine_of
from kvledger.sim.scenario.replay import replay_scenario
from kvledger.sim.scenario.scenario import Scenario

OF_SERVER: dict[str, Any] = {
    "num_gpu_blocks_override": 400,
    "block_size": 16,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "base_ms": 8.0,
    "us_per_prefill_token": 30.0,
    "us_per_decoding_sequence": 50.0,
}
OF_SIMULATION: dict[str, Any] = {**OF_SERVER, "base_ms": 5.0}
TRAFFIC: dict[str, Any] = {"input_len": 120, "output_len": 60, "request_rate": 4.0, "num_prompts": 60, "seed": 3}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server would have measured whose steps take 3 ms longer than the simulation says."""
    server = Scenario(**OF_SERVER, **TRAFFIC, range_ratio=0.5, http_ms=0.0)
    result = replay_scenario(server, engine=engine_of(server), keep_requests=True)
    rows = [
        {
            "request_id": row["request_id"],
            "input_toks": row["num_prompt_tokens"],
            "output_toks": row["num_output_tokens"],
            "queued_ts": row["arrival_s"],
            "scheduled_ts": row["arrival_s"] + row["queue_time_s"],
            "first_token_ts": row["arrival_s"] + row["ttft_s"],
            "last_token_ts": row["arrival_s"] + row["e2e_s"],
        }
        for row in result.requests
    ]
    path = tmp_path_factory.mktemp("run") / "server.req.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def explained(run_file: Path, of_engine: dict[str, Any] = OF_SIMULATION, **asked: Any) -> ExplainedRun:
    return explain_run(Scenario(**of_engine), ExplainOptions(run=str(run_file), **asked))


def test_a_run_of_the_same_engine_has_no_error(run_file: Path) -> None:
    result = explained(run_file, OF_SERVER)
    assert max(abs(row["error"]) for row in result.errors()) < 1e-6
    assert all(abs(seconds) < 1e-6 for seconds in result.shares().values())


def test_phases_add_up_to_the_error_of_a_request(run_file: Path) -> None:
    result = explained(run_file)
    e2e = next(row for row in result.errors() if (row["latency"], row["statistic"]) == ("e2e_s", "mean"))
    assert sum(result.shares().values()) == pytest.approx(e2e["predicted_s"] - e2e["measured_s"], abs=1e-6)
    assert set(result.shares()) == {"queueing", "prompt", "decoding"}
    assert e2e["error"] < -0.05


def test_a_calibration_finds_the_time_that_every_step_lacks(run_file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "server.json"
    result = explained(run_file, calibrate=str(kept))
    assert result.calibration is not None and result.calibrated is not None
    assert result.calibration.after[1] < 0.01 < result.calibration.before[1]
    assert max(abs(row["error"]) for row in result.errors(result.calibrated)) < 0.05
    # The file does the same for every later question, which says where the factors come from.
    again = explained(run_file, {**OF_SIMULATION, "calibration": str(kept)})
    assert list(again.errors()) == list(result.errors(result.calibrated))
    assert "calibrated to every second tenth of server.req.jsonl" in str(again.assumptions["calibration"])


def test_a_run_that_needs_no_factor_gets_none(run_file: Path, tmp_path: Path) -> None:
    result = explained(run_file, OF_SERVER, calibrate=str(tmp_path / "none.json"))
    assert result.calibration is not None
    assert result.calibration.factors == {}
    assert "No change of step times" in " ".join(result.sentences())


def test_the_worst_requests_come_first_with_both_lives(run_file: Path) -> None:
    worst = list(explained(run_file).worst())
    gaps = [abs(row["measured_e2e_s"] - row["predicted_e2e_s"]) for row in worst]
    assert len(worst) == 10
    assert gaps == sorted(gaps, reverse=True)
    assert all(row["measured_queue_s"] is not None for row in worst)


def test_an_option_that_contradicts_the_run_is_refused(run_file: Path) -> None:
    meta = run_file.with_name("server.meta.json")
    meta.write_text(json.dumps({"engine_kwargs": {"max_num_seqs": 7}}))
    try:
        with pytest.raises(InputError, match=r"--max-num-seqs 16: server\.req\.jsonl says 7"):
            explained(run_file)
    finally:
        meta.unlink()


def test_times_of_an_engine_take_no_http_server(run_file: Path) -> None:
    with pytest.raises(InputError, match=r"--http-ms 3.0: server\.req\.jsonl says 0.0; leave the option out"):
        explained(run_file, {**OF_SIMULATION, "http_ms": 3.0})


def test_a_request_that_does_not_fit_is_named(run_file: Path) -> None:
    with pytest.raises(InputError, match="requests of the run do not run here"):
        explained(run_file, {**OF_SIMULATION, "num_gpu_blocks_override": 8})


def test_a_frame_has_a_row_for_each_request(run_file: Path) -> None:
    frame = explained(run_file).to_frame()
    assert len(frame) == 60
    assert {"measured_ttft_s", "predicted_ttft_s"} <= set(frame.columns)
