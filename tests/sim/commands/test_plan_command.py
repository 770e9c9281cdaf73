"""`kvledger plan`: its JSON, its tables, its exit codes, and what it says about what is missing."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvledger.core.deployment.plan import plan_deployment
from kvledger.core.errors import InputError
from kvledger.core.memory.ledger import sum_bytes
from kvledger.sim.commands.cli import main
from kvledger.sim.latency.devices import devices, find_device
from kvledger.sim.report.plan import bar_segments, ledger_bar
from kvledger.sim.scenario.deployment import read_question
from kvledger.sim.scenario.scenario import Scenario

GIB = 1 << 30
DESIGN_KEYS = {
    "ledger",
    "page_size_bytes",
    "bytes_per_block",
    "num_gpu_blocks",
    "kv_cache_tokens",
    "max_concurrency",
    "max_model_len",
    "groups",
    "ranks",
    "warnings",
    "fits",
}
LLAMA = ("plan", "--model", "llama-3.1-8b", "--gpu", "H100", "--max-model-len", "8192")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run_command


def payload(run: Run, *arguments: str, code: int = 0) -> dict[str, Any]:
    found, out, _ = run(*arguments, "--json")
    assert found == code
    return json.loads(out)


def test_json_holds_the_agreed_keys_and_a_ledger_that_adds_up(run: Run) -> None:
    document = payload(run, *LLAMA)
    assert set(document) >= DESIGN_KEYS
    assert sum(row["bytes"] for row in document["ledger"]) == document["device"]["total_bytes"]
    assert all({"name", "bytes", "source"} <= set(row) for row in document["ledger"])
    assert {row["source"] for row in document["ledger"]} == {"estimate", "derived"}
    (rank,) = document["ranks"]
    assert {"available_bytes", "num_blocks", "bytes_used", "bottleneck"} <= set(rank)
    assert document["bytes_per_block"] == 32 * document["page_size_bytes"] == 2_097_152
    assert document["kv_cache_tokens"] == 16 * document["num_gpu_blocks"]
    assert document["max_concurrency"] == document["num_gpu_blocks"] / 512
    assert document["fits"] is True and document["refusal"] is None


def test_json_is_the_same_from_run_to_run(run: Run) -> None:
    assert run(*LLAMA, "--json") == run(*LLAMA, "--json")


def test_a_plan_that_does_not_fit_exits_with_1_and_says_why_in_both_forms(run: Run) -> None:
    arguments = ("plan", "--model", "llama-3.1-70b", "--gpu", "H100", "-tp", "2", "--max-num-seqs", "256")
    code, out, _ = run(*arguments)
    assert code == 1
    for text in ("does not fit", "20.00 GiB", "Way out", "--tensor-parallel-size 4", "--max-model-len"):
        assert text in out
    document = payload(run, *arguments, code=1)
    assert document["fits"] is False
    refusal = document["refusal"]
    assert refusal["shortfall_bytes"] > 0
    assert document["diagnoses"][0]["remedies"]
    largest = refusal["largest"]["max_model_len"]
    assert payload(run, *arguments, "--max-model-len", str(largest))["fits"] is True
    assert payload(run, *arguments, "--max-model-len", str(largest + 1), code=1)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan",), "no model is given"),
        (("plan", "--model", "llama-3.1-8b"), "no device is given"),
        (("plan", "--model", "nothing-like-it", "--gpu", "H100"), "no built-in model is called"),
        (("plan", "--model", "llama-3.1-8b", "--gpu", "Abacus"), "is no preset"),
        ((*LLAMA, "--gpu-memory-utilization", "90"), "above 0 and at most 1"),
        ((*LLAMA, "--gpu-memory-utilization", "0.9", "--mem-fraction-static", "0.8"), "mean different things"),
        ((*LLAMA, "--kv-cache-memory-bytes", "8 apples"), "is not an amount of memory"),
        ((*LLAMA, "--kv-cache-memory-bytes", "0"), "above 0"),
        ((*LLAMA, "--kv-cache-memory-bytes", "1GiB", "--num-gpu-blocks-override", "5"), "give one of them"),
        ((*LLAMA, "-tp", "3"), "--tensor-parallel-size 3 does not divide the 32 attention heads of llama-3.1-8b"),
        ((*LLAMA, "-tp", "1024"), "--tensor-parallel-size 1024 does not divide the 32 attention heads"),
        ((*LLAMA, "-tp", "65536"), "--tensor-parallel-size is 65536; it must be at most 1,024"),
        (("plan", "--model", "qwen2.5-7b", "--gpu", "H100", "-tp", "8"), "does not divide the 28 attention heads"),
        (("plan", "--model", "llama-2-7b", "--gpu", "H100", "--max-model-len", "8K"), "beyond the 4,096 tokens that"),
        ((*LLAMA, "--num-gpu-blocks-override", "99999999999"), "it must be at most 16,777,216"),
        ((*LLAMA, "--total-memory", "80"), "--total-memory is 80, which are bytes; did you mean 80GiB?"),
        ((*LLAMA, "--kv-cache-dtype", "fp7"), "not a KV-cache dtype"),
        ((*LLAMA, "--quantization", "int3"), "unknown quantization 'int3'"),
        ((*LLAMA, "--engine-version", "new"), "not a version number"),
        ((*LLAMA, "--engine-version", "0.15.1", "--reserve-graph-memory"), "contradict each other"),
        ((*LLAMA, "--enforce-eager", "--graph-bytes", "1GiB"), "give one of them"),
        ((*LLAMA, "--assume", "luck=7"), "known are hidden_copies"),
        ((*LLAMA, "--context-lengths", "many"), "is not a whole number of tokens"),
        ((*LLAMA, "--context-mix", "2048:0.5"), "add up to 1"),
        ((*LLAMA, "--context-mix", "9000:1"), "longer than --max-model-len"),
        ((*LLAMA, "--logged-memory", "41.73"), "belong together"),
        ((*LLAMA, "--startup-log", "/nowhere/log"), "No such file"),
        ((*LLAMA, "--mamba-cache-mode", "sometimes"), "give none, align or all"),
        ((*LLAMA, "--kv-cache-layout", "ABC"), "known are LBHNC"),
        ((*LLAMA, "--max-total-tokens", "3"), "less than one block"),
        (
            ("plan", "--model", "llama-3.1-8b", "--gpu", "H100", "--max-model-len", "long"),
            "32K (32,768) or 32k or auto",
        ),
        (("plan", "--model", "kimi-k3", "--gpu", "H100", "-tp", "8"), "--weights-bytes"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_to_give(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert out == ""


def test_the_table_shows_every_row_the_answer_and_what_was_assumed(run: Run) -> None:
    code, out, _ = run(*LLAMA)
    assert code == 0
    for text in (
        "llama-3.1-8b on 1 x H100, 79.19 GiB each: fits",
        "weights",
        "peak activation",
        "CUDA graphs",
        "KV cache blocks",
        "outside the budget",
        "num_gpu_blocks",
        "Concurrent users",
        "--kv-cache-memory-bytes",
        "Assumed, because not given",
        "--gpu-memory-utilization 0.9",
        "79.65 GiB was read on another",
        "GPU KV cache size:",
    ):
        assert text in out
    assert max(len(line) for line in out.splitlines()) <= 120


def test_explain_substitutes_the_numbers(run: Run) -> None:
    _, out, _ = run(*LLAMA, "--explain")
    for text in (
        "32 layers x 8 heads x (128 + 128) x 2 B (bf16)",
        "8,030,261,248 parameters on this rank x 2 B (bf16)",
        "ceil(total 85,031,714,816 x 0.92)",
        "rank 0 bytes per block: 32 layers x 65,536 B = 2,097,152 B",
        "ceil(8192 tokens / 16) = 512",
    ):
        assert text in out


def test_users_are_counted_at_every_length_and_for_a_mix(run: Run) -> None:
    arguments = ("plan", "--model", "llama-3.1-8b", "--gpu", "H100", "--context-mix", "2048:0.5,8192:0.5")
    document = payload(run, *arguments)
    usable = document["num_usable_blocks"]
    assert {row["context_tokens"]: row["users"] for row in document["capacity"]} == {
        length: usable // (length // 16) for length in (2048, 8192, 32768, 131072)
    }
    assert document["context_mix"]["users"] == usable // 320
    engines = payload(run, *arguments, "-dp", "2")
    assert engines["capacity"][0]["users"] == 2 * document["capacity"][0]["users"]
    assert engines["totals"]["kv_cache_tokens"] == 2 * document["kv_cache_tokens"]


def test_tensor_parallelism_multiplies_bytes_and_not_tokens(run: Run) -> None:
    document = payload(run, "plan", "--model", "llama-3.1-70b", "--gpu", "H100", "-tp", "4")
    assert document["totals"]["kv_cache_bytes"] == 4 * document["ranks"][0]["bytes_used"]
    assert document["totals"]["kv_cache_tokens"] == document["kv_cache_tokens"]


def test_given_rows_replace_estimates_and_are_labelled(run: Run) -> None:
    document = payload(
        run,
        *LLAMA,
        "--weights-bytes",
        "16GiB",
        "--activation-bytes",
        "2GiB",
        "--non-torch-bytes",
        "0.5GiB",
        "--graph-bytes",
        "1GiB",
        "--workspace-bytes",
        "0.25GiB",
        "--total-memory",
        "80GiB",
        "--gpu-memory-utilization",
        "0.5",
    )
    sources = {row["name"]: row["source"] for row in document["ledger"]}
    assert {name for name, source in sources.items() if source == "given"} == {
        "weights",
        "peak activation",
        "non-torch",
        "CUDA graphs",
        "sampler and workspace",
    }
    assert document["available_bytes"] == int((40 - 16 - 2 - 0.5 - 1 - 0.25) * GIB)
    assert document["num_gpu_blocks_range"] == [document["num_gpu_blocks"]] * 2


def test_the_three_meanings_of_a_fraction(run: Run) -> None:
    rows = ("--weights-bytes", "16GiB", "--non-torch-bytes", "1GiB", "--activation-bytes", "3GiB", "--enforce-eager")
    available = {
        option: payload(run, *LLAMA, *rows, "--total-memory", "80GiB", option, "0.9")["available_bytes"] // GIB
        for option in ("--gpu-memory-utilization", "--free-gpu-memory-fraction", "--mem-fraction-static")
    }
    assert list(available.values()) == [52, 54, 55]


def test_an_engine_before_0_21_keeps_its_graphs_outside_the_request(run: Run) -> None:
    new, old = payload(run, *LLAMA), payload(run, *LLAMA, "--engine-version", "0.15.1")
    # It keeps them outside of a smaller share of the memory: the default was 0.9 before 0.21, and is 0.92.
    same = payload(run, *LLAMA, "--engine-version", "0.15.1", "--gpu-memory-utilization", "0.92")
    assert same["num_gpu_blocks"] > new["num_gpu_blocks"] > old["num_gpu_blocks"]
    assert "CUDA graphs" not in {row["name"] for row in old["ledger"]}


def test_a_pinned_pool_ignores_utilization_and_says_so(run: Run) -> None:
    document = payload(run, *LLAMA, "--kv-cache-memory-bytes", "8GiB")
    assert document["num_gpu_blocks"] == 4096
    assert any("is ignored" in warning for warning in document["warnings"])
    refused = payload(run, *LLAMA, "--kv-cache-memory-bytes", "78GiB", code=1)
    assert refused["refusal"]["condition"] == "explicit_bytes_exceed_free"
    largest = refused["refusal"]["largest"]["--kv-cache-memory-bytes"]
    assert payload(run, *LLAMA, "--kv-cache-memory-bytes", str(largest))["fits"]


def test_the_headline_has_the_range_where_the_estimates_leave_much_open(run: Run) -> None:
    wide = ("plan", "--model", "llama-4-scout-17b-16e", "--gpu", "H100", "-tp", "2", "--quantization", "fp8")
    _, out, _ = run(*wide, "--max-model-len", "8K")
    low, high = payload(run, *wide, "--max-model-len", "8K")["num_gpu_blocks_range"]
    assert f"The estimates allow {low:,} to {high:,} blocks." in " ".join(out.split())
    _, out, _ = run(*LLAMA, "--max-num-seqs", "64")
    assert "The estimates allow" not in out


def test_no_suggestion_is_below_zero(run: Run) -> None:
    document = payload(run, "plan", "--model", "llama-3.1-70b", "--gpu", "H100", code=1)
    assert document["available_bytes"] < 0
    assert document["suggestions"]["suggested_vllm"] == {"to_requested_limit_bytes": 0, "to_gpu_limit_bytes": 0}


def test_neighbours_are_told_apart_and_over_declaration_is_warned_of(run: Run) -> None:
    document = payload(
        run, *LLAMA, "--gpu-memory-utilization", "0.4", "--free-memory", "40GiB", "--neighbour-utilization", "0.7"
    )
    assert any("1.1" in warning for warning in document["warnings"])
    assert "in use before start" in {row["name"] for row in document["ledger"]}
    refused = payload(run, *LLAMA, "--free-memory", "40GiB", code=1)
    assert refused["diagnoses"][0]["complaint"] == "memory is free but start-up fails"


def test_complaints_are_answered(run: Run) -> None:
    document = payload(run, *LLAMA, "--expect-num-gpu-blocks", "29000", "--compare-utilization", "0.94")
    assert [diagnosis["complaint"] for diagnosis in document["diagnoses"]] == [
        "the pool is smaller than expected",
        "raising utilization gained little",
    ]
    assert document["diagnoses"][0]["row"] in {row["name"] for row in document["ledger"]}


def test_two_logged_lines_are_explained(run: Run) -> None:
    document = payload(
        run, "plan", "--logged-memory", "41.73 GiB", "--logged-tokens", "261,648 tokens", "--model", "llama-3.1-8b"
    )
    assert document["num_gpu_blocks"] == 16_353
    assert document["bytes_per_block_range"] == [2_739_506, 2_740_329]
    assert document["is_whole_number_of_layers"] is False
    code, out, _ = run("plan", "--logged-memory", "41.73", "--logged-tokens", "261648")
    assert code == 0 and "16,353 blocks of 16 tokens" in out


def test_a_real_log_calibrates_the_plan(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "Model loading took 14.99 GiB\nAvailable KV cache memory: 54.96 GiB\nGPU KV cache size: 450,224 tokens\n"
    )
    document = payload(run, *LLAMA, "--startup-log", str(log), "--engine-version", "0.15.1")
    assert {row["source"] for row in document["ledger"]} == {"measured", "derived"}
    low, high = document["num_gpu_blocks_range"]
    assert low <= 450_224 // 16 <= high
    explained = payload(run, "plan", "--startup-log", str(log))
    assert explained["num_gpu_blocks"] == 450_224 // 16
    code, _, err = run(*LLAMA, "--startup-log", str(log), "--weights-bytes", "1GiB")
    assert code == 2 and "--weights-bytes and --startup-log" in err


def test_a_config_file_is_planned_like_a_builtin_model(run: Run, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    mine = payload(run, "plan", "--config", str(path), "--gpu", "H100", "--max-model-len", "8K")
    builtin = payload(run, *LLAMA)
    assert mine["num_gpu_blocks"] == builtin["num_gpu_blocks"]
    assert mine["max_model_len"] == 8192


def test_auto_fit_is_reported_from_and_to(run: Run) -> None:
    two = ("plan", "--model", "llama-3.1-70b", "--gpu", "H100", "-tp", "2", "--max-num-seqs", "256")
    document = payload(run, *two, "--max-model-len", "auto")
    assert document["fits"]
    assert any(line.startswith("--max-model-len auto: the longest that fits") for line in document["assumptions"])
    assert any("reduced from 131072 to" in line for line in document["log_lines"])


def test_a_constant_of_the_estimates_can_be_replaced(run: Run) -> None:
    usual, lean = payload(run, *LLAMA), payload(run, *LLAMA, "--assume", "non_torch_bytes=100MiB")
    by_name = {row["name"]: row["bytes"] for row in lean["ledger"]}
    assert by_name["non-torch"] == 100 << 20
    assert lean["num_gpu_blocks"] > usual["num_gpu_blocks"]


LLAMA_ON_FOUR = Scenario(model="llama-3.1-70b", gpu="H100", async_scheduling=True, tensor_parallel_size=4)


def test_the_bar_is_as_wide_as_asked_and_in_proportion() -> None:
    plan = plan_deployment(read_question(LLAMA_ON_FOUR).deployment)
    rows = plan.rows(plan.stages[0])
    total = plan.deployment.total_bytes
    for width in (60, 78, 118):
        bar, *legend = ledger_bar(rows, total, width).plain.splitlines()
        assert len(bar) == width
        assert all(len(line) <= width for line in legend)
        weights = bar.count("█") / width
        assert abs(weights - bar_segments(rows)["weights"] / total) < 1.5 / width
        assert "= KV cache" in " ".join(legend)
    assert sum(bar_segments(rows).values()) == sum_bytes(rows)


def test_what_was_not_given_is_listed_with_its_reason() -> None:
    assumed = " | ".join(read_question(LLAMA_ON_FOUR).assumptions)
    for text in (
        "85,031,714,816 B",
        "--gpu-memory-utilization 0.92 (the engine's default)",
        "--max-num-seqs 1024 (the engine's default)",
        "--max-num-batched-tokens 8192 (the engine's default)",
    ):
        assert text in assumed
    given = read_question(
        LLAMA_ON_FOUR.evolve(
            total_memory="80GiB",
            free_memory="80GiB",
            gpu_memory_utilization=0.9,
            max_model_len="8192",
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            block_size=16,
            dtype="bf16",
            engine_version="0.32.0",
        )
    )
    assert given.assumptions == ()


def test_devices_name_the_source_of_their_memory() -> None:
    for device in devices().values():
        assert device.total_source.startswith(("read on", "assumed"))
        assert 0.9 < device.total_bytes / (device.label_gb * GIB) <= 1
    assert find_device("nvidia h100 80gb").name == "H100"
    with pytest.raises(InputError, match="give --total-memory"):
        find_device("TPU")
