"""Plots as files: the figures of the JSON, in SVG and PNG, with words for those who cannot see them."""

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from kvledger.core import InputError
from kvledger.sim.commands.cli import main
from kvledger.sim.report.plot_files import page_colours, write_plots
from kvledger.sim.report.plots import PLOT_TEXTS, study_plots
from kvledger.sim.report.size import size_plots, tornado_plot

pytest.importorskip("matplotlib", reason="Matplotlib is not installed: pip install 'kvledger[plots]'")

OF_A_STUDY = {"plot-curve", "plot-time", "plot-latency", "plot-distribution", "plot-ledger", "plot-compare"}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["kvledger", *arguments])
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study with its plots."""
    folder = tmp_path_factory.mktemp("study")
    options = ("--workload", "conversation", "--limit", "80", "--model", "llama-3.1-8b", "--gpu", "H100")
    with pytest.MonkeyPatch.context() as patch:
        run(patch, "study", *options, "--block-size", "64", "--output", str(folder), "--plots", str(folder / "plots"))
    return folder


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "study.json").read_text())


def test_every_plot_of_the_page_is_a_file_of_both_kinds(folder: Path, document: dict[str, Any]) -> None:
    written = {path.name for path in (folder / "plots").iterdir()}
    assert written == {f"{name}.{kind}" for name in OF_A_STUDY for kind in ("svg", "png")}
    assert study_plots(document).keys() == OF_A_STUDY


@pytest.mark.parametrize("name", sorted(OF_A_STUDY))
def test_a_file_says_in_words_what_it_shows(folder: Path, name: str) -> None:
    svg = (folder / "plots" / f"{name}.svg").read_text()
    assert svg.startswith("<?xml")
    described = re.sub(r"\s+", " ", svg).replace("&#39;", "'").replace("&apos;", "'")
    assert PLOT_TEXTS[name].title in described
    assert PLOT_TEXTS[name].alt in described
    assert svg.count("<path") > 5
    png = (folder / "plots" / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert width == 1800
    assert height >= 400
    assert PLOT_TEXTS[name].alt.encode() in png


def test_labels_and_units_are_text_in_an_svg(folder: Path) -> None:
    for name, words in {
        "plot-curve": ("prompt tokens served, %", "KV cache, GiB", "LRU", "this pool"),
        "plot-time": ("minutes since the first arrival", "in use, %", "last arrival"),
        "plot-latency": ("seconds (logarithmic)", "TTFT", "p99"),
        "plot-ledger": ("GiB of one GPU", "weights", "KV cache blocks"),
    }.items():
        svg = (folder / "plots" / f"{name}.svg").read_text()
        assert all(word in svg for word in words), name


def test_what_is_drawn_is_the_json(document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: dict[str, Any] = {}

    def keep(self: Any, path: Path, **_: Any) -> None:
        drawn[path.stem] = self

    monkeypatch.setattr(Figure, "savefig", keep)
    write_plots(study_plots(document), tmp_path)
    (curve,) = drawn["plot-curve"].axes
    lines = {line.get_label(): line for line in curve.lines}
    line = document["curve"]["lru_line"]
    assert list(lines["LRU"].get_ydata()) == [100 * point["token_hit_rate"] for point in line]
    assert list(lines["LRU"].get_xdata()) == [point["bytes"] / 2**30 for point in line]
    series = document["replay"]["series"]
    for axis, name in zip(drawn["plot-time"].axes, ("kv_cache_usage", "num_requests_running"), strict=False):
        scale = 100 if name == "kv_cache_usage" else 1
        assert list(axis.lines[0].get_ydata()) == [scale * value for value in series[name]]
    (ledger,) = drawn["plot-ledger"].axes
    assert [bar.get_width() * 2**30 for bar in ledger.patches] == pytest.approx(
        [row["bytes"] for row in document["plan"]["ledger"] if row["bytes"] > 0]
    )
    edges = [bar.get_x() for bar in ledger.patches]
    assert edges == sorted(edges)
    (compare,) = drawn["plot-compare"].axes
    paged = next(row for row in document["compare"]["allocators"] if row["name"] == "paged")
    assert paged["token_pct"] in [pytest.approx(bar.get_width()) for bar in compare.patches]
    labels = [label.get_text() for label in compare.get_yticklabels()]
    assert [label.split("\n")[0] for label in labels] == [
        row["name"] for row in reversed(document["compare"]["allocators"])
    ]


def test_the_bytes_are_the_same_from_run_to_run(document: dict[str, Any], tmp_path: Path) -> None:
    plots = {name: plot for name, plot in study_plots(document).items() if name in ("plot-latency", "plot-ledger")}
    first, second = (
        {path.name: path.read_bytes() for path in write_plots(plots, tmp_path / name)} for name in ("first", "second")
    )
    assert first == second
    assert len(first) == 4


def test_colours_are_those_of_the_page() -> None:
    colours = page_colours()
    assert colours["--page"] == "#ffffff"
    assert {"--lru", "--optimum", "--engine", "--pool", "--ink", "--grid"} <= colours.keys()


def test_a_replay_draws_its_load_and_latencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ("--num-gpu-blocks-override", "2000")
    run(monkeypatch, "replay", "--workload", "code", "--limit", "20", *pool, "--json", "--plots", str(tmp_path))
    names = {path.stem for path in tmp_path.iterdir()}
    assert names == {"plot-time", "plot-latency", "plot-distribution"}


def searched() -> dict[str, Any]:
    def ran(value: float, ttft_s: float | None) -> dict[str, Any]:
        met = None if ttft_s is None else ttft_s <= 0.4
        return {"value": value, "met": bool(met), "slo": {"ttft_p99_s": {"limit": 0.4, "value": ttft_s, "met": met}}}

    search = {"seed": None, "trials": [ran(1, None), ran(3, 0.5), ran(4, 0.35), ran(5, 0.3)]}
    end = {"value": "x 1", "slo_value": 0.35}
    return {
        "asked": "replicas",
        "answer": {"replicas": 4},
        "instead": None,
        "shapes": [{"tensor_parallel_size": 2, "searches": [search]}, {"tensor_parallel_size": 4, "searches": []}],
        "tornado": [
            {"assumption": "traffic", "low": {**end, "replicas": 3}, "high": {**end, "replicas": 6}},
            {
                "assumption": "routing",
                "low": {**end, "value": "luck", "replicas": None, "reason": "no tried value keeps the SLO"},
                "high": {**end, "replicas": 4},
            },
        ],
    }


def test_a_search_draws_the_runs_that_came_to_their_end_and_the_limit(tmp_path: Path) -> None:
    plots = size_plots(searched())
    runs, limit = plots["plot-search"]["data"]
    assert runs["name"] == "tensor parallel size 2"
    assert (runs["x"], runs["y"]) == ([3, 4, 5], [0.5, 0.35, 0.3])
    assert limit["y"] == [0.4, 0.4]
    assert {path.name for path in write_plots(plots, tmp_path)} == {
        *("plot-search.svg", "plot-search.png", "plot-tornado.svg", "plot-tornado.png")
    }


def test_a_tornado_goes_from_end_to_end_with_the_widest_on_top() -> None:
    document = searched()
    bars, line = tornado_plot(document["tornado"], "replicas", 4)["data"]
    assert bars["y"] == ["routing<br>(none at luck)", "traffic"]
    assert (bars["base"], bars["x"]) == ([4, 3], [0, 3])
    assert line["x"] == [4, 4]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="give a folder that can be written"):
        write_plots(size_plots(searched()), tmp_path / "file")
