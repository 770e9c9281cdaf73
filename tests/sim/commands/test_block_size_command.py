"""`kvledger block-size`: the largest block size that costs nothing noticeable."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvledger.sim.search.block_size import JUDGED, judged

BIN = Path(sys.executable).parent / "kvledger"
CHAT = ("--workload", "conversation", "--limit", "60", "--model", "llama-3.1-8b", "--gpu", "H100")


def kvledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, *arguments], capture_output=True, text=True, timeout=300)


def document(*arguments: str) -> dict[str, Any]:
    done = kvledger(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_trace(folder: Path) -> Path:
    """Prompts of 1,000 tokens that share 500 of them."""
    trace = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": 4000 * n,
            "input_length": 1000,
            "output_length": 8,
            "hash_ids": [*range(5), *range(5 + 5 * n, 10 + 5 * n)],
        }
        for n in range(1, 60)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return trace


def test_each_row_is_the_replay_at_its_size() -> None:
    found = document("block-size", *CHAT, "--block-sizes", "64,256")
    for row in found["rows"]:
        alone = document("replay", *CHAT, "--block-size", str(row["block_size"]))
        assert row["figures"]["ttft_s.p99"] == alone["ttft_s"]["p99"]
        assert row["figures"]["prefix_cache.hit_rate"] == alone["prefix_cache"]["hit_rate"]
        assert row["figures"]["assumptions.num_blocks"] == alone["assumptions"]["num_blocks"]
        assert row["blocks_of_the_longest_request"] == 131_072 // row["block_size"]


def test_the_answer_is_the_largest_size_that_is_nowhere_noticeably_behind(tmp_path: Path) -> None:
    trace, pool = str(write_trace(tmp_path)), ("--num-gpu-blocks-override", "4000", "--trace-block-size", "100")
    found = document("block-size", trace, *pool, "--block-sizes", "20,50,100,500,1000")
    rows = {row["block_size"]: row for row in found["rows"]}
    # 500 shared tokens: whole blocks of up to 500 find all of them, one of 1,000 none.
    assert rows[500]["figures"]["prefix_cache.hit_rate"] == rows[20]["figures"]["prefix_cache.hit_rate"] > 0.4
    assert rows[1000]["figures"]["prefix_cache.hit_rate"] == 0
    assert rows[1000]["most_behind"] == 1.0
    assert found["answer"]["block_size"] == 500
    assert found["answer"]["is_within_tolerance"]
    assert found["answer"]["sentence"].startswith("500 tokens is the largest size whose hit rate, p99 TTFT")
    assert all(name in found["answer"]["sentence"] for _, name, _ in JUDGED)


def test_a_pool_that_is_given_in_blocks_has_as_many_tokens_at_every_size(tmp_path: Path) -> None:
    trace, pool = str(write_trace(tmp_path)), ("--num-gpu-blocks-override", "4000", "--trace-block-size", "100")
    found = document("block-size", trace, *pool, "--block-sizes", "20,500")
    assert [row["figures"]["assumptions.num_blocks"] for row in found["rows"]] == [4000, 160]
    assert found["pool"] == "4000 blocks of 20 tokens; the same number of tokens at each size"


def row(size: int, ttft_s: float, hit_rate: float = 0.3, finished: int = 50) -> dict[str, Any]:
    figures = {
        "prefix_cache.hit_rate": hit_rate,
        "ttft_s.p99": ttft_s,
        "tpot_s.p99": 0.02,
        "throughput.output_tokens_per_s": 100.0,
        "requests.finished": finished,
    }
    return {"block_size": size, "figures": figures}


def test_where_every_size_is_behind_in_something_the_least_behind_is_named() -> None:
    rows = [row(16, ttft_s=1.2), row(64, ttft_s=1.05, hit_rate=0.29), row(256, ttft_s=1.0, hit_rate=0.2)]
    answer = judged(rows, 0.01)
    assert [one["most_behind"] for one in rows] == pytest.approx([0.2, 0.05, 1 / 3])
    assert (answer["block_size"], answer["is_within_tolerance"]) == (64, False)
    assert answer["sentence"].endswith("its p99 TTFT is 0.05 from the best")
    assert judged(rows, 0.06)["block_size"] == 64
    assert judged(rows, 0.2)["is_within_tolerance"]


def test_a_size_at_which_requests_are_refused_is_behind() -> None:
    rows = [row(16, ttft_s=1.0), row(64, ttft_s=0.5, finished=40)]
    assert judged(rows, 0.3)["block_size"] == 64
    rows = [row(16, ttft_s=0.5), row(64, ttft_s=0.5, finished=40)]
    assert judged(rows, 0.1)["block_size"] == 16


def test_finished_sizes_are_kept(tmp_path: Path) -> None:
    first = document("block-size", *CHAT, "--block-sizes", "64,128", "--keep", str(tmp_path))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(kept) == 2
    document("block-size", *CHAT, "--block-sizes", "64,128,256", "--keep", str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert document("block-size", *CHAT, "--block-sizes", "64,128", "--jobs", "2") == first


def test_a_size_that_does_not_work_is_a_row_with_its_reason() -> None:
    pool = ("--workload", "code", "--limit", "10", "--num-gpu-blocks-override", "4000")
    found = document("block-size", *pool, "--block-sizes", "16,100000")
    assert "error" not in found["rows"][0]
    assert "num_blocks is 0; it must be" in found["rows"][1]["error"]
    assert found["answer"]["block_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--block-sizes", "16"), "give two or more to compare"),
        (("--block-sizes", "16,large"), "is not a whole number of tokens"),
        (("--tolerance", "1"), "--tolerance is 1.0"),
        (("--max-num-seqs", "0"), "no block size has a result; 16: InputError"),
    ],
)
def test_bad_input_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    done = kvledger("block-size", *CHAT, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
