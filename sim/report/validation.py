"""Prints predictions beside measured serving points."""

from collections import Counter

from ..figures import Document, percent
from ..measured.validation import GROUPS, Prediction, ValidationResult
from .console import headline, print_hanging, print_list, table
from .plots import LEGEND_ABOVE, axis_of, layout_of, logarithmic, scatter

_WORST = 10
_REASONS = 5
_TITLES = {
    "by_card": "By card",
    "by_pair": "By card, model and precision",
    "by_concurrency": "By concurrency, up to",
    "by_calibration": "By what the factors were fitted to",
}
_ERRORS = ("MAPE", "median", "bias", "in range")


def print_validation(result: ValidationResult) -> None:
    """Print errors by group, the worst points with the classes of kernels behind them, and the rows left out."""
    predictions = result.predictions
    out = headline(
        f"{len(predictions):,} of {len(predictions) + len(result.left_out):,} measured points predicted"
        f" ({percent(result.coverage, 1)})"
    )
    columns = ("", "points", *(f"{name}\n{error}" for name in ("TPOT", "TTFT") for error in _ERRORS))
    for name, group in GROUPS.items():
        rows = [
            (
                _group(row["group"]),
                row["points"],
                *(_cell(row, latency, kind) for latency in ("tpot", "ttft") for kind in _KINDS),
            )
            for row in result.summary(group)
        ]
        out.print(table(_TITLES.get(name), columns, rows))
    if result.fitted is not None:
        rows = [
            (
                _SAMPLES[where],
                *(percent(row[f"{latency}_{kind}"], 1) for latency in ("tpot", "ttft") for kind in _KINDS[:3]),
            )
            for where, row in result.fitted.summary().items()
        ]
        fit_columns = ("", *(f"{name}\n{error}" for name in ("TPOT", "TTFT") for error in _ERRORS[:3]))
        out.print(table("The fit", fit_columns, rows))
    out.print(f"The {_WORST} points that are furthest off in TPOT", style="bold")
    for prediction in sorted(predictions, key=_error_of_tpot, reverse=True)[:_WORST]:
        print_hanging(out, "  - ", _explained(prediction))
    out.print()
    reasons = Counter(row.reason.partition(":")[0] for row in result.left_out)
    lines = [f"{count:,} rows: {reason}" for reason, count in reasons.most_common(_REASONS)]
    print_list(out, "Left out", lines)


def _group(name: str) -> str:
    return f"{int(name):,}" if name.isdigit() and int(name) < 1 << 20 else "more" if name.isdigit() else name


_SAMPLES = {
    "in_sample": "in sample",
    "held_points": "every fifth point left out in turn",
    "held_pairs": "each card and model left out in turn",
    "held_models": "each model left out in turn",
    "held_cards": "each card left out in turn",
}
_KINDS = ("mape", "median", "bias", "inside")


def _cell(row: dict[str, float], latency: str, kind: str) -> str:
    value = row[f"{latency}_{kind}"]
    return "-" if value is None else f"{100 * value:+.1f} %" if kind == "bias" else percent(value, 1)


def _error_of_tpot(prediction: Prediction) -> float:
    return abs(prediction.errors[1] or 0.0)


def _explained(prediction: Prediction) -> str:
    point, (ttft, tpot) = prediction.point, prediction.errors
    largest = sorted(prediction.shares.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {percent(share, 0)}" for name, share in largest)
    measured = [
        f"{name} {predicted:.1f} ms, measured {value:.1f} ms ({100 * error:+.0f} %)"
        for name, predicted, value, error in (
            ("TPOT", prediction.tpot_ms, point.tpot_ms, tpot),
            ("TTFT", prediction.ttft_ms, point.ttft_ms, ttft),
        )
        if value is not None and error is not None
    ]
    ranks = f"{point.tensor_parallel_size} x {point.data_parallel_size} GPUs"
    shape = f"{point.concurrency:,} users, {point.input_len:,} in, {point.output_len:,} out, {ranks}"
    return f"{point.name} ({point.pair}; {shape}): {'; '.join(measured)}. Of TPOT: {parts}"


def validation_plots(result: ValidationResult) -> dict[str, Document]:
    """Predicted against measured TPOT and TTFT of every point, by card; a line marks where both are equal."""
    out: dict[str, Document] = {}
    colours = ("--lru", "--engine", "--optimum", "--weights", "--activation", "--graphs", "--pool", "--outside")
    cards = sorted({prediction.point.device.name for prediction in result.predictions})
    for name, plot_id in (("tpot", "plot-validation-tpot"), ("ttft", "plot-validation-ttft")):
        data: list[Document] = []
        for place, card in enumerate(cards):
            pairs = [
                (value, getattr(prediction, f"{name}_ms"))
                for prediction in result.predictions
                if prediction.point.device.name == card
                and (value := getattr(prediction.point, f"{name}_ms")) is not None
            ]
            marker = {"color": colours[place % len(colours)], "size": 6, "opacity": 0.7}
            hover = f"measured %{{x:,.4~g}} ms, predicted %{{y:,.4~g}} ms<extra>{card}</extra>"
            measured, predicted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            data.append(scatter(card, measured, predicted, "markers", hover, marker=marker))
        ends = [value for line in data for value in line["x"]] or [1.0]
        equal = [min(ends), max(ends)]
        data.append(scatter("equal", equal, equal, "lines", line={"color": "--muted", "dash": "dash", "width": 1}))
        layout = layout_of(
            height=520,
            xaxis=axis_of(f"measured {name.upper()}, ms", **logarithmic(ends)),
            yaxis=axis_of(f"predicted {name.upper()}, ms", **logarithmic([y for line in data for y in line["y"]])),
            legend=LEGEND_ABOVE,
        )
        out[plot_id] = {"data": data, "layout": layout}
    return out
