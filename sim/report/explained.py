"""Prints and draws a measured run beside its simulation."""

from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import InputError
from ..figures import Document, seconds, shown
from ..measured.explained import LATENCIES, ExplainedRun
from .console import headline, print_assumptions, print_list, table
from .page import Html, bullets, joined, plot, shell, tag
from .page import table as html_table
from .plots import LEGEND_ABOVE, axis_of, layout_of, logarithmic, scatter

_NAMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
_ERRORS = ("", "mean", "p50", "p90", "p99")
_SIDES = (("measured", "--engine", "circle"), ("predicted", "--lru", "diamond"))


def print_explained(result: ExplainedRun, output: str | None) -> None:
    """Print errors, their explanation, and the requests that differ most."""
    run = result.run
    failed = f", {run.num_failed:,} more failed" if run.num_failed else ""
    out = headline(
        f"{run.name}: {len(run.requests):,} requests{failed} ({run.format}), simulated beside what was measured"
    )
    out.print(table("Measured, predicted, error", _ERRORS, _rows(result)))
    if result.calibration is not None and result.calibration.factors:
        rows = _rows(result, result.calibrated)
        out.print(table("With the calibration, fitted to every second tenth of the requests", _ERRORS, rows))
    print_list(out, "Why they differ", result.sentences())
    out.print(table("The requests that differ most", _WORST_COLUMNS, _worst_rows(result)))
    print_assumptions(result.assumptions)
    if output is not None:
        out.print(f"The page: {Path(output) / 'index.html'}", markup=False, soft_wrap=True)


def _rows(result: ExplainedRun, simulated: Any = None) -> list[tuple[str, ...]]:
    errors = list(result.errors(simulated))
    rows: list[tuple[str, ...]] = []
    for name in LATENCIES:
        of_name = [row for row in errors if row["latency"] == name]
        for title, key in (("measured", "measured_s"), ("predicted", "predicted_s")):
            rows.append((f"{_NAMES[name]} {title}", *(seconds(row[key]) for row in of_name)))
        rows.append((f"{_NAMES[name]} error", *(f"{100 * row['error']:+.2f} %" for row in of_name)))
    return rows


_WORST_COLUMNS = ("request", "sent", "in", "out", "queued", "TTFT", "E2E", "TPOT", "preempted")


def _worst_rows(result: ExplainedRun) -> list[tuple[str, ...]]:
    """Measured / predicted in each cell."""
    rows: list[tuple[str, ...]] = []
    for row in result.worst():
        both = [
            f"{_time(row[f'measured_{name}'])} / {_time(row[f'predicted_{name}'])}"
            for name in ("queue_s", "ttft_s", "e2e_s", "tpot_s")
        ]
        counts = (f"{row['input_len']:,}", f"{row['output_len']:,}")
        request = row["request"]
        short = request if len(request) <= 15 else f"{request[:9]}…{request[-5:]}"  # the JSON has it whole
        rows.append((short, seconds(row["sent_s"]), *counts, *both, f"{row['predicted_preemptions']} times"))
    return rows


def _time(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def write_page(result: ExplainedRun, folder: Path) -> None:
    """Write `index.html` and `run.json` into a folder. Raises InputError: it cannot be written."""
    from json import dumps

    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = dumps(result.to_dict(), indent=2, allow_nan=False) + "\n"
        (folder / "run.json").write_text(text, encoding="utf-8")
        (folder / "index.html").write_text(render_page(result), encoding="utf-8")
    except OSError as error:
        raise InputError(f"--output {folder}: {error.strerror or error}; give a folder that can be written") from error


def render_page(result: ExplainedRun) -> str:
    """One page that needs no network: errors, explanation, plots, the worst requests, assumptions."""
    run, plots = result.run, explained_plots(result)
    first = [row for row in result.errors() if row["statistic"] == "mean"]
    cards = [
        tag(
            "div",
            tag("dt", f"Mean {_NAMES[row['latency']]}"),
            tag("dd", f"{seconds(row['predicted_s'])} against {seconds(row['measured_s'])} measured: ",
                tag("strong", f"{100 * row['error']:+.1f} %")),
        )
        for row in first
    ]  # fmt: skip
    calibrated: list[Html] = []
    if result.calibration is not None and result.calibration.factors:
        caption = "With the calibration (fitted to every second tenth of the requests)"
        calibrated = [html_table(caption, _ERRORS, _rows(result, result.calibrated))]
    captions = {
        "plot-run-ttft": "Time to first token of every request, by the time at which it was sent.",
        "plot-run-tpot": "Time per output token of every request, by the time at which it was sent.",
        "plot-run-both": "Share of requests within a time, measured and predicted.",
        "plot-run-load": "Requests running and waiting, measured by the server and predicted.",
    }
    drawn = [plot(name, captions[name]) for name in plots]
    errors = html_table("Errors", _ERRORS, _rows(result))
    worst = html_table("Measured / predicted", _WORST_COLUMNS, _worst_rows(result))
    assumptions = [(name, shown(value)) for name, value in result.assumptions.items()]
    sections = [
        ("answer", "How far off", joined(tag("dl", *cards, class_="answer"), errors, *calibrated)),
        ("why", "Why they differ", bullets(result.sentences())),
        ("requests", "Request by request", joined(*drawn)),
        ("worst", "The requests that differ most", worst),
        ("assumptions", "Assumptions", html_table("Assumptions", ("assumption", "value"), assumptions, left=(0, 1))),
    ]  # fmt: skip
    return shell(
        f"{run.name} explained",
        f"{len(run.requests):,} requests of {run.name}, measured and simulated",
        [f"{run.format}; {run.num_failed:,} requests failed" if run.num_failed else run.format],
        sections,
        plots,
        "Written by kvledger. run.json beside this page has the same figures for programs.",
    )


def explained_plots(result: ExplainedRun) -> dict[str, Document]:
    """Plots by the id of their place on the page."""
    run, simulated = result.run, result.simulated
    sent = [request.sent_s for request in run.requests]
    out: dict[str, Document] = {}
    columns = {
        name: ([getattr(request, name) for request in run.requests], getattr(simulated, name).tolist())
        for name in LATENCIES
    }
    for name, plot_id, unit, scale in (("ttft_s", "plot-run-ttft", "s", 1.0), ("tpot_s", "plot-run-tpot", "ms", 1e3)):
        data = [
            scatter(
                side,
                sent,
                [None if value is None or np.isnan(value) else value * scale for value in values],
                "markers",
                f"%{{y:,.3~g}} {unit}, sent at %{{x:,.4~g}} s<extra>{side}</extra>",
                marker={"color": colour, "symbol": symbol, "size": 6, "opacity": 0.8},
            )
            for (side, colour, symbol), values in zip(_SIDES, columns[name], strict=True)
        ]
        layout = layout_of(
            height=360,
            xaxis=axis_of("seconds since the first request", rangemode="tozero"),
            yaxis=axis_of(f"{_NAMES[name]}, {unit}", rangemode="tozero"),
            legend=LEGEND_ABOVE,
        )
        out[plot_id] = {"data": data, "layout": layout}
    out["plot-run-both"] = _distributions(columns)
    load = result.load()
    if load is not None and "measured_running" in load.columns:
        out["plot-run-load"] = _load(load.columns)
    return out


def _distributions(columns: dict[str, tuple[list[float | None], list[float]]]) -> Document:
    data: list[Document] = []
    for (side, colour, _), index in zip(_SIDES, (0, 1), strict=True):
        for name, dash in (("ttft_s", "solid"), ("e2e_s", "dash")):
            values = sorted(value for value in columns[name][index] if value is not None and value > 0)
            shares = [100 * (place + 1) / len(values) for place in range(len(values))]
            hover = f"%{{y:.1f}} % within %{{x:,.4~g}} s<extra>{_NAMES[name]} {side}</extra>"
            line = {"color": colour, "dash": dash, "width": 2}
            data.append(scatter(f"{_NAMES[name]} {side}", values, shares, "lines", hover, line=line))
    layout = layout_of(
        height=360,
        xaxis=axis_of("within seconds (logarithmic)", **logarithmic([x for line in data for x in line["x"]])),
        yaxis=axis_of("share of requests, %", range=[0, 102]),
        legend=LEGEND_ABOVE,
    )
    return {"data": data, "layout": layout}


def _load(columns: Any) -> Document:
    data = [
        scatter(
            f"{name} {side}",
            columns["time_s"],
            columns[f"{side}_{name}"],
            "lines",
            f"%{{y:,.0f}} {name} at %{{x:,.4~g}} s<extra>{side}</extra>",
            line={"color": colour, "dash": dash, "width": 2},
        )
        for name, dash in (("running", "solid"), ("waiting", "dot"))
        for side, colour, _ in _SIDES
        if f"{side}_{name}" in columns
    ]
    layout = layout_of(
        height=340,
        xaxis=axis_of("seconds since the first request", rangemode="tozero"),
        yaxis=axis_of("requests", rangemode="tozero"),
        legend=LEGEND_ABOVE,
    )
    return {"data": data, "layout": layout}
