"""`kvledger optimum`: what a better eviction order could win at most, in tokens, GPU time and money."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
CHAT = ("--workload", "conversation", "--limit", "300")
MODEL = ("--model", "llama-3.1-8b", "--gpu", "H100", "--block-size", "64")


def kvledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, *arguments], capture_output=True, text=True, timeout=300)


def document(*arguments: str) -> dict:
    done = kvledger("optimum", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_gap_is_that_of_the_curve_at_the_pool() -> None:
    found = document(*CHAT, *MODEL)
    blocks = found["pool"]["num_blocks"]
    options = ("--capacities", f"{blocks},{found['lru_for_the_same']['num_blocks']}", "--policy", "lru,optimum")
    curve = json.loads(kvledger("curve", *CHAT, *options, "--json").stdout)
    rates = {row["policy"]: row["token_hit_rate"] for row in found["policies"]}
    assert rates["lru"] == curve["policies"]["lru"][0]["token_hit_rate"]
    assert rates["optimum"] == curve["policies"]["optimum"][0]["token_hit_rate"] > rates["lru"]
    assert all(rate <= rates["optimum"] for rate in rates.values())
    assert found["optimum_over_lru"]["share_of_prompt_tokens"] == pytest.approx(rates["optimum"] - rates["lru"])
    # With that many times the pool LRU serves as much, and with a block less it would not.
    assert curve["policies"]["lru"][1]["token_hit_rate"] >= rates["optimum"]
    less = ("--capacities", str(found["lru_for_the_same"]["num_blocks"] - 1), "--policy", "lru")
    (point,) = json.loads(kvledger("curve", *CHAT, *less, "--json").stdout)["points"]
    assert point["token_hit_rate"] < rates["optimum"]


def test_a_price_turns_prompt_tokens_into_money() -> None:
    found = document(*CHAT, *MODEL, "--tensor-parallel-size", "2", "--price-per-gpu-hour", "3")
    gap, money = found["optimum_over_lru"], found["money"]
    assert found["pool"]["gpus"] == 2
    assert gap["gpu_hours"] == pytest.approx(gap["tokens"] * gap["us_per_prompt_token"] / 1e6 * 2 / 3600)
    assert money["computed_in_vain_in_the_window"] == pytest.approx(3 * gap["gpu_hours"])
    month = money["computed_in_vain_per_month_of_730_hours"]
    assert month == pytest.approx(3 * gap["gpu_hours"] * 730 / gap["window_hours"])
    times = found["lru_for_the_same"]["times_the_pool"]
    assert money["memory_for_the_same_per_month_of_730_hours"] == pytest.approx((times - 1) * 2 * 3 * 730)
    assert document(*CHAT, *MODEL)["money"] is None


def test_the_cost_of_a_prompt_token_is_the_latency_model_s() -> None:
    pool = ("--num-gpu-blocks-override", "2000", "--block-size", "64")
    found = document(*CHAT, *pool, "--base-ms", "8", "--us-per-prefill-token", "30", "--max-num-batched-tokens", "4000")
    assert found["optimum_over_lru"]["us_per_prompt_token"] == pytest.approx(30 + 8000 / 4000)
    assert found["pool"] == {"num_blocks": 1999 * 64 // 512, "block_size": 512, "tokens": 249 * 512, "gpus": 1}


def test_the_answer_comes_first_on_the_terminal() -> None:
    done = kvledger("optimum", *CHAT, *MODEL, "--price-per-gpu-hour", "2.5")
    assert done.stdout.startswith("With this pool, LRU serves ")
    assert "The saving is worth " in done.stdout.splitlines()[0]
    assert "prompt_token" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*CHAT, "--num-gpu-blocks-override", "9000", "--price-per-gpu-hour", "2"), "needs --model and --gpu"),
        ((*CHAT, *MODEL, "--price-per-gpu-hour", "-2"), "it must be above 0"),
        (("--workload", "code", "--num-gpu-blocks-override", "9000"), "does not say which prompts share blocks"),
        ((*CHAT, "--num-gpu-blocks-override", "20"), "smaller than one block of the trace (512 tokens)"),
    ],
)
def test_bad_input_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    done = kvledger("optimum", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
