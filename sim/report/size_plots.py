"""The plots of a search, as plotly figures in plain values (see report_plots.py): its runs, and the tornado."""

from collections.abc import Mapping, Sequence
from typing import Any

from .plots import LEGEND_ABOVE, axis_of, layout_of

# Where a run has no figure: the name of each promise's figure, and what it is measured in.
FIGURES = {
    "ttft_p99_s": ("p99 TTFT, s", 1.0),
    "tpot_p99_s": ("p99 TPOT, s", 1.0),
    "goodput_share": ("requests in time, %", 100.0),
}


def size_plots(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Plots by id; those that would be empty are left out. Without an answer, those of the nearest promise."""
    if document["answer"] is None and document["instead"] is not None:
        return size_plots(document["instead"])
    out: dict[str, dict[str, Any]] = {}
    runs = search_plot(document["shapes"], document["asked"])
    if runs is not None:
        out["plot-search"] = runs
    answer = document["answer"]
    if document["tornado"] and answer is not None:
        out["plot-tornado"] = tornado_plot(document["tornado"], document["asked"], answer[document["asked"]])
    return out


def search_plot(shapes: Sequence[Mapping[str, Any]], asked: str) -> dict[str, Any] | None:
    """The first promise's figure of every run to its end, a line for each shape, with the limit.

    None where no run came to its end.
    """
    searches = [(shape["tensor_parallel_size"], search) for shape in shapes for search in shape["searches"]]
    promises = [name for _, search in searches for trial in search["trials"] for name in trial["slo"]]
    if not promises:
        return None
    promise = promises[0]
    title, unit = FIGURES[promise]
    styles = (("--lru", "circle"), ("--optimum", "diamond"), ("--engine", "square"), ("--muted", "cross"))
    data: list[dict[str, Any]] = []
    limit = None
    for index, (size, search) in enumerate(searches):
        ended = [trial for trial in search["trials"] if trial["slo"][promise]["value"] is not None]
        if not ended:
            continue
        limit = ended[0]["slo"][promise]["limit"] * unit
        colour, symbol = styles[index % len(styles)]
        seed = "" if search["seed"] is None else f", seed {search['seed']}"
        data.append(
            {
                "type": "scatter",
                "name": f"tensor parallel size {size}{seed}",
                "x": [trial["value"] for trial in ended],
                "y": [trial["slo"][promise]["value"] * unit for trial in ended],
                "mode": "lines+markers",
                "line": {"color": colour, "width": 2},
                "marker": {"symbol": symbol, "size": 9, "color": colour},
                "hovertemplate": "%{x}: %{y:.4~g}<extra></extra>",
            }
        )
    if not data or limit is None:
        return None
    ends = [value for trace in data for value in trace["x"]]
    line = {"color": "--ink", "width": 1.5, "dash": "dash"}
    data.append(
        {
            "type": "scatter",
            "name": "limit",
            "x": [min(ends), max(ends)],
            "y": [limit, limit],
            "mode": "lines",
            "line": line,
        }
    )
    xaxis = _tried_axis(asked, max(ends) - min(ends))
    layout = layout_of(height=380, xaxis=xaxis, yaxis=axis_of(title, rangemode="tozero"), legend=LEGEND_ABOVE)
    return {"data": data, "layout": layout}


def tornado_plot(rows: Sequence[Mapping[str, Any]], asked: str, answer: float) -> dict[str, Any]:
    """One bar an assumption, from the answer at one end to that at the other; the widest on top, the answer a line.

    Ends at which nothing that was tried keeps the SLO have no place on the axis: such a bar ends at the answer, and its
    name says so.
    """
    shown = list(reversed(rows))
    names: list[str] = []
    starts: list[float] = []
    widths: list[float] = []
    for row in shown:
        ends = [row[end][asked] for end in ("low", "high")]
        known = [answer if end is None else end for end in ends]
        missing = [row[end]["value"] for end in ("low", "high") if "reason" in row[end]]
        names.append(row["assumption"] + (f"<br>(none at {', '.join(missing)})" if missing else ""))
        starts.append(min(known))
        widths.append(max(known) - min(known))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "answers from end to end",
            "x": widths,
            "base": starts,
            "y": names,
            "marker": {"color": "--pool", "line": {"color": "--page", "width": 1}},
            "hovertemplate": "%{y}: %{base:.3~g} and %{x:.3~g} more<extra></extra>",
        },
        {
            "type": "scatter",
            "name": "the answer",
            "x": [answer] * len(names),
            "y": names,
            "mode": "lines",
            "line": {"color": "--ink", "width": 1.5, "dash": "dash"},
        },
    ]
    xaxis = _tried_axis(asked, max(widths))
    layout = layout_of(height=120 + 32 * len(names), bargap=0.3, xaxis=xaxis, yaxis=axis_of(""), legend=LEGEND_ABOVE)
    return {"data": data, "layout": layout}


def _tried_axis(asked: str, span: float) -> dict[str, Any]:
    """Replicas are whole numbers, and so are the ticks."""
    if asked != "replicas":
        return axis_of("times the recorded rate")
    return axis_of("replicas", dtick=max(1, round(span / 10)))
