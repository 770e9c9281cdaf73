"""A grid of runs of any command, in any number of processes: resumable, in one order, to the last byte the same."""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError, KVLedgerError
from ..study.answer import at_path

SWEEPABLE = ("replay", "fleet", "curve", "compare", "plan", "size", "optimum")
# Figures that depend on the machine's clock have no place in a row.
NOT_REPRODUCIBLE = ("timing",)
POINT_FORMAT = 1
INTERRUPTED = 130
PORTION_OF_A_WORKER = 8
_REQUIREMENT = re.compile(r"^\s*([\w.]+)\s*(<=|>=)\s*([-+.\deE]+)\s*$")


@attrs.frozen(kw_only=True)
class Point:
    """One run: a command, its positional arguments (trace files) and its options as typed.

    `content` stands for what the files hold, so that a kept result of other content is not mistaken for this one's.
    """

    command: str
    files: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    content: str

    @property
    def key(self) -> str:
        """Names the point by what it computes."""
        said = json.dumps([POINT_FORMAT, self.command, self.content, sorted(self.options)])
        return hashlib.sha256(said.encode()).hexdigest()[:32]

    @property
    def argv(self) -> list[str]:
        """The command line of the point."""
        words = [self.command, *self.files]
        for name, value in self.options:
            words += _switch(name, value)
        return [*words, "--json"]


def grid(axes: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Every combination of the axes' values, the last axis fastest; one empty combination without axes."""
    for values in product(*axes.values()):
        yield tuple(zip(axes, values, strict=True))


def parse_axis(text: str) -> tuple[str, tuple[str, ...]]:
    """`block-size=16,32,64` -> its name and values; `seed=0..9` counts.

    Raises:
        InputError: no name, no values, or a value named twice.
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


def content_of(files: Iterable[str]) -> str:
    """A digest of what the files, and those in folders, hold. Raises `InputError` for one that cannot be read."""
    digest = hashlib.sha256()
    paths = [Path(name) for name in files]
    inside = [sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] for path in paths]
    for name in (path for found in inside for path in found):
        try:
            with open(name, "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise InputError(f"{name}: {error.strerror or error}") from None
    return digest.hexdigest()


def run_point(point: Point, kept_in: str | None) -> dict[str, Any]:
    """The row of one point: `options`, and its `result`, or the `error` for which it has none.

    A result that is kept in the folder `kept_in` is read; a new one is kept there, whole or not at all. An error is
    not kept: the next run tries again.
    """
    kept = None if kept_in is None else Path(kept_in) / f"{point.key}.json"
    if kept is not None and kept.is_file():
        result = json.loads(kept.read_text(encoding="utf-8"))
        return {"options": dict(point.options), "result": result}
    try:
        result = _document(point.argv)
    except KVLedgerError as error:
        return {"options": dict(point.options), "error": f"{type(error).__name__}: {error}"}
    for name in NOT_REPRODUCIBLE:
        result.pop(name, None)
    if kept is not None:
        unfinished = kept.with_name(f"{kept.name}.{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")
        os.replace(unfinished, kept)
    return {"options": dict(point.options), "result": result}


def run_sweep(
    points: Sequence[Point],
    *,
    num_workers: int = 1,
    kept_in: str | None = None,
    cluster: bool = False,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """The rows of all points, in their order, whatever the workers do.

    Args:
        points: what to run.
        num_workers: processes; with `cluster`, tasks at the same time.
        kept_in: a folder for finished points, which are not computed again; on a cluster it must be shared.
        cluster: whether joblib runs on Ray (`ray.init` decides which cluster; a local one unless told otherwise).
        on_row: hears of each row, in order, as it is there.

    Raises:
        InputError: no worker, or Ray is not installed.
        KeyboardInterrupt: passed through; what is done by then was told to `on_row`, and is kept.
    """
    from joblib import Parallel, delayed, parallel_config

    if num_workers < 1:
        raise InputError(f"--jobs is {num_workers}; it must be at least 1")
    if kept_in is not None:
        Path(kept_in).mkdir(parents=True, exist_ok=True)
    backend = _ray_backend() if cluster else "loky"
    # Ray's backend hands its results over all at once, so it is given the points in portions.
    portion = PORTION_OF_A_WORKER * num_workers if cluster else max(len(points), 1)
    rows: list[dict[str, Any]] = []
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


def best_row(rows: Sequence[dict[str, Any]], path: str, maximize: bool, required: Sequence[str]) -> int | None:
    """The index of the first row with the smallest (or largest) figure among those that meet all requirements.

    Args:
        rows: of a sweep.
        path: of the figure in the result, such as `ttft_s.p99`.
        maximize: whether the largest is best.
        required: such as `ttft_s.p99<=2`.

    Raises:
        InputError: a requirement that cannot be read, or a path that no result has.
    """
    bounds = [_requirement(text) for text in required]
    results = {index: row["result"] for index, row in enumerate(rows) if "result" in row}
    candidates = [index for index, result in results.items() if all(_meets(result, *bound) for bound in bounds)]
    figures = {index: _figure(results[index], path) for index in candidates}
    known = [index for index, figure in figures.items() if figure is not None]
    sign = -1 if maximize else 1
    return min(known, key=lambda index: (sign * figures[index], index), default=None)


def _document(argv: Sequence[str]) -> dict[str, Any]:
    """Run one command line in this process; its JSON document."""
    import typer

    from ..cli import build_app

    out, complaints = io.StringIO(), io.StringIO()
    command = typer.main.get_command(build_app())
    try:
        with redirect_stdout(out), redirect_stderr(complaints):
            code = command.main(args=list(argv), prog_name="kvledger", standalone_mode=False)
            if code == INTERRUPTED:  # typer makes an exit code of it
                raise KeyboardInterrupt
    except SystemExit as error:
        if error.code not in (None, 0) and not out.getvalue():
            raise InputError(complaints.getvalue().strip() or f"exit {error.code}") from None
    except KVLedgerError:
        raise
    except Exception as error:
        raise InputError(str(error)) from error
    return json.loads(out.getvalue())


def _switch(name: str, value: str) -> list[str]:
    """An option as on the command line; `yes` and `no` stand for switches that are given or negated."""
    if value == "yes":
        return [f"--{name}"]
    return [f"--no-{name}"] if value == "no" else [f"--{name}", value]


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


def _meets(result: dict[str, Any], path: str, relation: str, bound: float) -> bool:
    figure = _figure(result, path)
    if figure is None:
        return False
    return figure <= bound if relation == "<=" else figure >= bound


def _figure(result: dict[str, Any], path: str) -> Any:
    try:
        return at_path(result, path)
    except (KeyError, IndexError, ValueError, TypeError):
        raise InputError(f"there is no figure {path!r} in the result; it has {', '.join(result)}") from None
