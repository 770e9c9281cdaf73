"""Describes plots as plotly figures in plain values.

A colour is the name of a variable of the page's style sheet (`--lru`), so that one figure serves light, dark and print.
No text in a plot comes from the user.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from typing import Any

import attrs

from ..figures import GIB, Document
from .replay import LATENCIES

LEGEND_ABOVE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
# Decades that a logarithmic axis spans at most -> labelled steps of a decade; the labels must fit a phone.
STEPS_OF_A_DECADE = ((2.0, (1, 2, 5)), (3.5, (1, 3)), (float("inf"), (1,)))
SERIES = (
    ("kv_cache_usage", "KV cache<br>in use, %", "--lru"),
    ("num_requests_running", "requests<br>running", "--engine"),
    ("num_requests_waiting", "requests<br>waiting", "--optimum"),
)
QUANTILES = (("p50", "circle", "--lru"), ("p90", "diamond", "--engine"), ("p99", "square", "--optimum"))
DISTRIBUTION_STYLES = (
    ("--lru", "solid", "circle"),
    ("--engine", "dash", "diamond"),
    ("--optimum", "dashdot", "square"),
    ("--muted", "dot", "cross"),
)
ROW_COLOURS = {
    "weights": "--weights",
    "peak activation": "--activation",
    "CUDA graphs": "--graphs",
    "KV cache blocks": "--pool",
    "remainder": "--rest",
    "outside the budget": "--outside",
}
SHARES = (
    ("token_pct", "tokens", "--pool"),
    ("reservation_pct", "reserved, will be filled", "--weights"),
    ("internal_pct", "reserved, never filled", "--activation"),
    ("external_pct", "rounding, holes, unused", "--outside"),
)


def study_plots(document: Document) -> dict[str, Document]:
    """Plots of the finished parts, by the id of their place on the page."""
    out: dict[str, Document] = {}
    curve, replay, plan, compare = (document[part] for part in ("curve", "replay", "plan", "compare"))
    if curve is not None and document["derived"]["claims_reuse"]:
        out["plot-curve"] = curve_plot(curve, replay)
    if replay is not None:
        out |= replay_plots(replay, replay["distributions"])
    if plan is not None:
        out["plot-ledger"] = ledger_plot(plan["ledger"])
    if compare is not None:
        out["plot-compare"] = compare_plot(compare["allocators"])
    return out


def curve_plot(curve: Document, replay: Document | None) -> Document:
    """Hit rate against capacity: LRU, the optimum, an unlimited cache, this pool, and the replayed engine."""
    in_bytes = "bytes" in curve["infinite"]

    def size(point: Document) -> float:
        return point["bytes"] / GIB if in_bytes else point["tokens"]

    def line(name: str, points: list[Document], mode: str, **style: Any) -> Document:
        rates = [100 * point["token_hit_rate"] for point in points]
        hover = "%{y:.1f} % at %{customdata:,} tokens<extra>" + name + "</extra>"
        tokens = [point["tokens"] for point in points]
        return scatter(name, [size(point) for point in points], rates, mode, hover, customdata=tokens, **style)

    lru_line = curve["lru_line"]
    ends = [lru_line[0], lru_line[-1]]
    ceiling = [{**point, "token_hit_rate": curve["infinite"]["token_hit_rate"]} for point in ends]
    optimum = [point for point in curve["policies"]["optimum"] if point["tokens"] <= ends[1]["tokens"]]
    data = [
        line("unlimited cache", ceiling, "lines", line={"color": "--muted", "dash": "dot", "width": 2}),
        line(
            "best possible eviction",
            optimum,
            "lines+markers",
            line={"color": "--optimum", "dash": "dash", "width": 2},
            marker={"size": 7, "symbol": "diamond"},
        ),
        line("LRU", lru_line, "lines", line={"color": "--lru", "width": 3}),
    ]
    title = "KV cache, GiB" if in_bytes else "capacity, tokens"
    layout = layout_of(
        height=420,
        xaxis=axis_of(title, **logarithmic([size(point) for point in lru_line])),
        yaxis=axis_of("prompt tokens served, %", rangemode="tozero"),
        legend=LEGEND_ABOVE,
    )
    if curve["at_pool"] is not None:
        here = size(curve["at_pool"]["lru"])
        layout["shapes"] = [_vertical(here)]
        layout["annotations"] = [_note("this pool", here, log=True)]
        style = {"color": "--ink", "size": 10, "symbol": "circle"}
        data.append(line("LRU with this pool", [curve["at_pool"]["lru"]], "markers", marker=style))
        if replay is not None:
            engine = {**curve["at_pool"]["lru"], "token_hit_rate": replay["prefix_cache"]["hit_rate"]}
            style = {"color": "--engine", "size": 12, "symbol": "star"}
            data.append(line("replayed engine", [engine], "markers", marker=style))
    return {"data": data, "layout": layout}


def replay_plots(replay: Document, distributions: Document) -> dict[str, Document]:
    """Plots of one replay, given its document and its `latency_distributions`."""
    out = {"plot-time": time_plot(replay["series"], replay.get("last_arrival_s")), "plot-latency": latency_plot(replay)}
    return out | ({"plot-distribution": distribution_plot(distributions)} if distributions else {})


def time_plot(series: dict[str, list[float]], last_arrival_s: float | None) -> Document:
    """KV cache usage, running and waiting requests over time; marks the last arrival if known."""
    minutes = [time_s / 60 for time_s in series["time_s"]]
    data: list[Document] = []
    layout = layout_of(height=520, showlegend=False)
    layout["xaxis"] = axis_of("minutes since the first arrival", anchor="y3", rangemode="tozero")
    for index, (name, title, colour) in enumerate(SERIES):
        number = "" if index == 0 else str(index + 1)
        scale = 100 if name == "kv_cache_usage" else 1
        top = 1 - index * 0.355
        layout[f"yaxis{number}"] = axis_of(title, domain=[top - 0.29, top], rangemode="tozero", nticks=4)
        values, hover = [value * scale for value in series[name]], "%{y:,.1f} at %{x:.1f} min<extra></extra>"
        style: Document = {"xaxis": "x", "yaxis": f"y{number}", "line": {"color": colour, "width": 1.5}}
        data.append(scatter(title.replace("<br>", " "), minutes, values, "lines", hover, **style))
    layout["yaxis"]["range"] = [0, 102]
    layout["margin"]["t"] = 24
    if last_arrival_s is not None:
        layout["shapes"] = [_vertical(last_arrival_s / 60)]
        layout["annotations"] = [
            {**_note("last arrival", last_arrival_s / 60), "yanchor": "bottom", "xanchor": "center", "xshift": 0}
        ]
    return {"data": data, "layout": layout}


def latency_plot(replay: Document) -> Document:
    """Percentiles of each latency on a logarithmic axis, with a line from p50 to p99."""
    measured = [(key, name) for key, name in reversed(LATENCIES) if replay[key]["count"]]
    data: list[Document] = [
        {
            "type": "scatter",
            "x": [value for key, _ in measured for value in (replay[key]["p50"], replay[key]["p99"], None)],
            "y": [label for _, name in measured for label in (name, name, None)],
            "mode": "lines",
            "line": {"color": "--muted", "width": 2},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]
    for quantile, symbol, colour in QUANTILES:
        values = [replay[key][quantile] for key, _ in measured]
        hover = "%{y} " + quantile + ": %{x:.4~g} s<extra></extra>"
        marker = {"symbol": symbol, "size": 12, "color": colour}
        data.append(scatter(quantile, values, [name for _, name in measured], "markers", hover, marker=marker))
    times_s = [value for key, _ in measured for value in (replay[key]["p50"], replay[key]["p99"])]
    layout = layout_of(
        height=320,
        xaxis=axis_of("seconds (logarithmic)", **logarithmic(times_s)),
        yaxis=axis_of(""),
        legend=LEGEND_ABOVE,
    )
    return {"data": data, "layout": layout}


def distribution_plot(distributions: dict[str, dict[str, list[float]]]) -> Document:
    """The share of samples of each latency within a time; exact at the markers."""
    data = [
        scatter(
            name,
            *_rising_part(distributions[key]),
            "lines+markers",
            "%{y:.1f} % within %{x:,.4~g} s<extra>" + name + "</extra>",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"size": 6, "symbol": symbol},
        )
        for (key, name), (colour, dash, symbol) in zip(LATENCIES, DISTRIBUTION_STYLES, strict=True)
        if key in distributions
    ]
    layout = layout_of(
        height=380,
        xaxis=axis_of("within seconds (logarithmic)", **logarithmic([x for line in data for x in line["x"]])),
        yaxis=axis_of("share of samples, %", range=[0, 102]),
        legend=LEGEND_ABOVE,
    )
    return {"data": data, "layout": layout}


def _rising_part(distribution: dict[str, list[float]]) -> tuple[list[float], list[float]]:
    """The part of a distribution between 0 and 100 %."""
    times_s, shares = distribution["up_to_s"], distribution["share"]
    first = max(0, bisect_right(shares, 0.0) - 1)
    last = min(len(shares), bisect_left(shares, 1.0) + 1)
    return times_s[first:last], [100 * share for share in shares[first:last]]


def ledger_plot(rows: list[Document]) -> Document:
    """One bar with every row of a GPU's memory ledger."""
    inside: Document = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    inside["textfont"] = {"color": "--on-colour"}
    data = [
        bars(
            row["name"],
            [row["bytes"] / GIB],
            [""],
            row_colour(row["name"]),
            "%{x:.2f} GiB<extra>" + row["name"] + "</extra>",
            **inside,
            text=[f"{row['name']}<br>{row['bytes'] / GIB:.1f} GiB"],
        )
        for row in rows
        if row["bytes"] > 0
    ]
    layout = layout_of(height=150, barmode="stack", bargap=0, xaxis=axis_of("GiB of one GPU"), showlegend=False)
    layout["yaxis"] = {"visible": False, "fixedrange": True}
    layout["margin"] |= {"l": 4}
    layout["uniformtext"] = {"mode": "hide", "minsize": 11}
    return {"data": data, "layout": layout}


def row_colour(name: str) -> str:
    """The style sheet's variable for the colour of a row of the memory ledger."""
    return ROW_COLOURS.get(name, "--libraries")


def compare_plot(allocators: list[Document]) -> Document:
    """Shares of the memory under each allocator, named with its mean batch."""
    labels = [f"{row['name']}<br>mean batch {row['mean_batch']:,.1f}" for row in reversed(allocators)]
    data = [
        bars(name, [row[key] for row in reversed(allocators)], labels, colour, "%{x:.1f} %<extra>" + name + "</extra>")
        for key, name, colour in SHARES
    ]
    layout = layout_of(
        height=430, barmode="stack", bargap=0.25, xaxis=axis_of("share of the KV memory, %"), yaxis=axis_of("")
    )
    layout["xaxis"] |= {"range": [0, 100], "dtick": 20}
    layout["legend"] = {**LEGEND_ABOVE, "traceorder": "normal"}
    return {"data": data, "layout": layout}


def scatter(
    name: str, x: Sequence[Any], y: Sequence[Any], mode: str, hover: str | None = None, **style: Any
) -> Document:
    """Lines or markers; `hover` is the text at a point."""
    shown = {} if hover is None else {"hovertemplate": hover}
    return {"type": "scatter", "name": name, "x": x, "y": y, "mode": mode, **shown, **style}


def bars(name: str, x: Sequence[float], y: Sequence[str], colour: str, hover: str, **style: Any) -> Document:
    """Horizontal bars of lengths `x` at the names `y`."""
    marker = {"color": colour, "line": {"color": "--page", "width": 1}}
    own: Document = {"x": x, "y": y, "marker": marker, "hovertemplate": hover, **style}
    return {"type": "bar", "orientation": "h", "name": name, **own}


def layout_of(**own: Any) -> Document:
    """The layout that all plots share, plus this plot's own settings."""
    return {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "--ink"},
        "margin": {"l": 60, "r": 18, "t": 12, "b": 48},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "--panel", "bordercolor": "--muted", "font": {"color": "--ink"}},
        **own,
    }


def axis_of(title: str, **own: Any) -> Document:
    """An axis with its title."""
    return {
        "title": {"text": title, "standoff": 8},
        "automargin": True,
        "gridcolor": "--grid",
        "linecolor": "--muted",
        "zerolinecolor": "--grid",
        "fixedrange": True,
        "exponentformat": "none",
        "separatethousands": True,
        **own,
    }


def logarithmic(values: Iterable[float]) -> Document:
    """A logarithmic axis over positive values, with full numbers at its ticks: 20, 50, 100, not 2, 5, 100."""
    positive = [value for value in values if value > 0] or [1.0]
    low, high = floor(log10(min(positive))), ceil(log10(max(positive)))
    decades = log10(max(positive) / min(positive))
    steps = next(steps for most, steps in STEPS_OF_A_DECADE if decades <= most)
    ticks = [step * 10.0**decade for decade in range(low, high + 1) for step in steps]
    return {"type": "log", "tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}


def _vertical(x: float) -> Document:
    line = {"color": "--ink", "width": 1.5, "dash": "dashdot"}
    return {"type": "line", "xref": "x", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _note(text: str, x: float, log: bool = False) -> Document:
    """A label at the top of a vertical line; plotly expects the exponent on a logarithmic axis."""
    place = log10(x) if log else x
    note = {"text": text, "x": place, "xref": "x", "y": 1, "yref": "paper", "showarrow": False}
    return {**note, "xanchor": "left", "yanchor": "top", "xshift": 4, "font": {"color": "--ink"}}


@attrs.frozen
class PlotText:
    """Names a plot: `name` on the buttons that save it, `title` in its file, `alt` for people who cannot see it."""

    name: str
    title: str
    alt: str


PLOT_TEXTS = {
    "plot-curve": PlotText(
        "hit rate",
        "Prompt tokens served by the prefix cache, by capacity",
        "Share of prompt tokens that a prefix cache serves, by capacity: the LRU line rises towards the unlimited "
        "cache; the best possible eviction lies above it. The table below lists the points.",
    ),
    "plot-time": PlotText(
        "load over time",
        "KV cache usage and queue over time",
        "Three lines over time: share of the KV cache in use, requests running, requests waiting. A vertical line "
        "marks the last arrival.",
    ),
    "plot-latency": PlotText(
        "latency",
        "Latencies: 50th, 90th and 99th percentile",
        "The 50th, 90th and 99th percentile of each latency in seconds on a logarithmic axis; the table lists them.",
    ),
    "plot-distribution": PlotText(
        "latency distributions",
        "Latencies: share of samples within a time",
        "Four rising lines: the share of samples of TTFT, ITL, TPOT and E2E within a time, from 0 to 100 percent; "
        "seconds on a logarithmic axis.",
    ),
    "plot-ledger": PlotText(
        "memory ledger",
        "Memory ledger of one GPU",
        "One bar of a GPU's memory, divided into the rows of the ledger: weights, activations, the pool of KV blocks "
        "and the rest. The table below lists every row.",
    ),
    "plot-compare": PlotText(
        "allocators",
        "KV memory under five allocators",
        "One bar of KV memory per allocator: slots that hold tokens, reserved slots that will be filled, reserved "
        "slots that never are, and the rest. The table below lists the shares.",
    ),
    "plot-validation-tpot": PlotText(
        "TPOT of measured points",
        "Time per output token, predicted against measured",
        "A point for each measured server: its measured and its predicted time per output token, by card.",
    ),
    "plot-validation-ttft": PlotText(
        "TTFT of measured points",
        "Time to first token, predicted against measured",
        "A point for each measured server: its measured and its predicted time to first token, by card.",
    ),
    "plot-run-ttft": PlotText(
        "TTFT of every request",
        "Time to first token, measured and predicted",
        "Two points for every request: its measured and its predicted time to first token, by the time it was sent.",
    ),
    "plot-run-tpot": PlotText(
        "TPOT of every request",
        "Time per output token, measured and predicted",
        "Two points for every request: its measured and its predicted time per output token, by the time it was sent.",
    ),
    "plot-run-both": PlotText(
        "distributions",
        "Share of requests within a time, measured and predicted",
        "Four rising lines: the share of requests whose TTFT and E2E lie within a time, measured and predicted.",
    ),
    "plot-run-load": PlotText(
        "load",
        "Requests running and waiting, measured and predicted",
        "Four lines over time: requests running and requests waiting, measured and predicted.",
    ),
    "plot-search": PlotText(
        "runs of the search",
        "Runs of the search",
        "The SLO figure of every complete run, by tried value; a horizontal line marks the limit.",
    ),
    "plot-tornado": PlotText(
        "tornado",
        "What changes the answer",
        "A bar per assumption, from the answer at its low end to that at its high end, the widest on top.",
    ),
}
