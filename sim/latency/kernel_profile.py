"""Kernel times of one server, profiled layer by layer, from a folder of CSV files.

As LLMServingSim 2 writes them, in microseconds:

    dense.csv         layer,tokens,time_us          one layer's kernels over the tokens of a step
    per_sequence.csv  layer,sequences,time_us       output matrix and sampler over the sequences that are sampled
    attention.csv     prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
                                                    one layer's attention of a chunk behind `kv_prefill` cached tokens,
                                                    beside `n_decode` sequences of `kv_decode` tokens each

As Vidur and Frontier write them, in milliseconds, with a column `time_stats.<kernel>.median` for each kernel and a
column `num_tensor_parallel_workers`, of which the rows of the deployment's ranks are read:

    mlp.csv           or linear_op.csv: one layer's kernels over `num_tokens`
    moe.csv           one layer's routed experts over `num_tokens`; only of models that have some
    attention.csv     one layer's attention: of a prompt's `prefill_chunk_size` tokens behind `kv_cache_size` cached
                      ones, or of `batch_size` sequences that decode; steps of both are the sum
    all_reduce.csv    one all-reduce of `num_workers` ranks over `size` bytes; only needed for several ranks
"""

import csv
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import attrs

from ...core.errors import InputError
from .kernel_tables import Curve, Surface

# Kernels that run once a step, not once a layer; and those that run twice a layer.
_ONCE_A_STEP = ("embedding", "final_layernorm", "emb")
_TWICE_A_LAYER = ("layernorm", "all_reduce")
# The class of each kernel of a layer; others pass over the activations.
_CLASSES = {
    "gemm": (
        *("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "gate", "router"),
        *("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj", "moe_gating_linear"),
    ),
    "experts": ("moe", "experts", "fused_moe", "moe_grouped_gemm"),
    "collectives": ("all_reduce",),
}
_ATTENTION_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
# Kernels of Vidur and Frontier by file. Every rank runs those of the second group whole, and some profiles have them
# for one rank only.
_DIVIDED = ("attn_pre_proj", "attn_rope", "attn_post_proj", "mlp_up_proj", "mlp_act", "mlp_down_proj")
_WHOLE = ("emb", "input_layernorm", "post_attention_layernorm", "add")
_OF_EXPERTS = ("moe_gating_linear", "moe_gating_routing_topk", "moe_shuffling", "moe_grouped_gemm")
_RANKS = "num_tensor_parallel_workers"
_ACTIVATION_BYTES = 2  # of an element that Vidur's ranks exchange

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
            counts = Counter(place for point in inside for place in enumerate(point))
            share = {
                (axis, value): counts[axis, value] * len(values) for axis, values in enumerate(axes) for value in values
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
        by_sampled: seconds of output matrix and sampler over the sampled tokens; None if they were not profiled.
        decode, prefill, mixed: seconds of one layer's attention over the four axes of LLMServingSim's `attention.csv`;
            `mixed` is None if steps of both were not profiled.
        num_layers: layers.
        source: the folder.
    """

    by_tokens: Mapping[str, Curve]
    by_sampled: Curve | None
    decode: Grid
    prefill: Grid
    mixed: Grid | None = None
    num_layers: int
    source: str

    @classmethod
    def read(cls, folder: str, num_layers: int, tensor_parallel_size: int = 1) -> "KernelProfile":
        """Read a folder; the module's docstring describes its files.

        Raises InputError: a file is missing or cannot be read, a column or all rows of these ranks are missing, or a
        cell is not a number, 0 or more.
        """
        path = Path(folder)
        compute = next((path / name for name in ("mlp.csv", "linear_op.csv") if (path / name).exists()), None)
        read = _llm_serving_sim(path) if compute is None else _vidur(path, compute, tensor_parallel_size)
        layers, by_sampled, attention = read
        by_class: dict[str, Curve] = {}
        for layer, curve in layers.items():
            name = next((name for name, layers in _CLASSES.items() if layer in layers), "elementwise")
            times = 1 if layer in _ONCE_A_STEP else 2 * num_layers if layer in _TWICE_A_LAYER else num_layers
            by_class[name] = by_class[name] + curve * times if name in by_class else curve * times
        return cls(
            by_tokens=by_class, by_sampled=by_sampled, num_layers=num_layers, source=f"profiled ({path.name})",
            **attention,
        )  # fmt: skip

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
        if num_sequences and self.mixed is not None:
            prefill_s = self.mixed.at(*longest, num_sequences, context) - decode_s
        else:
            prefill_s = self.prefill.at(*longest, 0, 0)
        prefill_s += sum([self.prefill.at(*chunk, 0, 0) - launch_s for chunk in others])
        return layers * decode_s, layers * prefill_s


_Read = tuple[dict[str, Curve], Curve | None, dict[str, Grid]]


def _llm_serving_sim(path: Path) -> _Read:
    sampled = list(_curves(path / "per_sequence.csv", "sequences").values())
    columns = (*_ATTENTION_AXES, "time_us")
    rows = [_numbers(*row, columns) for row in _rows(path / "attention.csv", columns)]
    points = {tuple(row[:4]): row[4] / 1e6 for row in rows}
    parts = {
        "decode": {point: seconds for point, seconds in points.items() if not point[0] and point[2]},
        "prefill": {point: seconds for point, seconds in points.items() if point[0] and not point[2]},
        "mixed": {point: seconds for point, seconds in points.items() if point[0] and point[2]},
    }
    if not all(parts.values()):
        raise InputError(f"{path / 'attention.csv'}: it needs decodes, prompts, and steps of both")
    by_sampled = sum(sampled[1:], sampled[0])
    return _curves(path / "dense.csv", "tokens"), by_sampled, {name: Grid.of(part) for name, part in parts.items()}


def _curves(path: Path, count: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    for place, row in _rows(path, ("layer", count, "time_us")):
        number, micros = _numbers(place, row, (count, "time_us"))
        points.setdefault(row["layer"], {})[number] = micros / 1e6
    return {layer: Curve.through(times) for layer, times in points.items()}


def _vidur(path: Path, compute: Path, ranks: int) -> _Read:
    rows = _rows(compute, ("num_tokens", _RANKS, "n_embd"))
    layers = {
        **_of_ranks(rows, _WHOLE, 1),
        **_of_ranks(rows, (*_WHOLE, *_DIVIDED), ranks),
    }
    head = _of_ranks(rows, ("lm_head_linear",), ranks).get("lm_head_linear")
    if (path / "moe.csv").exists():
        experts = _rows(path / "moe.csv", ("num_tokens", _RANKS))
        alone = [(place, row) for place, row in experts if row.get("expert_parallel_size", "1") in ("1", "")]
        layers |= _of_ranks(alone, _OF_EXPERTS, ranks)
    for needed in (("attn_pre_proj",), ("mlp_up_proj", "moe_grouped_gemm")):
        if not any(name in layers for name in needed):
            raise InputError(f"{compute}: no times of {' or '.join(needed)} with {_RANKS} {ranks}")
    if ranks > 1:
        (hidden,) = _numbers(*rows[0], ("n_embd",))
        layers["all_reduce"] = _all_reduce(path / "all_reduce.csv", ranks, hidden * _ACTIVATION_BYTES)
    return layers, head, _vidur_attention(path / "attention.csv", ranks)


_Rows = Sequence[tuple[str, Mapping[str, str]]]


def _of_ranks(rows: _Rows, kernels: Sequence[str], ranks: int) -> dict[str, Curve]:
    """Curves of the kernels that have times in the rows of so many ranks."""
    own = [(place, row) for place, row in rows if _numbers(place, row, (_RANKS,)) == [ranks]]
    return {
        kernel: Curve.of({count: seconds for (count,), seconds in times.items()})
        for kernel in kernels
        if (times := _times(own, ("num_tokens",), (kernel,)))
    }


def _all_reduce(path: Path, ranks: int, token_bytes: float) -> Curve:
    rows = [
        (place, row)
        for place, row in _rows(path, ("num_workers", "size", "collective", "time_stats.all_reduce.median"))
        if row["collective"] == "all_reduce" and _numbers(place, row, ("num_workers",)) == [ranks]
    ]
    if not rows:
        raise InputError(f"{path}: no all_reduce with num_workers {ranks}")
    times = _times(rows, ("size",), ("all_reduce",))
    return Curve.of({size / token_bytes: seconds for (size,), seconds in times.items()})


def _vidur_attention(path: Path, ranks: int) -> dict[str, Grid]:
    rows = [
        (place, row)
        for place, row in _rows(path, ("batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill", _RANKS))
        if _numbers(place, row, (_RANKS,)) == [ranks]
        and "True" not in (row.get("is_mixed_batch"), row.get("is_true_mixed_batch"))
    ]
    of_prompts = [(place, row) for place, row in rows if row["is_prefill"] == "True"]
    decodes = [(place, row) for place, row in rows if row["is_prefill"] != "True"]
    # Long chunks behind long contexts, and long contexts of many sequences, do not fit on a profiled device.
    prefill = _times(of_prompts, ("kv_cache_size", "prefill_chunk_size"), ("attn_prefill", "attn_kv_cache_save"))
    decode = _times(decodes, ("batch_size", "kv_cache_size"), ("attn_decode", "attn_kv_cache_save"))
    if not (prefill and decode):
        raise InputError(f"{path}: it needs prompts and decodes with {_RANKS} {ranks}")
    return {
        "prefill": _extended(prefill, lambda before, chunk: (chunk, before, 0.0, 0.0)),
        "decode": _extended(decode, lambda sequences, cached: (0.0, 0.0, sequences, cached)),
    }


def _extended(points: Mapping[Point, float], place: Callable[[float, float], Point]) -> Grid:
    surface = Surface.of({(first, second): seconds for (first, second), seconds in points.items()})
    axes = [sorted({point[axis] for point in points}) for axis in (0, 1)]
    return Grid.of({place(*point): surface.at(*point) for point in product(*axes)})


def _times(rows: _Rows, counts: Sequence[str], kernels: Sequence[str]) -> dict[Point, float]:
    """Seconds of the first kernel, and of further ones where there are some: the median of the rows with a count."""
    found: dict[Point, list[float]] = {}
    for place, row in rows:
        columns = [f"time_stats.{kernel}.median" for kernel in kernels]
        if row.get(columns[0]):
            millis = _numbers(place, row, [column for column in columns if row.get(column)])
            found.setdefault(tuple(_numbers(place, row, counts)), []).append(sum(millis) / 1e3)
    return {count: median(seconds) for count, seconds in found.items()}


def _rows(path: Path, columns: Sequence[str]) -> _Rows:
    """Every row, with its file and line."""
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            reader = csv.DictReader(lines)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path}:1: the header lacks {', '.join(missing)}")
            rows = [(f"{path}:{number}", row) for number, row in enumerate(reader, start=2)]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: not a CSV file: {error}") from error
    if not rows:
        raise InputError(f"{path}: no rows")
    return rows


def _numbers(place: str, row: Mapping[str, Any], columns: Sequence[str]) -> list[float]:
    values: list[float] = []
    for name in columns:
        try:
            value = float(row[name])
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise InputError(f"{place}: {name} is {row[name]!r}; it must be a number, 0 or more")
        values.append(value)
    return values
