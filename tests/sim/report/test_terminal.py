"""On a terminal: progress with an estimate of the time left. Off it: silence. Ctrl-C: what is done is kept."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
CODE = ("--workload", "code", "--limit", "300", "--rate-scale", "15")
POOL = ("--num-gpu-blocks-override", "3000", "--block-size", "64", "--max-num-seqs", "32")


def on_a_terminal(*arguments: str, interrupt_after: str | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, and what a terminal on standard error was shown, without colours and movements.

    A Ctrl-C is sent as soon as the terminal was shown `interrupt_after`.
    """
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with tempfile.TemporaryFile("w+") as out:
        running = subprocess.Popen(
            [BIN, *arguments], stdout=out, stderr=theirs, stdin=subprocess.DEVNULL, env=environment, text=True
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end was closed
                break
            if not piece:
                break
            shown += piece
            if interrupt_after is not None and interrupt_after.encode() in shown:
                running.send_signal(signal.SIGINT)
                interrupt_after = None
        os.close(ours)
        code = running.wait(timeout=60)
        out.seek(0)
        return code, out.read(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.parametrize(
    ("arguments", "counts", "says"),
    [
        (("replay", *CODE, *POOL), r"\d+/300", "Replaying"),
        (("size", *CODE, *POOL, "--slo-ttft-p99", "0.4", "--probes", "0"), r"\d+/300", "tensor parallel size 1"),
        (
            ("sweep", "--set", "workload=code", "--set", "limit=20", "--grid", "num-gpu-blocks-override=600,700"),
            r"\d+/2",
            "Points",
        ),
    ],
    ids=["replay", "size", "sweep"],
)
def test_progress_counts_and_estimates_the_time_left(arguments: tuple[str, ...], counts: str, says: str) -> None:
    code, out, shown = on_a_terminal(*arguments, "--json")
    assert code == 0
    assert json.loads(out)
    assert says in shown
    assert re.search(counts, shown)
    assert re.search(r"\d:\d\d:\d\d", shown), "a time left"


def test_a_study_interrupted_from_the_keyboard_leaves_a_report_of_what_was_done(tmp_path: Path) -> None:
    options = ("--workload", "conversation", "--model", "llama-3.1-8b", "--gpu", "H100", "--block-size", "16")
    report = tmp_path / "report"
    code, out, shown = on_a_terminal(
        "study", *options, "--output", str(report), "--json", interrupt_after="compare: done"
    )
    assert code == 130
    kept = json.loads((report / "study.json").read_text())
    assert kept == json.loads(out)
    assert kept["not_done"] == {"replay": "interrupted before it finished"}
    assert "plan, curve, compare done before the interrupt, and kept in" in shown.replace("\r\n", " ")
    assert "<h2" in (report / "index.html").read_text()
