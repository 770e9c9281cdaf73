"""What is not given is what vLLM's own server takes on that card, in every command, and the output says so."""

import json
from pathlib import Path

import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.sim.scenario.defaults import engine_defaults
from kvledger.sim.scenario.engine import engine_of
from kvledger.sim.scenario.scenario import Scenario
from kvledger.sim.workloads.multi_turn import multi_turn_requests

from bench.fidelity.measured_serving import MeasuredServer, read_measured_serving

GOLDEN = Path(__file__).parents[2] / "golden" / "measured_serving.jsonl"
LLAMA = {"model": "llama-3.1-8b", "gpu": "H100"}


@pytest.mark.parametrize(
    ("gpu", "max_num_seqs", "max_num_batched_tokens"),
    [
        *[(gpu, 256, 2_048) for gpu in ("L4", "L40S", "A10", "A100-40GB", "A100-80GB", "RTX-4090")],
        *[(gpu, 1_024, 8_192) for gpu in ("H100", "H200", "H20", "RTX-PRO-6000")],
        *[(gpu, 1_024, 16_384) for gpu in ("B200", "B300", "MI300X", "MI355X")],
        (None, 256, 2_048),
    ],
)
def test_batch_limits_follow_the_card(gpu: str | None, max_num_seqs: int, max_num_batched_tokens: int):
    """`EngineArgs.get_batch_defaults` of vLLM 0.32 for the server; without a device it takes those of small cards."""
    found = engine_defaults(Scenario(gpu=gpu))
    assert found["max_num_seqs"] == max_num_seqs
    assert found["max_num_batched_tokens"] == max_num_batched_tokens


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_num_batched_tokens": 512}, {"max_num_seqs": 512}),
        ({"max_num_seqs": 4, "max_model_len": 100}, {"max_num_batched_tokens": 400}),
        ({"enable_chunked_prefill": False}, {"max_num_seqs": 1_024, "max_num_batched_tokens": 131_072}),
        ({"enable_chunked_prefill": False, "max_model_len": 512}, {"max_num_batched_tokens": 8_192}),
        ({"total_memory": "40GiB"}, {"max_num_seqs": 256, "max_num_batched_tokens": 2_048}),
    ],
)
def test_batch_limits_follow_each_other_and_the_longest_request(given: dict, expected: dict):
    found = engine_defaults(Scenario(**LLAMA, **given))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("version", "expected"), [(None, 0.92), ("0.32", 0.92), ("0.21", 0.92), ("0.20", 0.9)])
def test_the_utilization_follows_the_version(version: str | None, expected: float):
    assert engine_defaults(Scenario(**LLAMA, engine_version=version))["gpu_memory_utilization"] == expected


def test_scheduling_is_asynchronous_unless_drafts_forbid_it():
    assert engine_of(Scenario(**LLAMA)).parts.async_scheduling is True
    assert engine_of(Scenario(**LLAMA, async_scheduling=False)).parts.async_scheduling is False
    drafts = {"num_speculative_tokens": 2, "draft_acceptance_rate": 0.5}
    assert engine_of(Scenario(**LLAMA, **drafts, speculative_method="eagle")).parts.async_scheduling is True
    ngram = Scenario(**LLAMA, **drafts, speculative_method="ngram")
    assert engine_of(ngram).parts.async_scheduling is False
    with pytest.raises(InputError, match="refuses async_scheduling with drafts by ngram"):
        engine_of(ngram.evolve(async_scheduling=True))


def test_a_plan_without_options_is_vllms(kvledger):
    code, out, _ = kvledger("plan", "--model", "llama-3.1-8b", "--gpu", "L4", "--json")
    document = json.loads(out)
    assert code == 1  # one request of 131,072 tokens does not fit, and vLLM refuses to start
    assert document["num_gpu_blocks"] == 1_670


@pytest.mark.parametrize("command", [["replay"], ["fleet"], ["size", "--slo-ttft-p99", "30"], ["optimum"]])
def test_a_run_serves_what_fits_and_says_what_was_not_given(kvledger, command):
    """An L4 cannot hold a request of 131,072 tokens, which nobody sends here."""
    traffic = ["--isl", "436", "--osl", "20", "--num-prompts", "20", "--concurrency", "4", "--prefix-len", "64"]
    code, out, err = kvledger(command[0], *traffic, "--model", "llama-3.1-8b", "--gpu", "L4", *command[1:], "--json")
    assert code == 0, err
    assumptions = json.loads(out)["assumptions"]
    assert assumptions["longest_request"] == "26,704 tokens, as the pool holds; the model's own is 131,072"
    for text in ("--gpu-memory-utilization 0.92", "--max-num-seqs 256", "--max-num-batched-tokens 2048"):
        assert text in assumptions["engine_defaults"]
    if command[0] == "size":
        assert json.loads(out)["answer"]["gpus"] == 1


def test_the_headline_says_the_longest_request_and_what_was_left_out(kvledger):
    pool = ["--num-gpu-blocks-override", "100", "--model", "llama-3.1-8b", "--gpu", "L4"]
    code, out, _ = kvledger("replay", "--isl", "1590", "--osl", "10", "--range-ratio", "0.1", *pool)
    assert code == 0
    assert "Longest request: 1,584 tokens, as the pool holds; the model's own is 131,072." in out
    title = next(line for line in out.splitlines() if "finished requests, without" in line)
    finished, rejected = (int(word.replace(",", "")) for word in title.split() if word.replace(",", "").isdigit())
    assert finished + rejected == 1_000
    assert min(finished, rejected) > 0


@pytest.mark.parametrize("traffic", [["--request-rate", "2"], ["--concurrency", "3"]], ids=["open", "closed"])
def test_http_is_part_of_ttft_and_e2e_and_of_no_other_latency(kvledger, traffic: list[str]):
    question = ["replay", "--isl", "200", "--osl", "20", "--num-prompts", "40", *traffic]
    pool = ["--num-gpu-blocks-override", "500", "--no-async-scheduling", "--json"]
    runs = {ms: json.loads(kvledger(*question, *pool, "--http-ms", ms)[1]) for ms in ("0", "50")}
    usual = json.loads(kvledger(*question, *pool)[1])
    assert usual["assumptions"]["http_ms"] == 8
    if traffic[0] == "--request-rate":
        for name, added in (("ttft_s", 0.05), ("e2e_s", 0.05), ("itl_s", 0.0), ("tpot_s", 0.0)):
            assert runs["50"][name]["mean"] - runs["0"][name]["mean"] == pytest.approx(added, abs=1e-9), name
        assert usual["ttft_s"]["mean"] - runs["0"]["ttft_s"]["mean"] == pytest.approx(0.008, abs=1e-9)
    else:  # a user sends the next request only after the answer
        assert runs["50"]["simulated_seconds"] > runs["0"]["simulated_seconds"] + 0.05 * 40 / 3 * 0.9
        assert runs["50"]["ttft_s"]["mean"] > runs["0"]["ttft_s"]["mean"] + 0.04


def _golden(server: MeasuredServer, folder: Path) -> dict:
    """What `kvledger replay` says of a measured server, with the options that its record names and no other."""
    trace = folder / "trace.jsonl"
    with trace.open("w") as file:
        for arrival_s, num_input, num_output, hash_ids in multi_turn_requests(server.workload, 0):
            row = {"timestamp": arrival_s * 1e3, "input_length": num_input, "output_length": num_output}
            file.write(json.dumps({**row, "hash_ids": hash_ids}) + "\n")
    same = ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size")
    scenario = Scenario(
        trace=(str(trace),),
        trace_block_size=server.block_size,
        model="llama-4-scout-17b-16e" if "Scout" in server.model else server.model,
        gpu="H100",
        gpu_memory_utilization=0.9,
        num_gpu_blocks_override=server.num_gpu_blocks,
        quantization=None if server.weights_dtype == "auto" else server.weights_dtype,
        **{name: getattr(server, name) for name in same},
    )
    return scenario.replay().to_dict()


# Two of the seven miss a bound, as docs/latency.md says: chunks of both Llama-2 runs hold several tokens, and the TTFT
# of the long one has 18 ms more than any other server's.
KNOWN = {("20260217-155451", "itl"): -0.19, ("67", "itl"): -0.19, ("67", "ttft"): -0.31}


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(server, marks=[] if server.name == "60" else pytest.mark.slow, id=server.name)
        for server in read_measured_serving(GOLDEN)
    ],
)
def test_a_measured_server_is_met_with_the_options_of_its_record(server: MeasuredServer, tmp_path: Path):
    found, measured = _golden(server, tmp_path), server.measured
    for name, bound in (("ttft", 0.20), ("itl", 0.10), ("e2e", 0.10)):
        error = found[f"{name}_s"]["mean"] * 1e3 / attrs.asdict(measured)[f"{name}_mean"] - 1
        if (server.name, name) in KNOWN:
            assert error == pytest.approx(KNOWN[server.name, name], abs=0.02)
        else:
            assert abs(error) < bound, f"{name}: {error:+.1%}"
