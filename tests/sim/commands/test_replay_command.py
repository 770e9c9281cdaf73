"""`kvledger replay` from the outside: keys, exit codes, refusals, the same bytes from run to run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
QUICK = ("--workload", "conversation", "--limit", "60")
POOL = ("--num-gpu-blocks-override", "4000", "--block-size", "512")


def kvledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, "replay", *arguments], capture_output=True, text=True, timeout=120)


def document(*arguments: str) -> dict:
    done = kvledger(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_json_has_the_documented_keys() -> None:
    report = document(*QUICK, *POOL)
    assert set(report["requests"]) == {"total", "finished", "rejected", "aborted"}
    assert set(report["prefix_cache"]) >= {"queries_tokens", "hits_tokens", "hit_rate", "readmission_hits_tokens"}
    assert set(report["preemptions"]) >= {"total", "max_per_request", "recompute_tax"}
    assert set(report["kv_cache_usage"]) == {"mean", "max"}
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(report[name]) >= {"mean", "p50", "p90", "p99"}
    assert set(report) >= {"throughput", "simulated_seconds", "steps", "assumptions", "timing", "trace"}
    assert set(report["timing"]) == {"wall_seconds", "us_per_step"}


def test_everything_but_the_timing_is_the_same_from_run_to_run() -> None:
    first, second = document(*QUICK, *POOL), document(*QUICK, *POOL)
    assert first.pop("timing") != {}
    second.pop("timing")
    assert json.dumps(first) == json.dumps(second)


def test_a_model_brings_its_own_groups_and_what_its_windows_save() -> None:
    report = document(*QUICK, "--model", "gemma-3-27b", "--gpu", "H200")
    groups = report["assumptions"]["groups"]
    assert len(groups) > 1
    assert "FullAttention(block_size=16)" in groups
    assert any(group.startswith("SlidingWindow(block_size=16, window=1024)") for group in groups)
    saved = report["assumptions"]["saved_by_windows_at_max_model_len"]
    assert saved["saved_share"] == pytest.approx(1 - saved["window_aware_bytes"] / saved["all_full_bytes"])
    assert 0.8 < saved["saved_share"] < 0.9
    assert report["requests"]["finished"] == 60


def test_a_model_without_windows_saves_nothing_and_says_nothing() -> None:
    assumptions = document(*QUICK, "--model", "llama-3.1-8b", "--gpu", "H100")["assumptions"]
    assert "saved_by_windows_at_max_model_len" not in assumptions
    assert assumptions["groups"] == ["FullAttention(block_size=16)"]
    assert assumptions["latency_model"].startswith("roofline")


def test_drafts_and_swapping_reach_the_engine() -> None:
    swap = ("--preemption-mode", "swap", "--swap-space-blocks", "9000", "--swap-link-gb-s", "25")
    drafts = ("--num-speculative-tokens", "2", "--draft-acceptance-rate", "0.7")
    pool = ("--num-gpu-blocks-override", "4200", "--swap-bytes-per-block", "2097152")
    report = document("--workload", "conversation", "--limit", "150", *pool, *swap, *drafts)
    plain = document("--workload", "conversation", "--limit", "150", *pool[:2])
    assert report["assumptions"]["draft_acceptance_rate"] == 0.7
    assert report["preemptions"]["total"] > 0
    assert report["preemptions"]["swapped_in_tokens"] > 0
    assert report["steps"] < plain["steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (QUICK, "how large is the pool?"),
        ((*QUICK, "--model", "llama-3.1-8b"), "--model llama-3.1-8b needs --gpu"),
        ((*QUICK, "--gpu", "H100"), "--gpu and --kv-cache-memory-bytes size a pool for a model; give --model too"),
        ((*QUICK, *POOL, "--kv-cache-dtype", "fp8"), "have no effect without --model"),
        ((*QUICK, *POOL, "--latency", "roofline"), "--latency roofline needs --model and --gpu"),
        (
            (*QUICK, *POOL, "--latency", "guess"),
            "unknown latency model 'guess'; known: roofline, kernels, linear, table",
        ),
        ((*QUICK, *POOL, "--preemption-mode", "swap"), "--preemption-mode swap and --swap-link-gb-s go together"),
        ((*QUICK, *POOL, "--num-speculative-tokens", "2"), "go together; neither has a default"),
        ((*QUICK, *POOL, "--eviction", "random"), "unknown eviction policy 'random'; known: lru, fifo"),
        ((*QUICK, *POOL, "--max-num-seqs", "0"), "max_num_reqs is 0; it must be a whole number of at least 1"),
        ((*POOL,), "give a trace file, --workload NAME, --fit FILE, or --input-len and --output-len"),
        (("no/such/file.jsonl", *POOL), "no/such/file.jsonl"),
    ],
)
def test_bad_input_exits_with_2_and_says_what_to_do(arguments: tuple[str, ...], message: str) -> None:
    done = kvledger(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


def test_a_model_that_does_not_fit_exits_with_1() -> None:
    done = kvledger(*QUICK, "--model", "llama-3.1-70b", "--gpu", "H100")
    assert done.returncode == 1
    assert "GiB" in done.stderr


def test_the_tables_fit_80_columns() -> None:
    done = subprocess.run(
        [BIN, "replay", *QUICK, *POOL], capture_output=True, text=True, env={"COLUMNS": "80", "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0
    assert "TTFT" in done.stdout
    assert "prefix-cache hit rate" in done.stdout


def test_quantized_weights_leave_more_blocks_and_shorten_the_prompts() -> None:
    options = ("--workload", "conversation", "--limit", "20", "--rate-scale", "0.1", "--block-size", "64")
    model = ("--model", "llama-3.1-70b", "--gpu", "H100", "--tensor-parallel-size", "4")
    plain, fp8 = (document(*options, *model, "--quantization", scheme) for scheme in ("none", "fp8"))
    assert fp8["assumptions"]["num_blocks"] > plain["assumptions"]["num_blocks"]
    assert fp8["ttft_s"]["p50"] < plain["ttft_s"]["p50"]
    assert fp8["assumptions"]["model"] == "llama-3.1-70b, weights fp8, KV cache auto"
    assert document(*options, *model)["ttft_s"] == plain["ttft_s"]


def test_assumptions_are_written_for_people() -> None:
    done = kvledger(*QUICK, "--model", "gemma-3-27b", "--gpu", "A100", "--block-size", "64")
    assert done.returncode == 0, done.stderr
    assumed = {
        name: " ".join(value) for name, *value in (line.split() for line in done.stdout.splitlines() if line.strip())
    }
    assert assumed["kv_bytes_per_token_per_rank"] == "at most 1,024 tokens: 425,984, all tokens before: 81,920"
    assert assumed["fp8_tflops"] == "none"
