"""Runs a command over a grid of options in any number of processes; resumable, with the same bytes every time."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import attrs

from ...core.errors import InputError, KVLedgerError
from ..figures import Document, at_path, figure_at
from ..scenario.options import SEARCH, TRAFFIC, option, options
from .jobs import option_sets, parse_setting, reason, run_job
from .kept import content_of, digest, files_among, kept

# Figures that depend on the machine are removed from a row.
NOT_REPRODUCIBLE = ("timing",)
POINT_FORMAT = 3  # raised whenever a replay of the same options may give other figures
PORTION_OF_A_WORKER = 8
_REQUIREMENT = re.compile(r"^\s*([\w.]+)\s*(<=|>=)\s*([-+.\deE]+)\s*$")


@attrs.frozen(kw_only=True)
class Point:
    """One run: a command, its trace files and its options as typed.

    `content` is a digest of these files and of those that options name: a kept result of other content is not used.
    """

    command: str
    files: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    content: str

    @property
    def key(self) -> str:
        """Identifies the point's inputs; the name of its kept result."""
        return digest(POINT_FORMAT, self.command, self.content, sorted(self.options))


def grid(axes: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield every combination of the axes' values, the last axis fastest; one empty combination without axes."""
    for values in product(*axes.values()):
        yield tuple(zip(axes, values, strict=True))


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse `block-size=16,32,64` or `seed=0..9` to name and values.

    Raises InputError: no name, no values, or a repeated value.
    """
    name, separator, listed = text.partition("=")
    name = name.strip().lstrip("-")
    counted = re.fullmatch(r"\s*(\d+)\.\.(\d+)\s*", listed)
    if counted:
        first, last = int(counted[1]), int(counted[2])
        values = tuple(str(value) for value in range(first, last + 1))
    else:
        values = tuple(value.strip() for value in listed.split(",")) if separator else ()
    if not name or not values or "" in values:
        raise InputError(f"--grid is {text!r}; it must look like block-size=16,32,64 or seed=0..9")
    if len(set(values)) < len(values):
        raise InputError(f"--grid {text} names a value twice")
    return name, values


def run_point(point: Point, kept_in: str | None) -> Document:
    """Run one point; its row has `options` and either `result` or `error`.

    A result in the folder `kept_in` is read, and a new one is written there atomically. Errors are not kept, so the
    next sweep tries again.
    """

    def run() -> Document:
        result = run_job(point.command, dict(point.options), point.files)
        return {name: figure for name, figure in result.items() if name not in NOT_REPRODUCIBLE}

    try:
        return {"options": dict(point.options), "result": kept(kept_in, point.key, run)}
    except KVLedgerError as error:
        return {"options": dict(point.options), "error": f"{type(error).__name__}: {reason(error)}"}


def run_sweep(
    points: Sequence[Point],
    *,
    num_workers: int = 1,
    kept_in: str | None = None,
    cluster: bool = False,
    on_row: Callable[[Document], None] = lambda row: None,
) -> list[Document]:
    """Run all points in `num_workers` processes, or on Ray; returns their rows in the order of the points.

    `ray.init` decides which cluster it is, a local one by default; it must share the folder `kept_in`. `on_row` is
    called with each finished row, in order.

    Raises:
        InputError: Ray is not installed.
        KeyboardInterrupt: passed on; `on_row` was called with the finished rows, and they are kept.
    """
    from joblib import Parallel, delayed, parallel_config

    backend = _ray_backend() if cluster else "loky"
    # Ray's backend returns all results at once, so it gets the points in portions.
    portion = PORTION_OF_A_WORKER * num_workers if cluster else max(len(points), 1)
    rows: list[Document] = []
    with (
        parallel_config(backend=backend, n_jobs=num_workers),
        Parallel(return_as="list" if cluster else "generator") as parallel,
    ):
        for start in range(0, len(points), portion):
            done: Any = parallel(delayed(run_point)(point, kept_in) for point in points[start : start + portion])
            for row in done:
                rows.append(row)
                on_row(row)
    return rows


def best_row(rows: Sequence[Document], path: str, maximize: bool, required: Sequence[str]) -> int | None:
    """Index of the first row with the smallest (or largest) figure among those that meet all requirements.

    `path` is that of the figure, such as `ttft_s.p99`; a requirement is such as `ttft_s.p99<=2`.

    Raises InputError: a malformed requirement, or a path that a result does not have.
    """
    bounds = [_requirement(text) for text in required]
    results = {index: row["result"] for index, row in enumerate(rows) if "result" in row}
    candidates = [index for index, result in results.items() if all(_meets(result, *bound) for bound in bounds)]
    figures = {index: figure_at(results[index], path) for index in candidates}
    known = [index for index, figure in figures.items() if figure is not None]
    sign = -1 if maximize else 1
    return min(known, key=lambda index: (sign * figures[index], index), default=None)


def _ray_backend() -> str:
    try:
        from ray.util.joblib import register_ray
    except ModuleNotFoundError:
        raise InputError("--cluster needs Ray, which is not installed: pip install 'kvledger[cluster]'") from None
    register_ray()
    return "ray"


def _requirement(text: str) -> tuple[str, str, float]:
    found = _REQUIREMENT.match(text)
    if found is None:
        raise InputError(f"--require is {text!r}; it must look like ttft_s.p99<=2 or prefix_cache.hit_rate>=0.3")
    return found[1], found[2], float(found[3])


def _meets(result: Document, path: str, relation: str, bound: float) -> bool:
    figure = figure_at(result, path)
    if figure is None:
        return False
    return figure <= bound if relation == "<=" else figure >= bound


@options
class SweepQuestion:
    """The options of `kvledger sweep`, as typed."""

    files: tuple[str, ...] = option(
        (), TRAFFIC, "Trace files, as the command takes them.", is_argument=True, metavar="TRACE"
    )
    command: str = option(
        "replay", SEARCH, "What to run: replay, fleet, size, optimum, curve, compare or plan.", "--command"
    )
    axes: tuple[str, ...] = option(
        (), SEARCH, "NAME=V1,V2,... or NAME=0..9: values of an option of the command; repeatable.", "--grid"
    )
    fixed: tuple[str, ...] = option(
        (), SEARCH, "NAME=VALUE, the same for every point; NAME=yes for a switch; repeatable.", "--set"
    )
    minimize: str | None = option(None, SEARCH, "Best row: the smallest figure, such as ttft_s.p99.")
    maximize: str | None = option(None, SEARCH, "Best row: the largest figure, such as prefix_cache.hit_rate.")
    require: tuple[str, ...] = option((), SEARCH, "Condition on the best row, such as ttft_s.p99<=2; repeatable.")
    num_workers: int = option(1, SEARCH, "Processes that run at the same time.", "--jobs", least=1, metavar="N")
    kept_in: str | None = option(
        None, SEARCH, "Folder of finished runs, which are not run again.", "--keep", metavar="FOLDER"
    )
    cluster: bool = option(False, SEARCH, "Run on Ray instead of processes here.", "--cluster")

    def __attrs_post_init__(self) -> None:
        option_sets(self.command)  # refuses an unknown one
        if self.minimize is not None and self.maximize is not None:
            raise InputError("give --minimize or --maximize, not both")
        if self.require and self.minimize is None and self.maximize is None:
            raise InputError("--require needs --minimize or --maximize to choose among the rows that meet it")

    def points(self) -> list[Point]:
        """Every point, in the order of the grid.

        Raises InputError: no axis, a repeated option, or a file that cannot be read.
        """
        if not self.axes:
            raise InputError("a sweep needs --grid NAME=V1,V2,... at least once")
        axes: dict[str, tuple[str, ...]] = {}
        fixed = [parse_setting(text, "--set", "block-size=64") for text in self.fixed]
        for name, values in map(parse_axis, self.axes):
            if name in axes or name in dict(fixed):
                raise InputError(f"--grid {name} is given twice, or as --set as well")
            axes[name] = values
        given = [value for _, value in fixed] + [value for values in axes.values() for value in values]
        content = content_of([*self.files, *files_among(given)])
        return [
            Point(command=self.command, files=self.files, options=(*fixed, *varied), content=content)
            for varied in grid(axes)
        ]


class Sweep:
    """Runs all points. `to_dict` may be called at any time and has the finished rows."""

    def __init__(self, question: SweepQuestion) -> None:
        self._question = question
        self._points = question.points()
        self.rows: list[Document] = []

    @property
    def num_points(self) -> int:
        """Number of points of the grid."""
        return len(self._points)

    def run(self, on_row: Callable[[Document], None] = lambda row: None) -> None:
        """Run every point; `on_row` is called with each finished row.

        Raises KeyboardInterrupt: passed on; `to_dict` has the finished rows.
        """

        def keep(row: Document) -> None:
            self.rows.append(row)
            on_row(row)

        asked = self._question
        run_sweep(
            self._points, num_workers=asked.num_workers, kept_in=asked.kept_in, cluster=asked.cluster, on_row=keep
        )

    def to_dict(self) -> Document:
        """The JSON document: `command`, `grid`, `rows` in the order of the grid, and `best`.

        It is the same, byte for byte, for any number of workers.
        """
        question, rows = self._question, self.rows
        return {
            "command": question.command,
            "trace": list(question.files),
            "grid": {name: list(values) for name, values in map(parse_axis, question.axes)},
            "num_failed": sum("error" in row for row in rows),
            "num_not_done": self.num_points - len(rows),
            "rows": rows,
            "best": self._best(),
        }

    def _best(self) -> Document | None:
        question = self._question
        figure = question.minimize or question.maximize
        if figure is None:
            return None
        index = best_row(self.rows, figure, question.maximize is not None, question.require)
        row = None if index is None else self.rows[index]
        return {
            "figure": figure,
            "of": "smallest" if question.minimize else "largest",
            "require": list(question.require),
            "index": index,
            "options": None if row is None else row["options"],
            "value": None if row is None else at_path(row["result"], figure),
        }
