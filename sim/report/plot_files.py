"""Draws the plots of a report with Matplotlib as SVG and PNG files.

Colours are those of the page in light mode. The same plots always give the same bytes.
"""

import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ..figures import Document
from .plots import PLOT_TEXTS

FORMATS = ("svg", "png")
PIXELS_PER_INCH = 100
WIDTH_PIXELS = 900
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
SYMBOLS = {"circle": "o", "diamond": "D", "square": "s", "star": "*", "cross": "P"}
# Fixed ids: the same plots give the same bytes.
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "kvledger",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def write_plots(plots: Mapping[str, Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write every plot, by an id of `PLOT_TEXTS`, as `<id>.svg` and `<id>.png`; returns their paths.

    Raises InputError: Matplotlib is not installed, or the folder, which is created if missing, cannot be written.
    """
    try:
        from matplotlib import rc_context
    except ModuleNotFoundError:
        raise InputError("--plots needs Matplotlib, which is not installed: pip install 'kvledger[plots]'") from None
    colours = page_colours()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with rc_context(STYLE):
            for plot_id, plot in plots.items():
                figure = _drawn(plot, PLOT_TEXTS[plot_id].title, colours)
                for kind in FORMATS:
                    path = folder / f"{plot_id}.{kind}"
                    figure.savefig(path, format=kind, dpi=2 * PIXELS_PER_INCH, metadata=_metadata(plot_id, kind))
                    written.append(path)
    except OSError as error:
        raise InputError(f"--plots {folder}: {error.strerror or error}; give a folder that can be written") from None
    return written


def page_colours() -> dict[str, str]:
    """`--lru` -> `#0072b2`: the style sheet's colours of a light page."""
    style = files(__package__ or "").joinpath("page.css").read_text(encoding="utf-8")
    light, _, _ = style.partition("@media")
    return dict(re.findall(r"(--[a-z-]+): (#[0-9a-f]{6})", light))


def _metadata(plot_id: str, kind: str) -> Document:
    text = PLOT_TEXTS[plot_id]
    common: Document = {"Title": text.title, "Description": text.alt}
    return {**common, "Date": None, "Creator": "kvledger"} if kind == "svg" else {**common, "Software": "kvledger"}


def _drawn(plot: Mapping[str, Any], title: str, colours: Mapping[str, str]) -> Any:
    from matplotlib.figure import Figure

    layout = plot["layout"]
    names = sorted(name for name in layout if re.fullmatch(r"yaxis\d*", name))
    height = max(layout["height"], 220) / PIXELS_PER_INCH
    figure = Figure(figsize=(WIDTH_PIXELS / PIXELS_PER_INCH, height), layout="constrained")
    figure.patch.set_facecolor(colours["--page"])
    axes = dict(zip(names, figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0], strict=True))
    for axis in axes.values():
        _dress(axis, colours)
    for place, name in enumerate(names):
        own = [trace for trace in plot["data"] if trace.get("yaxis", "y") == name.replace("axis", "")]
        _draw_traces(axes[name], own, layout, colours)
        _set_axis(axes[name].yaxis, layout[name], colours)
        for line in layout.get("shapes", ()):
            style = {"color": _colour(line["line"]["color"], colours), "linestyle": DASHES[line["line"]["dash"]]}
            axes[name].axvline(line["x0"], linewidth=line["line"]["width"], **style)
        if place == 0:
            _note(axes[name], layout, colours)
    last = axes[names[-1]]
    _set_axis(last.xaxis, layout["xaxis"], colours)
    _add_legend(axes[names[0]], plot, colours)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, color=colours["--ink"])
    return figure


def _dress(axis: Any, colours: Mapping[str, str]) -> None:
    axis.set_facecolor(colours["--page"])
    axis.grid(color=colours["--grid"])
    axis.tick_params(colors=colours["--ink"], length=0)
    for spine in axis.spines.values():
        spine.set_color(colours["--muted"])


def _draw_traces(
    axis: Any, traces: Iterable[Mapping[str, Any]], layout: Mapping[str, Any], colours: Mapping[str, str]
) -> None:
    traces = list(traces)
    categories = _categories(traces)
    stacked: dict[Any, float] = {}
    for trace in traces:
        rows = [categories.index(y) if y in categories else y for y in trace["y"]] if categories else trace["y"]
        if trace["type"] == "bar":
            _draw_bar(axis, trace, rows, stacked, colours)
        else:
            _draw_line(axis, trace, rows, colours)
    if categories:
        shown = layout["yaxis"].get("visible", True)
        axis.set_yticks(range(len(categories)), [_plain(name) if shown else "" for name in categories])
        axis.set_ylim(-0.6, len(categories) - 0.4)
        axis.grid(False, axis="y")


def _categories(traces: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names along the y axis, from the bottom; empty if the axis has numbers."""
    return list(dict.fromkeys(y for trace in traces for y in trace["y"] if isinstance(y, str)))


def _draw_line(axis: Any, trace: Mapping[str, Any], rows: Any, colours: Mapping[str, str]) -> None:
    not_a_number = float("nan")
    x = [not_a_number if value is None else value for value in trace["x"]]
    y = [not_a_number if value is None else value for value in rows]
    line, marker, mode = trace.get("line", {}), trace.get("marker", {}), trace["mode"]
    colour = _colour(line.get("color") or marker.get("color"), colours)
    axis.plot(
        x,
        y,
        label=_plain(trace.get("name", "")) if trace.get("showlegend", True) else None,
        color=colour,
        linestyle=DASHES[line.get("dash", "solid")] if "lines" in mode else "",
        linewidth=line.get("width", 2),
        marker=SYMBOLS[marker.get("symbol", "circle")] if "markers" in mode else "",
        markersize=0.75 * marker.get("size", 8),
    )


def _draw_bar(
    axis: Any, trace: Mapping[str, Any], rows: Any, stacked: dict[Any, float], colours: Mapping[str, str]
) -> None:
    colour = _colour(trace["marker"]["color"], colours)
    base = trace.get("base")
    starts = [stacked.get(row, 0.0) for row in rows] if base is None else base
    axis.barh(
        rows, trace["x"], left=starts, height=0.75, color=colour, edgecolor=colours["--page"], label=trace["name"]
    )
    for row, start, width in zip(rows, starts, trace["x"], strict=True):
        stacked[row] = start + width


def _set_axis(axis: Any, wanted: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, MultipleLocator, NullLocator

    title = wanted.get("title", {}).get("text", "")
    axis.set_label_text(_plain(title), color=colours["--ink"])
    owner, is_x = axis.axes, axis.axis_name == "x"
    if wanted.get("type") == "log":
        (owner.set_xscale if is_x else owner.set_yscale)("log")
        low, high = axis.get_view_interval()
        ticks = zip(wanted["tickvals"], wanted["ticktext"], strict=True)
        shown = [(value, text) for value, text in ticks if low <= value <= high]
        axis.set_major_locator(FixedLocator([value for value, _ in shown]))
        axis.set_major_formatter(FixedFormatter([text for _, text in shown]))
        axis.set_minor_locator(NullLocator())
        return
    set_limits = owner.set_xlim if is_x else owner.set_ylim
    if "range" in wanted:
        set_limits(*wanted["range"])
    elif wanted.get("rangemode") == "tozero":
        set_limits(0, 1.04 * axis.get_view_interval()[1])
    if "dtick" in wanted:
        axis.set_major_locator(MultipleLocator(wanted["dtick"]))


def _note(axis: Any, layout: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Label the vertical lines, in their order."""
    for note, line in zip(layout.get("annotations", ()), layout.get("shapes", ()), strict=True):
        axis.annotate(
            note["text"],
            (line["x0"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -11),
            textcoords="offset points",
            color=colours["--ink"],
            fontsize=9,
            bbox={"facecolor": colours["--page"], "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _add_legend(axis: Any, plot: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    labelled = [trace for trace in plot["data"] if trace.get("name") and trace.get("showlegend", True)]
    is_bar = bool(labelled) and all(trace["type"] == "bar" for trace in labelled)
    if len(labelled) < 2 or (plot["layout"].get("showlegend") is False and not is_bar):
        return
    axis.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(labelled), 4), fontsize=9, labelcolor=colours["--ink"]
    )


def _colour(name: str | None, colours: Mapping[str, str]) -> str | None:
    return None if name is None else colours.get(name, name)


def _plain(text: str) -> str:
    return text.replace("<br>", "\n")
