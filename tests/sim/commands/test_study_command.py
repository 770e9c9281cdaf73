"""`kvledger study`: one document of four parts, the answer first, kept when interrupted, the same from run to run."""

import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvledger.sim.commands.cli import main
from kvledger.sim.figures import at_path
from kvledger.sim.report import study_tables
from kvledger.sim.study import study as study_parts
from rich.console import Console

Run = Callable[..., tuple[int, str, str]]

DEPLOYMENT = ["--model", "llama-3.1-8b", "--gpu", "H100"]
SMALL = ["--workload", "conversation", "--limit", "60", *DEPLOYMENT, "--block-size", "64"]
KEYS = {
    "plan": {
        *("ledger", "page_size_bytes", "bytes_per_block", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency"),
        *("max_model_len", "groups", "ranks", "warnings", "fits"),
    },
    "curve": {"trace", "window", "block_size", "policy", "points", "infinite", "at_pool", "at_90_percent"},
    "replay": {
        *("requests", "prefix_cache", "preemptions", "kv_cache_usage", "ttft_s", "tpot_s", "itl_s", "e2e_s"),
        *("throughput", "simulated_seconds", "steps", "assumptions"),
    },
    "compare": {"allocators", "num_slots", "max_model_len", "assumptions"},
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run the command line in this process, in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def study(run: Run) -> dict[str, Any]:
    code, out, err = run("study", *SMALL, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def shared_prefixes(path: Path, count: int = 40) -> str:
    """A trace of conversations that grow: request i shares the first blocks of request i - 4."""
    rows: list[str] = []
    for i in range(count):
        blocks = [100 * (i % 4) + k for k in range(2 + i // 4)]
        rows.append(
            json.dumps(
                {"timestamp": 500 * i, "input_length": 512 * len(blocks), "output_length": 20, "hash_ids": blocks}
            )
        )
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def test_one_document_holds_the_four_parts_by_name_and_the_answer_first(study: dict[str, Any]) -> None:
    for part, keys in KEYS.items():
        assert keys <= study[part].keys(), part
    assert list(study)[:3] == ["title", "command", "answer"]
    assert study["not_done"] == {}
    assert [len(sentence["figures"]) > 0 for sentence in study["answer"]["sentences"]] == [True] * 8


def test_every_figure_of_the_answer_has_unit_source_and_assumption_and_is_the_one_at_its_source(
    study: dict[str, Any],
) -> None:
    figures = study["answer"]["figures"]
    assert {
        "num_gpu_blocks",
        "kv_cache_tokens",
        "lru_hit_rate",
        "optimum_hit_rate",
        "ceiling_hit_rate",
        "ttft_p99",
    } <= set(figures)
    num_paths = 0
    for name, figure in figures.items():
        assert figure["unit"], name
        assert figure["source"], name
        assert figure["assumption"], name
        if " " not in figure["source"]:
            assert at_path(study, figure["source"]) == figure["value"], name
            num_paths += 1
    assert num_paths >= 20
    for sentence in study["answer"]["sentences"]:
        assert all(figures[name]["shown"] in sentence["text"] for name in sentence["figures"])


def test_figures_by_a_formula_are_what_the_formula_says(study: dict[str, Any]) -> None:
    figures, curve = study["answer"]["figures"], study["curve"]
    enough = curve["working_set"]["lru_blocks_for_share_of_ceiling"]["90%"] * curve["block_size"]
    assert figures["tokens_for_90_percent"]["value"] == enough == curve["at_90_percent"]["tokens"]
    assert figures["pools_for_90_percent"]["value"] == enough / study["plan"]["kv_cache_tokens"]
    batch = {row["name"]: row["mean_batch"] for row in study["compare"]["allocators"]}
    assert figures["paged_over_static"]["value"] == batch["paged"] / batch["static"]


def test_two_runs_give_the_same_bytes_but_for_timing(run: Run) -> None:
    documents: list[dict[str, Any]] = []
    for folder in ("first", "second"):
        code, out, _ = run("study", *SMALL, "--json", "--output", folder)
        assert code == 0
        documents.append(json.loads(out))
    first, second = documents
    assert (
        first.pop("timing").keys()
        == second.pop("timing").keys()
        == {"plan", "curve", "compare", "replay", "total_seconds"}
    )
    assert json.dumps(first) == json.dumps(second)
    assert "timing" not in json.dumps(first)
    assert Path("first/index.html").read_bytes() == Path("second/index.html").read_bytes()


def test_the_printed_document_is_the_one_in_the_report(run: Run) -> None:
    _, out, _ = run("study", *SMALL, "--json", "--output", "there")
    assert Path("there/study.json").read_text() == out


def test_each_part_says_what_its_own_command_says(run: Run, study: dict[str, Any]) -> None:
    _, out, _ = run("plan", *DEPLOYMENT, "--block-size", "64", "--max-model-len", "auto", "--json")
    plan = json.loads(out)
    assert plan == study["plan"]
    _, out, _ = run("curve", *SMALL[:4], "--policy", "lru,optimum", "--capacities", "100,400", "--json")
    curve = json.loads(out)
    assert (curve["infinite"]["hit_blocks"], curve["working_set"]) == (
        study["curve"]["infinite"]["hit_blocks"],
        study["curve"]["working_set"],
    )
    memory = ["--kv-cache-tokens", str(plan["kv_cache_tokens"]), "--block-size", "64", "--max-num-seqs", "1024"]
    _, out, _ = run("compare", *SMALL[:4], "--model", "llama-3.1-8b", *memory, "--json")
    assert json.loads(out)["allocators"] == study["compare"]["allocators"]
    blocks = ["--num-gpu-blocks-override", str(plan["num_gpu_blocks"]), "--block-size", "64"]
    _, out, _ = run("replay", *SMALL[:4], *blocks, "--json")
    replay = json.loads(out)
    assert replay["requests"] == study["replay"]["requests"]
    assert replay["trace"] == study["replay"]["trace"]
    assert replay["assumptions"]["num_blocks"] == study["replay"]["assumptions"]["num_blocks"]


def test_the_curve_has_a_point_at_this_pool_for_lru_and_the_optimum(study: dict[str, Any]) -> None:
    at_pool, curve = study["curve"]["at_pool"], study["curve"]
    tokens = (study["plan"]["num_gpu_blocks"] - 1) * 64
    assert at_pool["lru"]["num_blocks"] == at_pool["optimum"]["num_blocks"] == tokens // 512
    assert at_pool["lru"] in curve["policies"]["lru"]
    assert at_pool["optimum"] in curve["policies"]["optimum"]
    rates = [
        at_pool["lru"]["token_hit_rate"],
        at_pool["optimum"]["token_hit_rate"],
        curve["infinite"]["token_hit_rate"],
    ]
    assert rates == sorted(rates)
    line = [point["token_hit_rate"] for point in curve["lru_line"]]
    assert line == sorted(line)
    assert line[-1] == curve["infinite"]["token_hit_rate"]


def test_the_distributions_agree_with_the_percentiles(study: dict[str, Any]) -> None:
    for name, distribution in study["replay"]["distributions"].items():
        shares, p99 = distribution["share"], study["replay"][name]["p99"]
        assert shares == sorted(shares)
        assert len(shares) == len(distribution["up_to_s"])
        for limit, share in zip(distribution["up_to_s"], shares, strict=True):
            if abs(limit - p99) > 0.002 * p99:  # the percentiles come from a sketch of that precision
                assert (share >= 0.99) == (limit > p99), (name, limit)
    assert study["replay"]["distributions"].keys() == {"ttft_s", "itl_s", "tpot_s", "e2e_s"}


def test_the_command_in_the_report_gives_the_report_again(run: Run, tmp_path: Path) -> None:
    trace = shared_prefixes(tmp_path / "odd name's $(trace).jsonl")
    options = [
        trace,
        "--skip-first",
        "2",
        *DEPLOYMENT,
        "--block-size",
        "64",
        "--no-enable-prefix-caching",
        "--enforce-eager",
    ]
    _, out, _ = run("study", *options, "--capacities", "5,50", "--rate-scale", "2", "--json", "--output", "somewhere")
    first = json.loads(out)
    words = shlex.split(first["command"])
    assert words[:3] == ["kvledger", "study", trace]
    _, out, _ = run(*words[1:], "--json")
    again = json.loads(out)
    del first["timing"], again["timing"]
    assert again == first
    assert first["replay"]["assumptions"]["enable_prefix_caching"] is False
    assert {5, 50} <= {point["num_blocks"] for point in first["curve"]["points"]}


def test_the_commands_to_try_next_work(run: Run, study: dict[str, Any]) -> None:
    assert len(study["next"]) == 4
    for step in study["next"]:
        code, out, err = run(*shlex.split(step["command"])[1:])
        assert (code, err) == (0, ""), step
        assert out


def test_a_person_sees_the_answer_the_tables_where_the_report_is_and_what_to_try_next(run: Run) -> None:
    code, out, err = run("study", *SMALL)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    for part in (
        "llama-3.1-8b on 1 x H100, serving the conversation workload",
        "What fits?",
        "Prompt tokens served by the prefix cache",
        "Latency, including queueing",
        "What fills the KV memory",
        "What changes the answer",
        "kvledger-report/index.html",
        "kvledger-report/study.json",
        "Try next",
        "--max-num-seqs 1024 (the engine's default)",
    ):
        assert part in text
    assert (
        text.index("What fits?")
        < text.index("Prompt tokens served")
        < text.index("kvledger-report/index.html")
        < text.index("Try next")
    )
    assert Path("kvledger-report/index.html").exists()


def test_the_tables_fit_eighty_columns(study: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(study_tables, "console", lambda: Console(file=screen, width=80, highlight=False))
    study_tables.print_study(study, Path("report/index.html"), Path("report/study.json"))
    lines = screen.getvalue().splitlines()
    assert max(len(line) for line in lines if "kvledger " not in line) <= 80
    for name in ("static", "pow2", "oracle", "growing", "paged"):
        (row,) = [line.split() for line in lines if line.strip().startswith(name)]
        assert row.count("%") == 4, "a row was folded"
    latencies = [line for line in lines if line.strip().startswith(("TTFT", "ITL", "TPOT", "E2E"))]
    assert [len(line.split()) for line in latencies] == [12] * 4


def test_where_no_deployment_is_named_the_first_assumption_and_the_command_name_the_example(run: Run) -> None:
    code, out, _ = run("study", "--workload", "conversation", "--limit", "30", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["plan"]["assumptions"][0].startswith("EXAMPLE: no deployment was given")
    assert document["command"].endswith("--model llama-3.1-8b --gpu H100 --limit 30")
    assert all("--model llama-3.1-8b --gpu H100" in step["command"] for step in document["next"][:2])
    _, out, _ = run("study", "--workload", "conversation", "--limit", "30")
    assert "EXAMPLE: no deployment was given" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "llama-3.1-8b"], "--model llama-3.1-8b is given and --gpu is not"),
        (["--gpu", "H100"], "--gpu H100 is given and --model is not"),
        ([*DEPLOYMENT, "--capacities", "10,x"], "--capacities 10,x: 'x'"),
        ([*DEPLOYMENT, "--trace-block-size", "512"], "--trace-block-size 512 has no effect on a built-in workload"),
        ([*DEPLOYMENT, "--num-gpu-blocks-override", "9", "--kv-cache-memory-bytes", "1GiB"], "both size the pool"),
        ([*DEPLOYMENT, "--output", "taken/there"], "--output taken/there"),
        (["--model", "no-such-model", "--gpu", "H100"], "no-such-model"),
        (["--model", "llama-3.1-8b", "--gpu", "no-such-gpu"], "no-such-gpu"),
    ],
)
def test_what_is_missing_or_wrong_is_named_and_nothing_is_written(run: Run, arguments: list[str], named: str) -> None:
    Path("taken").write_text("a file, no folder")
    code, out, err = run("study", "--workload", "conversation", "--limit", "20", *arguments)
    assert (code, out) == (2, "")
    assert named in " ".join(err.split())
    assert not Path("kvledger-report/study.json").exists()


def test_a_bad_row_is_named_by_its_place_or_skipped_and_counted(run: Run, tmp_path: Path) -> None:
    trace = shared_prefixes(tmp_path / "trace.jsonl")
    with open(trace, "a") as file:
        file.write('{"timestamp": 99999, "input_length": -1, "output_length": 2, "hash_ids": []}\n')
    code, _, err = run("study", trace, *DEPLOYMENT)
    assert code == 2
    assert "trace.jsonl:41" in err
    code, out, _ = run("study", trace, *DEPLOYMENT, "--on-bad-row", "skip", "--json")
    assert code == 0
    assert json.loads(out)["curve"]["trace"]["rows_skipped"]["negative"]["num_rows"] == 1


def test_a_deployment_that_does_not_fit_exits_with_one_keeps_the_curve_and_names_a_way_out_that_works(run: Run) -> None:
    small = [
        "--workload",
        "conversation",
        "--limit",
        "30",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "L4",
        "--block-size",
        "64",
        "--max-model-len",
        "128K",
    ]
    code, out, _ = run("study", *small, "--json")
    document = json.loads(out)
    assert code == 1
    assert document["plan"]["fits"] is False
    assert document["curve"]["infinite"]["hit_blocks"] > 0
    assert set(document["not_done"]) == {"compare", "replay"}
    assert document["replay"] is None
    refused = "This deployment does not fit: one request of 131,072 tokens does not fit"
    assert document["answer"]["sentences"][0]["text"].startswith(refused)
    code, out, _ = run(*shlex.split(document["next"][0]["command"])[1:], "--json")
    assert code == 0
    assert json.loads(out)["plan"]["fits"] is True
    code, out, _ = run("study", *small)
    assert code == 1
    assert "Not in this report" in out
    assert "--max-model-len" in out


def test_an_interrupt_keeps_what_is_done_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study_parts, "replay_scenario", interrupted)
    code, out, err = run("study", *SMALL)
    assert code == 130
    assert "plan, curve, compare done before the interrupt, and kept in kvledger-report" in err
    document = json.loads(Path("kvledger-report/study.json").read_text())
    assert document["not_done"] == {"replay": "interrupted before it finished"}
    assert document["replay"] is None
    assert document["compare"]["allocators"]
    assert "interrupted before it finished" in Path("kvledger-report/index.html").read_text()
    assert document["next"][0]["command"] == document["command"]
    assert "What does paging gain?" in out


def test_a_trace_without_ids_claims_no_reuse(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    rows = [{"timestamp": 900 * i, "input_length": 600 + i, "output_length": 30} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = run("study", str(path), *DEPLOYMENT, "--json")
    document = json.loads(out)
    assert code == 0
    texts = [sentence["text"] for sentence in document["answer"]["sentences"]]
    assert "Unknown: the trace does not say which prompts share blocks." in texts
    assert "lru_hit_rate" not in document["answer"]["figures"]
    page = Path("kvledger-report/index.html").read_text()
    assert 'id="plot-curve"' not in page
    assert 'id="plot-time"' in page


def test_a_model_with_windows_is_replayed_with_its_groups_and_not_compared(run: Run) -> None:
    hybrid = ["--model", "gemma-3-1b", "--gpu", "H100", "--max-model-len", "32K", "--num-gpu-blocks-override", "9000"]
    code, out, _ = run("study", "--workload", "sharegpt", "--limit", "40", *hybrid, "--json")
    document = json.loads(out)
    assert code == 0
    assert "a window or a state" in document["not_done"]["compare"]
    assert any("SlidingWindow" in group for group in document["replay"]["assumptions"]["groups"])
    assert document["replay"]["requests"]["finished"] == 40


def test_a_pinned_pool_is_named_as_what_limits(run: Run) -> None:
    code, out, _ = run("study", *SMALL, "--num-gpu-blocks-override", "3000", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["plan"]["num_gpu_blocks"] == document["replay"]["assumptions"]["num_blocks"] == 3000
    assert document["answer"]["sentences"][1]["text"].startswith("--num-gpu-blocks-override: it fixes the pool's size.")
    assert len(document["what_if"]) == 1


def test_what_if_rows_are_plans_of_their_own(run: Run, study: dict[str, Any]) -> None:
    as_it_is, *changes = study["what_if"]
    assert as_it_is["num_gpu_blocks"] == study["plan"]["num_gpu_blocks"]
    assert as_it_is["lru_token_hit_rate"] == study["curve"]["at_pool"]["lru"]["token_hit_rate"]
    assert len(changes) == 4
    for row in changes:
        _, out, _ = run("plan", *DEPLOYMENT, "--block-size", "64", *row["option"].split(), "--json")
        assert json.loads(out)["num_gpu_blocks"] == row["num_gpu_blocks"], row["option"]


@pytest.mark.slow
@pytest.mark.skipif(
    "KVLEDGER_TRACES" not in os.environ, reason="KVLEDGER_TRACES does not name a folder of public traces"
)
def test_an_hour_of_production_traffic_is_studied_whole(run: Run) -> None:
    path = Path(os.environ["KVLEDGER_TRACES"]) / "mooncake" / "conversation_trace.jsonl.gz"
    code, out, _ = run("study", str(path), *DEPLOYMENT, "-tp", "4", "--block-size", "64", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["replay"]["requests"] == {"total": 12_031, "finished": 12_031, "rejected": 0, "aborted": 0}
    assert round(document["curve"]["infinite"]["block_hit_rate"], 4) == 0.3664
    assert document["derived"]["falls_behind"] is False
