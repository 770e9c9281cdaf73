"""`kvledger explain-run` from the command line: errors, a page, and bad input."""

import json
from pathlib import Path

import pytest
from kvledger.sim.commands.cli import main

ENGINE = ["--num-gpu-blocks-override", "100", "--block-size", "16", "--base-ms", "10"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    rows = [
        {
            "request_id": f"<b>{number}</b>",
            "input_toks": 50,
            "output_toks": 10,
            "queued_ts": number / 10,
            "scheduled_ts": number / 10,
            "first_token_ts": number / 10 + 0.03,
            "last_token_ts": number / 10 + 0.2,
        }
        for number in range(20)
    ]
    path = tmp_path / "small.req.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.ts.csv").write_text("t,running,waiting\n0.5,2,0\n1.0,2,0\n1.5,2,0\n")
    return path


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["kvledger", "explain-run", *arguments])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_prints_errors_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_file: Path
) -> None:
    code, out, _ = run(capsys, monkeypatch, str(run_file), *ENGINE)
    assert code == 0
    for text in ("20 requests (LLMServingSim)", "TTFT error", "Why they differ", "Requests running", "differ most"):
        assert text in out


def test_it_writes_a_page_and_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "page"
    code, out, _ = run(capsys, monkeypatch, str(run_file), *ENGINE, "--output", str(folder), "--json")
    assert code == 0
    assert json.loads((folder / "run.json").read_text()) == json.loads(out)
    page = (folder / "index.html").read_text()
    for name in ("plot-run-ttft", "plot-run-tpot", "plot-run-both", "plot-run-load"):
        assert f'id="{name}"' in page
    # Names from files are escaped, and no other element has the id of the plots' data.
    assert "<b>1</b>" not in page.split('id="plots"')[0]
    assert page.count('id="plots"') == 1


def test_bad_input_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, run_file: Path, tmp_path: Path
) -> None:
    for arguments, message in (
        ([str(tmp_path / "none.json"), *ENGINE], "No such file"),
        ([str(run_file)], "how large is the pool?"),
        ([str(run_file), *ENGINE, "--calibrate", str(tmp_path / "no" / "x.json")], "--calibrate"),
        ([str(run_file), *ENGINE, "--tokens", str(run_file)], "no input_tok_ids"),
    ):
        code, _, error = run(capsys, monkeypatch, *arguments)
        assert (code, error.count("\n")) == (2, 1)
        assert message in error
