"""Prints predictions beside measured serving points."""

from collections import Counter

from ..figures import percent
from ..measured.validation import GROUPS, Prediction, ValidationResult
from .console import headline, print_hanging, print_list, table

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
