"""`kvledger ab`: two configurations side by side, and what their difference comes from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kvledger.sim.scenario.options import texts_of
from kvledger.sim.scenario.scenario import Scenario
from kvledger.sim.search.ab import AbQuestion

BIN = Path(sys.executable).parent / "kvledger"
CHAT = ("--workload", "conversation", "--limit", "80", "--rate-scale", "2")
MODEL = ("--model", "llama-3.1-8b", "--gpu", "H100", "--block-size", "64")


def kvledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, *arguments], capture_output=True, text=True, timeout=300)


def document(*arguments: str) -> dict:
    done = kvledger(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_side_is_the_replay_of_its_options() -> None:
    found = document("ab", *CHAT, *MODEL, "--b", "kv-cache-dtype=fp8")
    for side, options in (("a", ()), ("b", ("--kv-cache-dtype", "fp8"))):
        alone = document("replay", *CHAT, *MODEL, *options)
        alone.pop("timing")
        assert found[side]["result"] == alone
    assert found["options_that_differ"] == [{"name": "kv-cache-dtype", "a": None, "b": "fp8"}]
    assert found["same"] == {
        "workload": "conversation",
        "model": "llama-3.1-8b",
        "gpu": "H100",
        "block-size": "64",
        "limit": "80",
        "rate-scale": "2.0",
    }
    differing = {row["name"] for row in found["assumptions_that_differ"]}
    assert {"kv_cache_dtype", "num_blocks", "bytes_per_block_per_gpu"} <= differing
    assert "latency_model" not in differing


def test_the_explanation_goes_from_the_options_to_the_waiting() -> None:
    found = document("ab", *CHAT, *MODEL, "--b", "kv-cache-dtype=fp8")
    told = found["explanation"]
    assert told[0] == "B has kv-cache-dtype fp8 instead of its default. All else is equal."
    assert told[1].endswith("times as many.")
    a, b = (found[side]["result"]["assumptions"]["num_blocks"] for side in "ab")
    assert f"{(b - 1) / (a - 1):.2f} times" in told[1]
    pairs = found["pairs"]
    assert pairs["num_requests"] == 80
    means = [found[side]["result"]["ttft_s"]["mean"] for side in "ab"]
    assert pairs["mean_ttft_s_difference"] == pytest.approx(means[1] - means[0], rel=1e-6)
    assert any(f"Of 80 requests, {pairs['sooner_in_b']} get their first token sooner in B" in text for text in told)


def test_a_figure_says_which_side_is_better() -> None:
    found = document("ab", *CHAT, *MODEL, "--b", "max-num-seqs=2")
    rows = {row["figure"]: row for row in found["figures"]}
    ttft = rows["ttft_s.p99"]
    assert ttft["b"] > ttft["a"]
    assert ttft["better"] == "a"
    assert ttft["difference"] == ttft["b"] - ttft["a"]
    assert ttft["ratio"] == ttft["b"] / ttft["a"]
    assert rows["kv_cache_usage.mean"]["better"] is None
    assert rows["requests.rejected"]["difference"] == 0
    assert any(text.startswith("A is better in") for text in found["explanation"])


def test_fleets_are_compared_as_well() -> None:
    routes = ("--a", "routing=round-robin", "--b", "routing=prefix-aware", "--b", "replicas=3", "--a", "replicas=3")
    found = document("ab", *CHAT, *MODEL, "--command", "fleet", *routes)
    assert [row["name"] for row in found["options_that_differ"]] == ["routing"]
    assert len(found["a"]["result"]["replicas"]) == 3
    assert found["pairs"] is None


def test_the_terminal_tells_why_before_the_figures() -> None:
    done = kvledger("ab", *CHAT, *MODEL, "--b", "quantization=fp8")
    lines = done.stdout.splitlines()
    assert lines[0] == "What differs, and its effect"
    assert lines[1] == "- B has quantization fp8 instead of its default. All else is equal."
    assert any(line.startswith("Side by side") for line in lines)
    assert "Assumptions that differ" in done.stdout


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((), "A and B are the same"),
        (("--b", "block-size=64"), "A and B are the same"),
        (("--b", "block-size"), "--b is 'block-size'; it must look like"),
        (("--b", "colour=red"), "B (workload conversation"),
        (("--b", "max-num-seqs=4", "--command", "plan"), "it is one of replay, fleet"),
    ],
)
def test_a_question_without_two_sides_is_refused(changes: tuple[str, ...], message: str) -> None:
    done = kvledger("ab", *CHAT, *MODEL, *changes)
    assert done.returncode == 2
    assert message in done.stderr


def test_options_are_written_as_they_are_spelled_on_the_command_line() -> None:
    given = {"trace_format": "azure", "enable_prefix_caching": False, "closed_loop": False, "async_scheduling": True}
    texts = texts_of(Scenario.from_dict({**given, "n": 2, "limit": None, "max_num_seqs": None, "model": "m"}))
    assert texts == {
        "format": "azure",
        "enable-prefix-caching": "no",
        "open-loop": "yes",
        "async-scheduling": "yes",
        "n": "2",
        "model": "m",
    }


def test_a_change_to_default_takes_an_option_away() -> None:
    question = AbQuestion(command="replay", scenario=Scenario(model="m", n=2), a={"n": "default"}, b={"gpu": "H100"})
    assert question.options(question.a) == {"model": "m"}
    assert question.options(question.b) == {"n": "2", "model": "m", "gpu": "H100"}
