"""Prints and plots `kvledger size`: the answer, the shapes tried, the runs on both sides of it, the assumptions."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..figures import Document, percent, seconds
from ..search.sizing import SearchWatch
from .console import Bar, console, headline, print_assumptions, table
from .plots import LEGEND_ABOVE, axis_of, bars, layout_of, scatter


def print_size(document: Mapping[str, Any]) -> None:
    """Print everything (`document` is that of `--json`)."""
    headline(_headline(document))
    if document["answer"] is not None:
        _print_cost(document["answer"]["cost"])
    instead = document["instead"]
    if instead is not None:
        _print_nearest(instead)
    _print_shapes(document)
    for shape in document["shapes"]:
        _print_searches(shape, document["asked"])
    if document["tornado"]:
        _print_tornado(document)
    assumptions = document["assumptions"]
    if instead is not None:
        for shape in instead["shapes"]:
            _print_searches(shape, instead["asked"])
        assumptions = instead["assumptions"] or assumptions
    if assumptions:
        print_assumptions({**_traffic(document), **assumptions})


def _headline(document: Mapping[str, Any]) -> str:
    if document["answer"] is not None:
        return document["answer"]["sentence"] + (" (interrupted)" if document["not_done"] else "")
    if document["not_done"] and not document["shapes"]:
        return f"No answer yet: {document['not_done']}"
    if document["not_done"] and document["instead"] is None:
        return f"No answer yet: {document['shapes'][-1]['reason']}"
    return f"No tried fleet keeps {document['promises']}{_nearest(document)}"


def _nearest(document: Mapping[str, Any]) -> str:
    """How many requests the best shape can serve in time when idle, if some requests are too long by themselves."""
    bounds = [shape for shape in document["shapes"] if shape["idle"] and not shape["searches"]]
    if not bounds:
        return ""
    best = max(bounds, key=lambda shape: shape["idle_share_in_time"])
    gpus = "1 GPU" if best["gpus_per_replica"] == 1 else f"{best['gpus_per_replica']} GPUs"
    return (
        f": only {percent(best['idle_share_in_time'], 1)} of the requests meet the limits even alone on an idle engine "
        f"of {gpus} with all earlier prompts cached"
    )


def _traffic(document: Mapping[str, Any]) -> Document:
    """Describes the replayed trace, on which every figure depends."""
    trace = document["trace"]
    if trace is None:
        return {}
    window = trace["window"]
    return {
        "trace": f"{trace['name']}: {trace['num_requests']:,} requests in "
        f"{window['end_s'] - window['start_s']:,.0f} s, {trace['input_tokens']:,} prompt and "
        f"{trace['output_tokens']:,} output tokens",
        "prefixes": "shared as given by the trace's block ids"
        if trace["claims_reuse"]
        else "none shared: the trace has no block ids",
        "rate_scale": trace["rate_scale"],
    }


def _print_cost(cost: Mapping[str, float] | None) -> None:
    if cost is None:
        return
    per_month = next(value for name, value in cost.items() if name.startswith("per_month"))
    console().print(
        f"At {cost['price_per_gpu_hour']:,g} per GPU hour: {cost['per_hour']:,.2f} per hour, {per_month:,.0f} per "
        f"month (730 hours), {cost['per_million_output_tokens']:,.2f} per million output tokens at this traffic",
        soft_wrap=True,
    )


def _print_shapes(document: Mapping[str, Any]) -> None:
    is_rate = document["asked"] == "rate_scale"
    rows = [
        (
            f"{shape['tensor_parallel_size']}",
            "-" if shape["num_gpu_blocks"] is None else f"{shape['num_gpu_blocks']:,}",
            "-" if shape["replicas"] is None else f"{shape['replicas']:,}",
            "-" if shape["gpus"] is None else f"{shape['gpus']:,}",
            *((("-" if shape["rate_scale"] is None else f"{shape['rate_scale']:.3g}"),) if is_rate else ()),
            (shape["reason"] or "").split(". ")[0],
        )
        for shape in document["shapes"]
    ]
    columns = ("TP", "blocks", "replicas", "GPUs", *(("x rate",) if is_rate else ()), "why not")
    console().print(table("Shapes tried", columns, rows, left=(len(columns) - 1,)))
    for shape in document["shapes"]:
        interval = shape.get(f"{document['asked']}_over_seeds")
        if interval and interval["num_samples"] > 1:
            console().print(
                f"Tensor parallel size {shape['tensor_parallel_size']} over {interval['num_samples']} seeds: mean "
                f"{interval['mean']:,.3g}, 95 % confidence interval {interval['low']:,.3g} to {interval['high']:,.3g}; "
                "the answer is that of the worst seed"
            )


def _print_searches(shape: Mapping[str, Any], asked: str) -> None:
    is_rate = asked == "rate_scale"
    for search in shape["searches"]:
        rows = [
            (
                f"{trial['value']:,.4g}" + (" *" if trial["value"] == search[asked] else "  "),
                "met" if trial["met"] else "missed",
                *_slo_cells(trial),
                seconds(trial["ttft_s"]["p99"]) if "ttft_s" in trial else "-",
                seconds(trial["tpot_s"]["p99"]) if "tpot_s" in trial else "-",
                percent(trial["prefix_cache_hit_rate"]) if "ttft_s" in trial else "-",
                percent(trial["mean_busy_share"], 1)
                if "ttft_s" in trial
                else f"stopped at request {trial['stopped_after_requests']:,}: certain to miss",
            )
            for trial in search["trials"]
        ]
        seed = "" if search["seed"] is None else f", seed {search['seed']}"
        title = f"Runs with tensor parallel size {shape['tensor_parallel_size']}{seed} (* the answer)"
        tried = "x rate  " if is_rate else "replicas  "
        extra = ("in time",) if "goodput_share" in search["trials"][0]["slo"] else ()
        console().print(table(title, (tried, "SLO", *extra, "TTFT p99", "TPOT p99", "hit rate", "busy"), rows))
        console().print(_checked(search, asked), soft_wrap=True)


def _slo_cells(trial: Mapping[str, Any]) -> tuple[str, ...]:
    figure = trial["slo"].get("goodput_share")
    if figure is None:
        return ()
    return ("-" if figure["value"] is None else percent(figure["value"]),)


def _checked(search: Mapping[str, Any], asked: str) -> str:
    """Whether the runs agree that the answer is the only boundary between met and missed."""
    if search.get("not_done"):
        return f"This search was {search['not_done']}."
    if not search["is_monotone"]:
        pair = search["contradictions"][0]
        worse = "lighter traffic" if asked == "rate_scale" else "a larger fleet"
        way = "Up to {:.4g}" if asked == "rate_scale" else "From {:.4g} on"
        safe = "" if search["safe"] is None else f" {way.format(search['safe'])} every run kept the SLO."
        return (
            f"NOT MONOTONE: {worse} did worse: {pair['missed']:.4g} missed the SLO although {pair['met']:.4g} kept it."
            f"{safe}"
        )
    if search[asked] is None:
        return "Every run missed the SLO."
    not_run = search["not_run"]
    unrun = ""
    if not_run:
        unrun = f"; not run: {', '.join(map(str, not_run[:8]))}{' ...' if len(not_run) > 8 else ''}"
    is_smallest = asked == "rate_scale" or search[asked] == 1
    below = "" if is_smallest else f" Every smaller number that ran missed the SLO{unrun}."
    return f"All runs agree that this is the only boundary.{below} --probes adds runs."


def _print_tornado(document: Mapping[str, Any]) -> None:
    asked = document["asked"]
    rows: list[Sequence[str]] = []
    for row in document["tornado"]:
        cells = [_end(row[end], asked) for end in ("low", "high")]
        rows.append((row["assumption"], *cells, f"{row[f'swing_{asked}']:,.3g}", f"{row['swing_slo']:,.3g}"))
    unit = "replicas" if asked == "replicas" else "times the rate"
    named = " and ".join(document["most_important"]) or "nothing changes it"
    title = f"What changes the answer ({unit} at either end). Matters most: {named}"
    columns = ("assumption", "low", "high", "swing", "SLO figure swing")
    console().print(table(title, columns, rows, left=(0, 1, 2)))


def _end(end: Mapping[str, Any], asked: str) -> str:
    if "does_not_apply" in end:
        return f"{end['value']}: does not apply"
    answer = "none" if end[asked] is None else f"{end[asked]:,.3g}"
    return f"{end['value']}: {answer}"


def _print_nearest(instead: Mapping[str, Any]) -> None:
    """Print the nearest SLO that can be kept, if the given one cannot."""
    from rich.markup import escape

    answer = instead["answer"]
    sentence = f"no fleet keeps {instead['promises']} either"
    if answer is not None:
        sentence = answer["sentence"]
    elif instead["not_done"]:
        reason = instead["shapes"][-1]["reason"] if instead["shapes"] else instead["not_done"]
        sentence = f"{instead['promises']}: {reason}"
    out = console()
    out.print(
        f"Nearest SLO (99 % of the requests that can be in time): [bold]{escape(sentence)}[/bold]", soft_wrap=True
    )
    if answer is not None:
        _print_cost(answer["cost"])
    if answer is not None and answer["gpu"]:
        out.print("To come closer, try --quantization fp8, larger --tensor-parallel-sizes, or another --gpu")


class SizeProgress(SearchWatch):
    """Shows the runs of a search on a bar that counts the requests of the current run; see `Bar`."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = Bar("searching")
        self._shape = ""
        self._most = ""  # runs, known once the answer is bracketed

    def shape(self, text: str) -> None:
        """Name the shape in what follows."""
        self._shape, self._most = text, ""

    def starts(self, value: float, num_requests: int | None) -> None:
        """Begin to count the requests of a run."""
        description = f"{self._shape}: run {len(self.trials) + 1}{self._most}, of {value:.4g}; requests"
        self.bar.update(description=description, completed=0, total=num_requests)

    def routed(self, num_requests: int) -> None:
        """Show how many requests of the run have arrived."""
        self.bar.count(num_requests)

    def left(self, num_runs: int) -> None:
        """Show how many runs there are at most."""
        self._most = f" of at most {len(self.trials) + num_runs}"

    def tornado(self, num_done: int, num_rows: int) -> None:
        """Count assumptions."""
        self.bar.part("what matters: assumptions", num_done, num_rows)


DASHED = {"color": "--ink", "width": 1.5, "dash": "dash"}
# SLO figure -> axis title, and factor from the JSON value to the axis.
FIGURES = {
    "ttft_p99_s": ("p99 TTFT, s", 1.0),
    "tpot_p99_s": ("p99 TPOT, s", 1.0),
    "goodput_share": ("requests in time, %", 100.0),
}


def size_plots(document: Mapping[str, Any]) -> dict[str, Document]:
    """Plots by id, without empty ones. Without an answer, the plots of the nearest SLO."""
    if document["answer"] is None and document["instead"] is not None:
        return size_plots(document["instead"])
    out: dict[str, Document] = {}
    runs = search_plot(document["shapes"], document["asked"])
    if runs is not None:
        out["plot-search"] = runs
    answer = document["answer"]
    if document["tornado"] and answer is not None:
        out["plot-tornado"] = tornado_plot(document["tornado"], document["asked"], answer[document["asked"]])
    return out


def search_plot(shapes: Sequence[Mapping[str, Any]], asked: str) -> Document | None:
    """The first SLO figure of every complete run, a line per shape, with the limit; None without a complete run."""
    searches = [(shape["tensor_parallel_size"], search) for shape in shapes for search in shape["searches"]]
    promises = [name for _, search in searches for trial in search["trials"] for name in trial["slo"]]
    if not promises:
        return None
    promise = promises[0]
    title, unit = FIGURES[promise]
    styles = (("--lru", "circle"), ("--optimum", "diamond"), ("--engine", "square"), ("--muted", "cross"))
    data: list[Document] = []
    limit = None
    for index, (size, search) in enumerate(searches):
        ended = [trial for trial in search["trials"] if trial["slo"][promise]["value"] is not None]
        if not ended:
            continue
        limit = ended[0]["slo"][promise]["limit"] * unit
        colour, symbol = styles[index % len(styles)]
        seed = "" if search["seed"] is None else f", seed {search['seed']}"
        values = [trial["value"] for trial in ended]
        figures = [trial["slo"][promise]["value"] * unit for trial in ended]
        name, hover = f"tensor parallel size {size}{seed}", "%{x}: %{y:.4~g}<extra></extra>"
        style: Document = {"line": {"color": colour, "width": 2}}
        style["marker"] = {"symbol": symbol, "size": 9, "color": colour}
        data.append(scatter(name, values, figures, "lines+markers", hover, **style))
    if not data or limit is None:
        return None
    ends = [value for trace in data for value in trace["x"]]
    data.append(scatter("limit", [min(ends), max(ends)], [limit, limit], "lines", line=DASHED))
    xaxis = _tried_axis(asked, max(ends) - min(ends))
    layout = layout_of(height=380, xaxis=xaxis, yaxis=axis_of(title, rangemode="tozero"), legend=LEGEND_ABOVE)
    return {"data": data, "layout": layout}


def tornado_plot(rows: Sequence[Mapping[str, Any]], asked: str, answer: float) -> Document:
    """A bar per assumption from the answer at its low end to that at its high end, the widest on top.

    An end at which no tried value keeps the SLO has no place on the axis: its bar ends at the answer, and its name says
    so.
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
    hover = "%{y}: from %{base:.3~g}, %{x:.3~g} wide<extra></extra>"
    data = [
        bars("answer, low to high", widths, names, "--pool", hover, base=starts),
        scatter("the answer", [answer] * len(names), names, "lines", line=DASHED),
    ]
    xaxis = _tried_axis(asked, max(widths))
    layout = layout_of(height=120 + 32 * len(names), bargap=0.3, xaxis=xaxis, yaxis=axis_of(""), legend=LEGEND_ABOVE)
    return {"data": data, "layout": layout}


def _tried_axis(asked: str, span: float) -> Document:
    """The axis of tried values; ticks of replicas are whole numbers."""
    if asked != "replicas":
        return axis_of("times the recorded rate")
    return axis_of("replicas", dtick=max(1, round(span / 10)))
