"""Step times from a table of measured steps, a CSV file.

The header names a duration, `step_ms`, and one or more of the axes

    num_prefill_tokens        prompt tokens computed in the step
    prefill_context_tokens    mean number of tokens that each of them attends to
    num_decode_tokens         sequences that decode, one token each
    decode_context_tokens     mean number of tokens that each of them attends to

in any order, and each row is one measured step. Axes that are not in the header do not affect the step time. The rows
must cover every combination of the values that occur on the axes. If a count is 0, its mean context has no meaning:
write 0, and one row covers all contexts. Rows of the same step are averaged.

Between the measured values a step time is interpolated linearly along every axis.
"""

import csv
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import attrs

from ...core.errors import DoesNotFitError, InputError
from ...core.types import StepLoad
from .models import LatencyInputs, latency_models

AXES = ("num_prefill_tokens", "prefill_context_tokens", "num_decode_tokens", "decode_context_tokens")
DURATION = "step_ms"
_COUNT_OF = {"prefill_context_tokens": "num_prefill_tokens", "decode_context_tokens": "num_decode_tokens"}
_MISSING_SHOWN = 3

Point = tuple[float, ...]


@latency_models.register("table")
@attrs.frozen(kw_only=True)
class TableLatency:
    """Multilinear interpolation in a complete grid.

    Attributes:
        axes: names of the axes, in the order of `values`.
        values: rising values of each axis.
        milliseconds: step time at every combination of values; the last axis changes fastest.
        extrapolate: whether a step outside the table is extrapolated from the outermost cell; else it is refused.
        source: where the rows come from.
    """

    takes: ClassVar[tuple[str, ...]] = ("latency_table",)

    axes: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    milliseconds: tuple[float, ...]
    extrapolate: bool
    source: str

    _axes: tuple[tuple[str, Callable[[StepLoad], float | None], tuple[float, ...], int], ...] = attrs.field(
        init=False, repr=False, eq=False
    )
    _corners: tuple[int, ...] = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        strides = [prod(len(values) for values in self.values[index + 1 :]) for index in range(len(self.axes))]
        axes = tuple(
            (axis, _PLACES[axis], values, stride)
            for axis, values, stride in zip(self.axes, self.values, strides, strict=True)
        )
        # Offsets of a cell's corners from its lowest one, the last axis changing fastest.
        wide = [stride for _, _, values, stride in axes if len(values) > 1]
        corners = tuple(sum(corner) for corner in product(*((0, stride) for stride in wide)))
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_corners", corners)

    @classmethod
    def from_inputs(cls, inputs: LatencyInputs) -> "TableLatency":
        """Read the given table."""
        if inputs.latency_table is None:
            raise InputError("--latency table needs --latency-table FILE: a CSV of measured steps")
        return cls.from_csv(Path(inputs.latency_table))

    @classmethod
    def from_csv(cls, path: Path, *, extrapolate: bool = False) -> "TableLatency":
        """Read a table; the module's docstring describes its columns.

        Raises:
            InputError: the file cannot be read, a column is unknown or missing, a cell is not a valid number, or
                combinations are missing.
        """
        try:
            with path.open(newline="", encoding="utf-8") as lines:
                axes, rows = _read_rows(csv.reader(lines), str(path))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{path}: not a CSV file: {error}") from error
        values, means = _complete_grid(axes, rows, str(path))
        source = f"{path.name}: {sum(len(times) for times in rows.values()):,} measured steps"
        return cls(axes=axes, values=values, milliseconds=means, extrapolate=extrapolate, source=source)

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds that the step takes.

        Raises:
            DoesNotFitError: the step is outside the table and `extrapolate` is off, or its extrapolated time is not
                above 0.
        """
        base, shares = 0, []
        for axis, place_of, values, stride in self._axes:
            place = place_of(load)
            lowest, highest = values[0], values[-1]
            if place is None:
                place = lowest
            elif not lowest <= place <= highest and not self.extrapolate:
                raise DoesNotFitError(
                    f"a step of {load} has {axis} {place:g}, outside the table's {lowest:g} to {highest:g}"
                    f" ({self.source}); measure such steps, or ask for extrapolation"
                )
            if lowest == highest:
                continue
            low = bisect_right(values, place, 1, len(values) - 1) - 1
            base += low * stride
            shares.append((place - values[low]) / (values[low + 1] - values[low]))
        grid = self.milliseconds
        corners = [grid[base + offset] for offset in self._corners]
        for share in reversed(shares):
            corners = [low + (high - low) * share for low, high in zip(corners[::2], corners[1::2], strict=True)]
        milliseconds = corners[0]
        if milliseconds <= 0:
            raise DoesNotFitError(
                f"extrapolated from {self.source}, a step of {load} takes {milliseconds:g} ms; measure such steps"
            )
        return milliseconds / 1e3

    def assumptions(self) -> dict[str, object]:
        """The table's extent, and how times between and outside its values are found."""
        return {
            "latency_model": "table of measured steps, interpolated linearly along every axis",
            "source": self.source,
            **{
                f"table_{axis}": f"{values[0]:g} to {values[-1]:g}, {len(values)} values"
                for axis, values in zip(self.axes, self.values, strict=True)
            },
            "axes_without_effect": [axis for axis in AXES if axis not in self.axes],
            "outside_the_table": "extrapolated linearly" if self.extrapolate else "refused",
        }


def _prefill_context(load: StepLoad) -> float | None:
    return load.prefill_context_tokens / load.num_prefill_tokens if load.num_prefill_tokens else None


def _decode_context(load: StepLoad) -> float | None:
    return load.decode_context_tokens / load.num_decode_tokens if load.num_decode_tokens else None


# The position of a step on each axis; None if it has none (the context of no tokens).
_PLACES: Mapping[str, Callable[[StepLoad], float | None]] = {
    "num_prefill_tokens": attrgetter("num_prefill_tokens"),
    "prefill_context_tokens": _prefill_context,
    "num_decode_tokens": attrgetter("num_decode_tokens"),
    "decode_context_tokens": _decode_context,
}


def _read_rows(reader: Iterable[list[str]], place: str) -> tuple[tuple[str, ...], dict[Point, list[float]]]:
    """The axes, and the durations (ms) measured at each point."""
    rows = iter(reader)
    header = [name.strip() for name in next(rows, [])]
    unknown = [name for name in header if name not in (*AXES, DURATION)]
    axes = tuple(name for name in AXES if name in header)
    if unknown or DURATION not in header or not axes or len(set(header)) < len(header):
        raise InputError(
            f"{place}:1: the header is {', '.join(header) or 'empty'}; expected {DURATION} and, once each, one or more"
            f" of {', '.join(AXES)}"
        )
    missing = [f"{axis} (for {name})" for name, axis in _COUNT_OF.items() if name in axes and axis not in axes]
    if missing:
        raise InputError(f"{place}:1: the header lacks {', '.join(missing)}")
    measured: dict[Point, list[float]] = {}
    for number, row in enumerate(rows, start=2):
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != len(header):
            raise InputError(f"{place}:{number}: {len(row)} cells under a header of {len(header)}")
        cells = {name: _number(cell, name, f"{place}:{number}") for name, cell in zip(header, row, strict=True)}
        measured.setdefault(tuple(cells[axis] for axis in axes), []).append(cells[DURATION])
    if not measured:
        raise InputError(f"{place}: no rows under the header")
    return axes, measured


def _number(cell: str, name: str, place: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (name == DURATION and not value):
        above = "above 0" if name == DURATION else "of at least 0"
        raise InputError(f"{place}: {name} is {cell.strip()!r}; expected a number {above}")
    return value


def _complete_grid(
    axes: tuple[str, ...], rows: Mapping[Point, list[float]], place: str
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """The values of each axis, and the mean duration at every combination of them."""
    idle = [(axes.index(name), axes.index(count)) for name, count in _COUNT_OF.items() if name in axes]

    def canonical(point: Point) -> Point:
        """The point with 0 for the context of a count that is 0."""
        ignored = {context for context, count in idle if not point[count]}
        return tuple(0.0 if index in ignored else value for index, value in enumerate(point))

    means: dict[Point, list[float]] = {}
    for point, times in rows.items():
        means.setdefault(canonical(point), []).extend(times)
    values: list[tuple[float, ...]] = []
    for index in range(len(axes)):
        counts = [count for context, count in idle if context == index]
        known = {point[index] for point in means if all(point[count] for count in counts)}
        values.append(tuple(sorted(known or {0.0})))
    grid = [canonical(point) for point in product(*values)]
    missing = [point for point in grid if point not in means]
    if missing:
        shown = "; ".join(_named(axes, point) for point in missing[:_MISSING_SHOWN])
        raise InputError(
            f"{place}: {len(missing):,} of {len(grid):,} combinations of the axes' values are missing: {shown}"
            f"{', ...' if len(missing) > _MISSING_SHOWN else ''}; measure them, or leave their values out"
        )
    return tuple(values), tuple(sum(means[point]) / len(means[point]) for point in grid)


def _named(axes: tuple[str, ...], point: Point) -> str:
    return ", ".join(f"{axis} {value:g}" for axis, value in zip(axes, point, strict=True))
