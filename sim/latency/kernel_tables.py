"""Measured kernel times of one GPU type: curves and surfaces to interpolate, and the tables of a kernel database.

The database is the one that an installed `aiconfigurator-core` 0.12 ships (Apache-2.0): Parquet files of kernels timed
one by one under vLLM. Rows of the newest version win. No file of serving measurements is read.
"""

import functools
import importlib.util
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from ...core.errors import InputError
from .devices import Device

Floats = NDArray[np.float64]

PACKAGE = "aiconfigurator_core"
INSTALL = "pip install 'kvledger[kernels-db]'"
# The folder of each GPU type in the database.
SYSTEMS = {
    "A100-80GB": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
# How skewed the measured traffic between experts was: the popularity of expert i falls with i ** -1.01.
_EXPERT_TRAFFIC = "power_law_1.01"
# A GEMM table with fewer rows covers a few shapes of one model only.
_LEAST_GEMM_ROWS = 1_000


@attrs.frozen(eq=False)
class Curve:
    """Seconds over one count, piecewise linear; constant below the first count, on the last slope above the last."""

    counts: tuple[float, ...]  # rising
    seconds: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[float, float]) -> "Curve":
        """A curve through every measured point."""
        return cls(tuple(sorted(points)), tuple(points[count] for count in sorted(points)))

    @classmethod
    def of(cls, points: Mapping[float, float]) -> "Curve":
        """A curve below or at the points that never falls: a smaller kernel never takes longer than a larger one."""
        counts = sorted(points)
        seconds = _never_falling(np.array([points[count] for count in counts]))
        return cls(tuple(map(float, counts)), tuple(seconds.tolist()))

    def at(self, count: float) -> float:
        """Seconds of `count`."""
        counts, seconds = self.counts, self.seconds
        if count <= counts[0] or len(counts) == 1:
            return seconds[0]
        high = bisect_left(counts, count, 1, len(counts) - 1)
        low = seconds[high - 1]
        return low + (seconds[high] - low) * (count - counts[high - 1]) / (counts[high] - counts[high - 1])

    def __mul__(self, factor: float) -> "Curve":
        return Curve(self.counts, tuple(seconds * factor for seconds in self.seconds))

    def __add__(self, other: "Curve") -> "Curve":
        counts = tuple(sorted({*self.counts, *other.counts}))
        return Curve(counts, tuple(self.at(count) + other.at(count) for count in counts))

    def least(self, other: "Curve") -> "Curve":
        """At every count of either the shorter of the two."""
        counts = tuple(sorted({*self.counts, *other.counts}))
        return Curve(counts, tuple(min(self.at(count), other.at(count)) for count in counts))


@attrs.frozen(eq=False)
class Surface:
    """Seconds over two counts: a curve over the second for each of some values of the first, linear between them."""

    values: tuple[float, ...]  # rising values of the first count
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, points: Mapping[tuple[float, float], float]) -> "Surface":
        """A surface through measured points (first count, second count)."""
        rows: dict[float, dict[float, float]] = {}
        for (first, second), seconds in points.items():
            rows.setdefault(first, {})[second] = seconds
        return cls(tuple(sorted(rows)), tuple(Curve.of(rows[first]) for first in sorted(rows)))

    def at(self, first: float, second: float) -> float:
        """Seconds at two counts."""
        values, curves = self.values, self.curves
        if first <= values[0] or len(values) == 1:
            return curves[0].at(second)
        high = bisect_left(values, first, 1, len(values) - 1)
        below, above = curves[high - 1].at(second), curves[high].at(second)
        return below + (above - below) * (first - values[high - 1]) / (values[high] - values[high - 1])


def _never_falling(seconds: Floats, axis: int = -1) -> Floats:
    return np.flip(np.minimum.accumulate(np.flip(seconds, axis), axis), axis)


def has_kernel_tables(device: Device) -> bool:
    """Whether kernel times of a device are installed."""
    try:
        KernelTables.of(device)
    except InputError:
        return False
    return True


@attrs.frozen
class KernelTables:
    """The kernel times of one GPU type in the database. Every look-up returns None where nothing was measured."""

    system: str  # the folder of the GPU type
    folder: Path  # the folder of all GPU types

    @classmethod
    def of(cls, device: Device) -> "KernelTables":
        """The tables of a device.

        Raises InputError: the database is not installed, or has no tables of the device.
        """
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None or importlib.util.find_spec("pyarrow") is None:
            raise InputError(f"measured kernel times are not installed: {INSTALL}")
        system = SYSTEMS.get(device.name)
        folder = Path(found.origin).parent / "systems" / "data"
        if system is None or not (folder / system).is_dir():
            raise InputError(f"no kernel times of the {device.name} here; there are some of {', '.join(SYSTEMS)}")
        return cls(system, folder)

    def gemm(self, dtype: str, columns: int, inner: int) -> Curve | None:
        """Seconds over rows of a matrix product `[rows, inner] x [inner, columns]`; weights of `dtype`."""
        grid = self._gemm_grid(dtype)
        if grid is None:
            return None
        rows, sizes, seconds = grid
        first, share = _place(sizes, columns)
        second, inner_share = _place(sizes, inner)
        below = seconds[first, second] * (1 - inner_share) + seconds[first, second + 1] * inner_share
        above = seconds[first + 1, second] * (1 - inner_share) + seconds[first + 1, second + 1] * inner_share
        found = below * (1 - share) + above * share
        if not np.isfinite(found).all():  # beyond the largest products, where nothing bounds a hole
            return None
        return Curve(tuple(rows.tolist()), tuple(found.tolist()))

    @functools.lru_cache(maxsize=16)  # noqa: B019 - instances of one GPU type are equal
    def _gemm_grid(self, dtype: str) -> tuple[Floats, Floats, Floats] | None:
        """Rows; sizes of the other two axes; seconds `[columns, inner, rows]`, which never fall along any axis."""
        for table in self._tables("gemm", "gemm_perf"):
            is_dtype = table["gemm_dtype"] == dtype
            if np.count_nonzero(is_dtype) < _LEAST_GEMM_ROWS:
                continue
            axes = [table[name][is_dtype] for name in ("n", "k", "m")]
            sizes, rows = np.union1d(axes[0], axes[1]), np.unique(axes[2])
            seconds = np.full((len(sizes), len(sizes), len(rows)), np.inf)
            places = [np.searchsorted(values, axis) for values, axis in zip((sizes, sizes, rows), axes, strict=True)]
            np.minimum.at(seconds, tuple(places), table["latency"][is_dtype] / 1e3)
            for axis in (2, 1, 0):  # a hole takes the time of the next larger product
                seconds = _never_falling(seconds, axis)
            return rows.astype(float), sizes.astype(float), seconds
        return None

    def experts(
        self, dtype: str, hidden: int, inner: int, visited: int, num_experts: int, ranks: tuple[int, int]
    ) -> tuple[Curve, tuple[int, int]] | None:
        """Seconds over tokens of one layer's routed experts on one rank, and the ranks that were measured.

        `inner` is an expert's inner size before it is divided; `ranks` are (tensor parallel, expert parallel). Without
        rows of these ranks, those of the nearest number of ranks are returned.
        """
        for table in self._tables("moe", "moe_perf"):
            fits = (table["moe_dtype"] == dtype) & (table["distribution"] == _EXPERT_TRAFFIC)
            for name, value in (
                *(("hidden_size", hidden), ("inter_size", inner)),
                *(("topk", visited), ("num_experts", num_experts)),
            ):
                fits &= table[name] == value
            if not fits.any():
                continue
            there = set(zip(table["moe_tp_size"][fits].tolist(), table["moe_ep_size"][fits].tolist(), strict=True))
            nearest = min(
                there, key=lambda pair: (abs(np.log(pair[0] * pair[1] / (ranks[0] * ranks[1]))), pair != ranks)
            )
            fits &= (table["moe_tp_size"] == nearest[0]) & (table["moe_ep_size"] == nearest[1])
            return Curve.of(_least(table["num_tokens"][fits], table["latency"][fits])), nearest
        return None

    def attention(
        self, phase: str, num_heads: int, num_kv_heads: int, head_size: int, dtype: str, window: int
    ) -> Surface | None:
        """Seconds of one layer's attention over (sequences, tokens): cached tokens in a decode, prompt tokens else.

        `phase` is `generation` or `context`; `window` is 0 for full attention.
        """
        for table in self._tables("attention", f"{phase}_attention_perf"):
            fits = (table["num_heads"] == num_heads) & (table["num_key_value_heads"] == num_kv_heads)
            fits &= (table["head_dim"] == head_size) & (table["kv_cache_dtype"] == dtype)
            if "window_size" in table:
                fits &= table["window_size"] == window
            elif window:
                continue
            if fits.any():
                return _sequences(table, fits, phase)
        return None

    def latent_attention(self, phase: str, num_heads: int, dtype: str, gemm_dtype: str) -> Surface | None:
        """As `attention`, of a layer of latent attention (MLA) with its projections; `num_heads` of one rank."""
        for table in self._tables("mla", f"mla_{phase}_module_perf"):
            fits = (table["num_heads"] == num_heads) & (table["kv_cache_dtype"] == dtype)
            fits &= table["gemm_type"] == gemm_dtype
            if phase == "context":
                fits &= table["step"] == 0
            if fits.any():
                return _sequences(table, fits, phase)
        return None

    def all_reduce(self, num_ranks: int) -> Curve | None:
        """Seconds over bytes of one all-reduce inside a CUDA graph."""
        for table in self._tables("comm", "custom_allreduce_perf"):
            fits = (table["num_gpus"] == num_ranks) & (table["kernel_source"] == "vLLM_custom_graph")
            if fits.any():
                return Curve.of(_least(table["message_size"][fits], table["latency"][fits]))
        return None

    def _tables(self, family: str, name: str) -> Iterable[Mapping[str, NDArray[Any]]]:
        """The tables of a family, the newest version first."""
        paths = (self.folder / self.system / family / "vllm").glob(f"*/{name}.parquet")
        for path in sorted(paths, key=_version, reverse=True):
            yield _columns(path)


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", path.parent.name)[:3])


@functools.lru_cache(maxsize=32)
def _columns(path: Path) -> Mapping[str, NDArray[Any]]:
    import pyarrow.parquet as parquet

    read: Callable[..., Any] = parquet.read_table  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    table = read(path)
    return {name: table[name].to_numpy() for name in dict.fromkeys(table.column_names)}


def _least(counts: NDArray[Any], milliseconds: NDArray[Any]) -> dict[float, float]:
    """Seconds by count: of several kernels for one shape, the fastest."""
    found: dict[float, float] = {}
    for count, value in zip(counts.tolist(), milliseconds.tolist(), strict=True):
        found[count] = min(found.get(count, np.inf), value / 1e3)
    return found


def _sequences(table: Mapping[str, NDArray[Any]], fits: NDArray[np.bool_], phase: str) -> Surface:
    tokens = table["isl"][fits] if phase == "context" else table["step"][fits]
    points: dict[tuple[float, float], float] = {}
    columns = (table["batch_size"][fits], tokens, table["latency"][fits])
    for batch, count, value in zip(*(column.tolist() for column in columns), strict=True):
        points[batch, count] = min(points.get((batch, count), np.inf), value / 1e3)
    return Surface.of(points)


def _place(values: Floats, wanted: float) -> tuple[int, float]:
    """The index of a value, and how far `wanted` lies between it and the next: above 1 beyond the last value."""
    index = int(np.clip(np.searchsorted(values, wanted) - 1, 0, len(values) - 2))
    return index, max(0.0, float((wanted - values[index]) / (values[index + 1] - values[index])))
