"""Reading records of measured servers: what is assumed where they are silent, and where bad ones are named."""

import json
from pathlib import Path

import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.sim.workloads.multi_turn import Stage

from bench.fidelity.measured_serving import MeasuredServer, read_measured_serving
from bench.fidelity.served_run import (
    ClientTerms,
    ComparedRun,
    mape_over_runs,
    measured_steps,
    missed_goals,
    served_geometry,
    simulate_server,
)

LATENCIES = {
    "e2e_mean": 1020.0,
    "e2e_p90": 1100.0,
    "e2e_p99": 1200.0,
    "ttft_mean": 20.0,
    "ttft_p90": 25.0,
    "ttft_p99": 40.0,
    "itl_mean": 10.0,
}


def _record() -> dict:
    return {
        "id": "a",
        "engine": "vLLM 0.15.1",
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "gpu": "H100 80GB",
        "tensor_parallel_size": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2_048,
        "block_size": 16,
        "num_gpu_blocks": 4_000,
        "weights_dtype": "fp16/bf16",
        "workload": {
            "system_prompt_tokens": 100,
            "question_tokens": 300,
            "output_tokens": 101,
            "unique_system_prompts": 4,
            "users_per_system_prompt": 2,
            "multi_turn": True,
            "stages": [{"duration_s": 20, "requests_per_s": 4.0}],
            "arrivals": "evenly spread within a stage",
        },
        "measured_ms": {"all": LATENCIES, "stage0": LATENCIES},
    }


def _read(tmp_path: Path, *records: dict | str) -> list[MeasuredServer]:
    path = tmp_path / "servers.jsonl"
    path.write_text("\n".join(record if isinstance(record, str) else json.dumps(record) for record in records))
    return list(read_measured_serving(path))


def _server(tmp_path: Path, **changes) -> MeasuredServer:
    return attrs.evolve(_read(tmp_path, _record())[0], **changes)


def test_a_record_is_read_whole_and_blank_lines_are_none(tmp_path: Path):
    first, second = _read(tmp_path, _record(), "", {**_record(), "id": "b", "weights_dtype": "fp8"})
    assert (first.name, first.weights_dtype, second.name, second.weights_dtype) == ("a", "auto", "b", "fp8")
    assert first.workload.stages == (Stage(20.0, 4.0),)
    assert first.measured.itl_mean == 10.0
    assert first.stages == (first.measured,)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_gpu_blocks",), None, r"servers.jsonl:2: num_gpu_blocks is None; expected a whole number above 0"),
        (("block_size",), 16.5, r"servers.jsonl:2: block_size is 16.5"),
        (("model",), 7, r"servers.jsonl:2: model is 7; expected a string"),
        (("workload",), [], r"servers.jsonl:2: workload: expected an object, not \[\]"),
        (("workload", "stages"), [], r"servers.jsonl:2: workload: stages is \[\]"),
        (("workload", "stages", 0, "requests_per_s"), 0, r"stages\[0\]: requests_per_s is 0"),
        (("measured_ms", "all", "ttft_p99"), "fast", r"servers.jsonl:2: measured_ms: all: ttft_p99 is 'fast'"),
    ],
)
def test_a_wrong_field_is_named_with_file_line_and_place(tmp_path: Path, path: tuple, value: object, message: str):
    record = json.loads(json.dumps(_record()))
    parent = record
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    with pytest.raises(InputError, match=message):
        _read(tmp_path, _record(), record)


def test_a_missing_field_and_a_line_that_is_no_json_are_named(tmp_path: Path):
    record = _record()
    del record["measured_ms"]["stage0"]
    with pytest.raises(InputError, match=r"servers.jsonl:1: measured_ms: stage0 is missing"):
        _read(tmp_path, record)
    with pytest.raises(InputError, match=r"servers.jsonl:1: not a JSON object"):
        _read(tmp_path, "{")
    with pytest.raises(InputError, match=r"absent: No such file"):
        list(read_measured_serving(tmp_path / "absent"))


def test_a_quantised_checkpoint_has_the_geometry_of_its_original(tmp_path: Path):
    server = _server(tmp_path, model="RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic")
    assert served_geometry(server).name == "llama-4-scout-17b-16e"
    with pytest.raises(InputError, match="no built-in model is called 'nobody/unknown-fp8'"):
        served_geometry(_server(tmp_path, model="nobody/unknown-fp8"))


def test_the_mean_step_to_calibrate_with_follows_from_rate_and_latencies(tmp_path: Path):
    (step,) = measured_steps(_server(tmp_path))
    assert step.seconds == pytest.approx(0.010)
    assert step.load.num_decode_tokens == pytest.approx(4.0)
    assert step.load.decode_context_tokens == pytest.approx(4.0 * (400 + 50.5))


def test_a_simulated_server_serves_the_whole_workload_and_every_turn_but_the_first_hits(tmp_path: Path):
    run = simulate_server(_server(tmp_path), client=ClientTerms(), seed=0)
    assert run.num_finished == 80
    assert run.num_preemptions == 0
    # 8 of 80 turns are first ones; of those all but the first of each system prompt find its 6 full blocks.
    hits = (72 * 25 + 4 * 6) * 16 - 72 * 16  # a prompt of exactly 25 blocks computes its last block again
    assert run.prefix_hit_rate == pytest.approx(hits / (80 * 400))


def test_the_http_share_is_part_of_ttft_and_e2e_and_of_nothing_else(tmp_path: Path):
    server = _server(tmp_path)
    plain, late = (simulate_server(server, client=ClientTerms(http_ms=ms), seed=0).latencies for ms in (0.0, 10.0))
    for name in plain:
        assert late[name] - plain[name] == pytest.approx(0.0 if name == "itl_mean" else 10.0), name


def test_one_seed_gives_one_prediction(tmp_path: Path):
    server = _server(tmp_path)
    runs = [simulate_server(server, client=ClientTerms(), seed=seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


def test_a_record_that_contradicts_itself_is_left_out_of_the_mean_e2e_error(tmp_path: Path):
    server = _server(tmp_path)
    odd = attrs.evolve(server, measured=attrs.evolve(server.measured, itl_mean=12.5))
    run = simulate_server(server, client=ClientTerms(), seed=0)
    both = [ComparedRun.of(server, run), ComparedRun.of(odd, run)]
    assert [compared.chunks_agree for compared in both] == [True, False]
    assert both[1].chunks_per_token == pytest.approx(0.8)
    alone, together = mape_over_runs(both[:1]), mape_over_runs(both)
    assert together["e2e_mean"] == alone["e2e_mean"]
    assert together["itl_mean"] != alone["itl_mean"]
    assert mape_over_runs(both[1:]).keys() == {"itl_mean", "ms_per_token", "ttft_mean", "ttft_p90", "ttft_p99"}


def test_a_missed_goal_is_named():
    assert list(missed_goals({"itl_mean": 9.0, "ttft_mean": 20.5, "e2e_p99": 25.0})) == ["ttft_mean"]


def test_a_negative_http_share_is_refused():
    with pytest.raises(InputError, match="http_ms is -1"):
        ClientTerms(http_ms=-1)
