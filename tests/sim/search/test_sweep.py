"""Sweeps: rows in the order of the grid, the same bytes for any workers, and nothing computed twice."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kvledger.core import InputError
from kvledger.sim.search.kept import content_of
from kvledger.sim.search.sweep import Point, SweepQuestion, best_row, grid, parse_axis, run_point

BIN = Path(sys.executable).parent / "kvledger"
BASE = ("--set", "workload=code", "--set", "limit=6")
GRID = ("--grid", "num-gpu-blocks-override=600,700,800,0", "--grid", "seed=0..2")
MEDIUM = ("--grid", "num-gpu-blocks-override=600,700", "--grid", "max-num-seqs=4,16", "--grid", "seed=0..9")
LARGE = (
    "--grid",
    "num-gpu-blocks-override=600,700,800,900",
    "--grid",
    "max-num-seqs=2,4,8,16,32",
    "--grid",
    "seed=0..9",
)


def sweep(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([BIN, "sweep", *arguments, "--json"], capture_output=True, timeout=300)


def done(*arguments: str) -> bytes:
    run = sweep(*arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def point(command: str = "replay", **options: str) -> Point:
    named = tuple((name.replace("_", "-"), value) for name, value in options.items())
    return Point(command=command, files=(), options=named, content=content_of(()))


def test_rows_stand_in_the_order_of_the_grid_and_one_failure_leaves_the_rest() -> None:
    document = json.loads(done(*BASE, *GRID, "--minimize", "ttft_s.mean"))
    asked = [(row["options"]["num-gpu-blocks-override"], row["options"]["seed"]) for row in document["rows"]]
    assert asked == [(blocks, seed) for blocks in ("600", "700", "800", "0") for seed in "012"]
    assert document["num_failed"] == 3
    failed = document["rows"][9:]
    assert all(
        "result" not in row and row["error"].startswith("InputError: num_blocks is 0; it must be") for row in failed
    )
    assert all(row["result"]["requests"]["total"] == 6 for row in document["rows"][:9])
    smallest = min(row["result"]["ttft_s"]["mean"] for row in document["rows"][:9])
    assert document["best"]["value"] == smallest
    assert document["rows"][document["best"]["index"]]["options"] == document["best"]["options"]


def test_the_bytes_are_the_same_for_any_number_of_workers_and_when_kept(tmp_path: Path) -> None:
    alone = done(*BASE, *GRID)
    assert done(*BASE, *GRID, "--jobs", "2", "--keep", str(tmp_path)) == alone
    assert done(*BASE, *GRID, "--keep", str(tmp_path)) == alone
    assert b"wall_seconds" not in alone


def test_a_finished_point_is_read_and_not_computed_again(tmp_path: Path) -> None:
    one = point(workload="code", limit="5", num_gpu_blocks_override="600")
    first = run_point(one, str(tmp_path))
    (kept,) = tmp_path.iterdir()
    kept.write_text('{"told": "from the folder"}')
    assert run_point(one, str(tmp_path)) == {"options": first["options"], "result": {"told": "from the folder"}}


def test_a_failed_point_is_tried_again(tmp_path: Path) -> None:
    row = run_point(point(workload="code", limit="5"), str(tmp_path))
    assert row["error"].startswith("InputError: how large is the pool?")
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_the_command_does_not_have_is_the_point_s_error() -> None:
    assert "kvledger replay has no option --colour" in run_point(point(workload="code", colour="red"), None)["error"]


def test_points_are_kept_by_content_and_not_by_file_name(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("one")
    first = Point(command="replay", files=(str(trace),), options=(), content=content_of([str(trace)]))
    moved = Point(command="replay", files=("elsewhere.csv",), options=(), content=first.content)
    trace.write_text("two")
    changed = Point(command="replay", files=(str(trace),), options=(), content=content_of([str(trace)]))
    assert first.key == moved.key != changed.key
    assert point(seed="1").key != point(seed="2").key != point("curve", seed="2").key


def test_a_folder_is_known_by_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("one")
    before = content_of([str(tmp_path)])
    (tmp_path / "b.json").write_text("two")
    assert content_of([str(tmp_path)]) != before


@pytest.mark.parametrize(
    ("grid", "num_points"),
    [(MEDIUM, 40), pytest.param(LARGE, 200, marks=pytest.mark.slow)],
    ids=["40 points", "200 points"],
)
def test_a_sweep_that_was_killed_finishes_the_rest_only(tmp_path: Path, grid: tuple[str, ...], num_points: int) -> None:
    """On two processes, killed after a third or so."""
    wanted = 3 * num_points // 10
    command = [BIN, "sweep", *BASE, *grid, "--jobs", "2", "--keep", str(tmp_path), "--json"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.json"))) < wanted and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.02)
    assert running.poll() is None, "the sweep ended before it could be killed"
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert wanted <= len(before) < num_points
    document = json.loads(done(*BASE, *grid, "--jobs", "2", "--keep", str(tmp_path)))
    assert len(document["rows"]) == num_points
    assert document["num_failed"] == 0
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert len(after) == num_points
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_sweep_tells_the_rows_that_are_done(tmp_path: Path, jobs: str) -> None:
    """A Ctrl-C on a terminal reaches every process of the sweep."""
    command = [BIN, "sweep", *BASE, *LARGE, "--jobs", jobs, "--keep", str(tmp_path), "--json"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("*.json"))) < 12 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)
    out, complaints = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "the same command goes on" in complaints
    document = json.loads(out)
    rows = document["rows"]
    assert 1 <= len(rows) < 200  # in the order of the grid, as far as they were handed over
    assert document["num_not_done"] == 200 - len(rows)
    asked = [
        (blocks, seqs, str(seed)) for blocks in (600, 700, 800, 900) for seqs in (2, 4, 8, 16, 32) for seed in range(10)
    ]
    options = [
        tuple(row["options"][name] for name in ("num-gpu-blocks-override", "max-num-seqs", "seed")) for row in rows
    ]
    assert options == [(str(blocks), str(seqs), seed) for blocks, seqs, seed in asked[: len(rows)]]
    assert document["num_failed"] == 0


def test_curve_and_compare_are_swept_as_well() -> None:
    curve = run_point(point("curve", workload="conversation", limit="20", capacities="100,200"), None)
    assert [one["num_blocks"] for one in curve["result"]["points"]] == [100, 200]
    lengths = ("--set", "workload=sharegpt", "--set", "limit=30", "--set", "kv-cache-tokens=4000")
    compare = json.loads(done("--command", "compare", *lengths, "--set", "max-model-len=2048", "--grid", "seed=0,1"))
    assert compare["num_failed"] == 0, compare["rows"]
    assert {row["result"]["allocators"][0]["name"] for row in compare["rows"]} == {"static"}


def rows(*values: float | None) -> list[dict]:
    return [
        {"options": {}, "error": "no"} if value is None else {"options": {}, "result": {"a": {"b": value}, "n": -value}}
        for value in values
    ]


def test_the_best_row_is_the_first_extreme_that_meets_every_requirement() -> None:
    found = rows(None, 3.0, 1.0, 2.0, 1.0)
    assert best_row(found, "a.b", False, []) == 2
    assert best_row(found, "a.b", True, []) == 1
    assert best_row(found, "a.b", False, ["a.b >= 2"]) == 3
    assert best_row(found, "a.b", False, ["a.b>=1.5", "n<=-2.5"]) == 1
    assert best_row(found, "a.b", False, ["a.b>=9"]) is None
    with pytest.raises(InputError, match=r"no figure 'a\.c'; it has a, n"):
        best_row(found, "a.c", False, [])
    with pytest.raises(InputError, match="must look like"):
        best_row(found, "a.b", False, ["a.b = 3"])


def test_a_grid_is_every_combination_with_the_last_axis_fastest() -> None:
    axes = dict(map(parse_axis, ["block-size=16,32", "--seed=1..3"]))
    assert axes == {"block-size": ("16", "32"), "seed": ("1", "2", "3")}
    combinations = list(grid(axes))
    assert len(combinations) == 6
    assert combinations[1] == (("block-size", "16"), ("seed", "2"))


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"axes": ("block-size",)}, "must look like block-size=16,32,64"),
        ({"axes": ("block-size=",)}, "must look like block-size=16,32,64"),
        ({"axes": ("seed=1,1",)}, "names a value twice"),
        ({"axes": ("seed=1", "seed=2")}, "is given twice"),
        ({"axes": ("seed=1",), "fixed": ("seed=2",)}, "is given twice"),
        ({"axes": ("seed=1",), "fixed": ("seed",)}, "--set is 'seed'"),
        ({"axes": ()}, "a sweep needs --grid"),
        ({"axes": ("seed=1",), "files": ("no/such/file",)}, "no/such/file"),
        ({"axes": ("seed=1",), "command": "serve"}, "it is one of replay"),
        ({"axes": ("seed=1",), "minimize": "a", "maximize": "b"}, "give --minimize or --maximize, not both"),
        ({"axes": ("seed=1",), "require": ("a<=1",)}, "--require needs --minimize or --maximize"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(question: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SweepQuestion(**{"command": "replay", "files": (), "fixed": (), **question}).points()


def test_no_worker_is_refused() -> None:
    run = sweep(*BASE, *GRID, "--jobs", "0")
    assert run.returncode == 2
    assert b"--jobs is 0; it must be at least 1" in run.stderr


def test_a_kept_point_is_named_by_the_content_of_every_file_that_an_option_names(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    keys = []
    for content in ("one", "another"):
        table.write_text(content)
        sweep = SweepQuestion(command="replay", axes=("seed=0",), fixed=("workload=code", f"latency-table={table}"))
        keys.append([one.key for one in sweep.points()])
    assert keys[0] != keys[1]
