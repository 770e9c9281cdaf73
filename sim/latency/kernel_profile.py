"""Kernel times of one server, profiled layer by layer, from a folder of three CSV files as LLMServingSim 2 writes them.

dense.csv         layer,tokens,time_us          one layer's kernels over the tokens of a step
per_sequence.csv  layer,sequences,time_us       output matrix and sampler over the sequences that are sampled
attention.csv     prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
                                                one layer's attention of a chunk behind `kv_prefill` cached tokens,
                                                beside `n_decode` sequences of `kv_decode` tokens each
"""

import csv
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

import attrs

from ...core.errors import InputError
from .kernel_tables import Curve

# Kernels that run once a step, not once a layer; and those that run twice a layer.
_ONCE_A_STEP = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)
# The class of each kernel of a layer; others pass over the activations.
_GEMMS = ("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "gate", "router")
_EXPERTS = ("moe", "experts", "fused_moe")
_ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")

Point = tuple[float, ...]


@attrs.frozen(eq=False)
class Grid:
    """Multilinear interpolation over a complete grid; beyond its ends on the outermost slope, never below its start."""

    axes: tuple[tuple[float, ...], ...]
    seconds: Mapping[Point, float]

    @classmethod
    def of(cls, points: Mapping[Point, float]) -> "Grid":
        """The largest complete grid in the points: values with the fewest points are left out until it is complete."""
        axes = [sorted({point[axis] for point in points}) for axis in range(len(next(iter(points))))]
        while len(inside := _inside(points, axes)) < prod(map(len, axes)):
            share = {
                (axis, value): sum(point[axis] == value for point in inside) * len(axes[axis])
                for axis, values in enumerate(axes)
                for value in values
            }
            axis, value = min(share, key=share.__getitem__)
            axes[axis].remove(value)
        return cls(tuple(map(tuple, axes)), {point: points[point] for point in inside})

    def at(self, *place: float) -> float:
        """Seconds at one place, a number for each axis."""
        corners: list[tuple[tuple[float, float], ...]] = []
        for values, value in zip(self.axes, place, strict=True):
            if len(values) == 1 or value <= values[0]:
                corners.append(((values[0], 1.0),))
                continue
            high = bisect_left(values, value, 1, len(values) - 1)
            share = (value - values[high - 1]) / (values[high] - values[high - 1])
            corners.append(((values[high - 1], 1 - share), (values[high], share)))
        return sum([
            self.seconds[tuple(value for value, _ in corner)] * prod(share for _, share in corner)
            for corner in product(*corners)
        ])  # fmt: skip


def _inside(points: Iterable[Point], axes: Sequence[Sequence[float]]) -> list[Point]:
    values = [set(axis) for axis in axes]
    return [point for point in points if all(value in known for value, known in zip(point, values, strict=True))]


@attrs.frozen(kw_only=True, eq=False)
class KernelProfile:
    """The profiled kernels of a model of `num_layers` layers on one device.

    Attributes:
        by_tokens: seconds of all layers over the tokens of a step, by class of kernels.
        by_sampled: seconds of output matrix and sampler over the sampled tokens.
        decode, prefill, mixed: seconds of one layer's attention over the four axes of `attention.csv`.
        num_layers: layers.
        source: the folder.
    """

    by_tokens: Mapping[str, Curve]
    by_sampled: Curve
    decode: Grid
    prefill: Grid
    mixed: Grid
    num_layers: int
    source: str

    @classmethod
    def read(cls, folder: str, num_layers: int) -> "KernelProfile":
        """Read a folder; the module's docstring describes its files.

        Raises InputError: a file is missing or cannot be read, or a cell is not a number above 0.
        """
        path = Path(folder)
        by_layer = _curves(path / "dense.csv", "tokens")
        by_class: dict[str, Curve] = {}
        for layer, curve in by_layer.items():
            name = "gemm" if layer in _GEMMS else "experts" if layer in _EXPERTS else "elementwise"
            times = 1 if layer in _ONCE_A_STEP else 2 * num_layers if layer in _TWICE_A_LAYER else num_layers
            by_class[name] = by_class[name] + curve * times if name in by_class else curve * times
        sampled = list(_curves(path / "per_sequence.csv", "sequences").values())
        points = {tuple(row[:4]): row[4] / 1e6 for row in _rows(path / "attention.csv", (*_ATTENTION_AXES, "time_us"))}
        parts = [
            {point: seconds for point, seconds in points.items() if is_part(point)}
            for is_part in (
                lambda point: not point[0] and point[2] > 0,
                lambda point: point[0] > 0 and not point[2],
                lambda point: point[0] > 0 and point[2] > 0,
            )
        ]
        if not all(parts):
            raise InputError(f"{path / 'attention.csv'}: it needs decodes, prompts, and steps of both")
        decode, prefill, mixed = map(Grid.of, parts)
        return cls(
            by_tokens=by_class,
            by_sampled=sampled[0] if len(sampled) == 1 else sampled[0] + sampled[1],
            decode=decode,
            prefill=prefill,
            mixed=mixed,
            num_layers=num_layers,
            source=f"profiled ({path.name})",
        )

    def seconds(self, chunks: Sequence[tuple[int, int]], num_sequences: float, context: float) -> tuple[float, float]:
        """Seconds of the decoding sequences, `context` being their mean length, and of the prompts' chunks.

        The longest chunk is timed beside the decodes, as it was profiled; each further one adds its own time, without
        the time of the shortest chunk, which is that of a launch.
        """
        layers = self.num_layers
        decode_s = self.decode.at(0, 0, num_sequences, context) if num_sequences else 0.0
        if not chunks:
            return layers * decode_s, 0.0
        longest, *others = sorted(chunks, reverse=True)
        launch_s = self.prefill.at(0, 0, 0, 0)
        both_s = self.mixed.at(*longest, num_sequences, context) if num_sequences else self.prefill.at(*longest, 0, 0)
        both_s += sum([self.prefill.at(*chunk, 0, 0) - launch_s for chunk in others])
        return layers * decode_s, layers * (both_s - decode_s)


def _curves(path: Path, count: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    for layer, number, micros in _rows(path, ("layer", count, "time_us")):
        points.setdefault(str(layer), {})[float(number)] = float(micros) / 1e6
    return {layer: Curve.through(times) for layer, times in points.items()}


def _rows(path: Path, columns: tuple[str, ...]) -> Iterable[list]:
    """The cells of each row, in the order of `columns`; all but `layer` are numbers."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            for number, row in enumerate(csv.DictReader(lines), start=2):
                try:
                    yield [row[name] if name == "layer" else float(row[name]) for name in columns]
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(f"{path}:{number}: expected the columns {', '.join(columns)}, numbers") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
