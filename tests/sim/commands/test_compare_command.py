"""`kvledger compare`: its JSON, its table, its exit codes, and what it says about what is missing."""

import io
import json
import os
import sys
from pathlib import Path

import pytest
from kvledger.sim.baselines.baselines import compare_allocators
from kvledger.sim.commands.cli import main
from kvledger.sim.report.curve import compare_table
from rich.console import Console

ALLOCATOR_KEYS = {
    "name",
    "token_pct",
    "reservation_pct",
    "internal_pct",
    "external_pct",
    "mean_batch",
    "max_batch",
    "preemptions",
}
MEMORY = ["--kv-cache-tokens", "2000", "--max-model-len", "512"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "input_length": 50 + i % 100, "output_length": 20 + i % 70} for i in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run_command


def test_json_has_every_allocator_with_shares_that_add_up(run, trace: str) -> None:
    code, out, err = run("compare", trace, *MEMORY, "--json")
    payload = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["name"] for row in payload["allocators"]] == ["static", "pow2", "oracle", "growing", "paged"]
    for row in payload["allocators"]:
        assert row.keys() >= ALLOCATOR_KEYS
        assert sum(row[f"{part}_pct"] for part in ("token", "reservation", "internal", "external")) == pytest.approx(
            100
        )
        assert row["finished"] == 300
    assert payload["num_slots"] == 2000
    assert payload["max_model_len"] == 512
    assert payload["window"]["num_requests"] == 300
    assert payload["assumptions"]


def test_two_runs_print_identical_bytes(run, trace: str) -> None:
    assert run("compare", trace, *MEMORY, "--json") == run("compare", trace, *MEMORY, "--json")


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(columns: int) -> None:
    usages = compare_allocators([(50, 40)] * 300, num_slots=2_000, max_model_len=512, block_size=16)
    screen = io.StringIO()
    Console(file=screen, width=columns).print(compare_table(usage.as_dict() for usage in usages))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    header = next(line for line in lines if "Allocator" in line)
    assert header.split()[-3:] == ["Batch", "Max", "Preempted"]
    rows = [line.split() for line in lines if "%" in line]
    assert [row[0] for row in rows] == ["static", "pow2", "oracle", "growing", "paged"]
    assert all(row.count("%") == 4 for row in rows), "a row was folded"


def test_the_report_states_setup_definitions_and_assumptions(run, trace: str) -> None:
    _, out, _ = run("compare", trace, *MEMORY)
    text = " ".join(out.split())
    for part in (
        "300 requests on 2,000 token slots (--kv-cache-tokens), max_model_len 512 (--max-model-len), blocks of 16",
        "Shares of all token slots",
        "arrival times are not used",
        "1.00 % of the blocks stay free",
    ):
        assert part in text


def test_memory_may_be_given_in_blocks_or_in_bytes_of_a_model(run, trace: str) -> None:
    _, out, _ = run("compare", trace, "--num-gpu-blocks-override", "125", "--max-model-len", "512", "--json")
    assert json.loads(out)["num_slots"] == 2000
    _, out, _ = run("compare", trace, "--model", "opt-13b", "--kv-cache-memory-bytes", "12GiB", "--json")
    payload = json.loads(out)
    assert payload["kv_bytes_per_token"] == 819_200
    assert payload["num_slots"] == (12 << 30) // 819_200
    assert payload["max_model_len"] == 2048
    assert "opt-13b" in payload["max_model_len_source"]
    _, out, _ = run("compare", trace, "--model", "opt-13b", "--kv-cache-dtype", "fp8", *MEMORY, "--json")
    assert json.loads(out)["kv_bytes_per_token"] == 819_200 // 2
    growth = payload["allocators"][3]["growth"]
    assert growth["copied_bytes"] == growth["copied_tokens"] * 819_200


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-model-len", "512"], "--kv-cache-tokens, --num-gpu-blocks-override, --kv-cache-memory-bytes"),
        ([*MEMORY, "--num-gpu-blocks-override", "9"], "--kv-cache-tokens and --num-gpu-blocks-override"),
        (["--kv-cache-tokens", "2000"], "--max-model-len is missing"),
        (["--kv-cache-tokens", "2000"], "the longest request here has 228 tokens"),
        (["--kv-cache-tokens", "0", "--max-model-len", "512"], "--kv-cache-tokens 0"),
        (["--kv-cache-memory-bytes", "12GiB", "--max-model-len", "512"], "needs --model"),
        ([*MEMORY, "--block-size", "0"], "--block-size is 0"),
        ([*MEMORY, "--watermark", "1"], "watermark is 1"),
        ([*MEMORY, "--model", "gemma-3-27b"], "window or a state"),
        ([*MEMORY, "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 has no effect without --model"),
        ([*MEMORY, "--workload", "conversation"], "not more than one of them"),
        ([*MEMORY, "--seed", "3"], "--seed"),
        ([*MEMORY, "--on-bad-row", "ignore"], "ignore"),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_named(run, trace: str, arguments: list[str], named: str) -> None:
    code, out, err = run("compare", trace, *arguments)
    assert (code, out) == (2, "")
    assert named in " ".join(err.split())


def test_a_built_in_workload_needs_no_file_and_depends_on_its_seed(run) -> None:
    arguments = [
        "compare",
        "--workload",
        "sharegpt",
        *MEMORY[:2],
        "--max-model-len",
        "2048",
        "--limit",
        "400",
        "--json",
    ]
    first, again, other = (run(*arguments, "--seed", seed)[1] for seed in ("1", "1", "2"))
    assert first == again != other
    payload = json.loads(first)
    assert payload["window"]["num_requests"] == 400
    assert payload["trace"]["workload"]["seed"] == 1
    code, _, err = run(*arguments, "--on-bad-row", "skip")
    assert code == 2
    assert "--on-bad-row skip has no effect on a built-in workload" in err


def test_neither_trace_nor_workload_is_an_error(run) -> None:
    code, _, err = run("compare", *MEMORY)
    assert code == 2
    assert "--workload" in err


def test_a_bad_row_is_refused_by_its_place_or_skipped_and_counted(run, trace: str) -> None:
    with open(trace, "a") as file:
        file.write('{"timestamp": 300, "input_length": -1, "output_length": 2}\n')
    code, _, err = run("compare", trace, *MEMORY)
    assert code == 2
    assert "trace.jsonl:301" in err
    code, out, _ = run("compare", trace, *MEMORY, "--on-bad-row", "skip", "--json")
    assert code == 0
    assert json.loads(out)["trace"]["rows_skipped"]["negative"]["num_rows"] == 1


def test_an_answer_of_no_exits_with_one_and_the_numbers(run, trace: str) -> None:
    code, out, err = run("compare", trace, "--kv-cache-tokens", "60", "--max-model-len", "512")
    assert (code, out) == (1, "")
    assert "the shortest has 70 tokens" in err


def test_refused_requests_are_told(run, trace: str) -> None:
    _, out, _ = run("compare", trace, "--kv-cache-tokens", "2000", "--max-model-len", "200")
    assert "Every allocator refused" in out
    assert "longer than max_model_len 200" in out
    _, out, _ = run("compare", trace, "--kv-cache-tokens", "500", "--max-model-len", "300")
    assert "static refused 300 of 300 requests: larger than its 500 slots can ever hold." in " ".join(out.split())


def test_the_window_is_what_was_asked_for(run, trace: str) -> None:
    _, out, _ = run("compare", trace, *MEMORY, "--skip-first", "100", "--limit", "50", "--json")
    window = json.loads(out)["window"]
    assert (window["skip_first"], window["limit"], window["num_requests"]) == (100, 50, 50)


@pytest.mark.skipif(
    "KVLEDGER_TRACES" not in os.environ, reason="KVLEDGER_TRACES does not name a folder of public traces"
)
def test_the_code_trace_of_azure_wastes_least_when_paged(run) -> None:
    path = Path(os.environ["KVLEDGER_TRACES"]) / "azure" / "AzureLLMInferenceTrace_code.csv.gz"
    code, out, _ = run("compare", str(path), "--kv-cache-tokens", "100000", "--max-model-len", "8192", "--json")
    rows = {row["name"]: row for row in json.loads(out)["allocators"]}
    assert code == 0
    assert all(row["finished"] == 8_819 for row in rows.values())
    assert rows["static"]["token_pct"] < rows["pow2"]["token_pct"] < rows["oracle"]["token_pct"] < 65
    assert rows["paged"]["token_pct"] > 95
