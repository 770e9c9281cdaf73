"""Writes the files of a replay or fleet: opened before the run, written during it, and put in place together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ..engine.engine import RunListener
from ..engine.metrics import RequestRecord
from ..engine.replay import ReplayReport
from ..engine.vllm_metrics import cache_config_labels, series_labels
from ..fleet.fleet import EngineName
from ..scenario.options import OUTPUT, option, options
from . import tables
from .engine_trace import EngineTrace, TraceEventFile
from .prometheus import OpenMetricsSeries, prometheus_text, write_openmetrics


@options
class ExportOptions:
    """The files to write; None for those not wanted."""

    requests_out: str | None = option(
        None, OUTPUT, "Write a row for each finished request to FILE.csv, .jsonl or .parquet.", metavar="FILE"
    )
    series_out: str | None = option(
        None,
        OUTPUT,
        "Write KV cache usage, running and waiting requests over time to FILE.csv, .jsonl or .parquet.",
        metavar="FILE",
    )
    prometheus_out: str | None = option(
        None, OUTPUT, "Write the final state as Prometheus text under vLLM's metric names.", metavar="FILE"
    )
    openmetrics_out: str | None = option(
        None,
        OUTPUT,
        "Write the metrics of every 15 s of the run as OpenMetrics, which Prometheus imports as history.",
        metavar="FILE",
    )
    openmetrics_start: int | None = option(
        None, OUTPUT, "Start time of that run in seconds since 1970.", metavar="SECONDS"
    )
    perfetto_out: str | None = option(
        None, OUTPUT, "Write engine steps and requests for ui.perfetto.dev to FILE.json or .json.gz.", metavar="FILE"
    )


class RunExports(AbstractContextManager["RunExports"]):
    """Writes the files of one replay. Without `publish`, no existing file changes.

        with RunExports(options, pool.allocator, pool.facts, inputs=[trace]) as exports:
            report = replay(
                ...,
                listeners=exports.listeners,
                on_finished=exports.on_finished,
                macro_steps=exports.macro_steps,
            )
            exports.publish(report)

    For a fleet, `engines` names every engine, and `EngineParts` take `listeners_of`, `on_finished_on`, `macro_steps`
    and `histograms`. Tables then begin with a column `engine`, series have labels of the engine, and each engine has
    its own tracks in the trace.

    Attributes:
        on_finished: callback for the record of each finished request, or None.
        on_finished_on: callback of a fleet, which also takes the index of the engine, or None.
        macro_steps: whether several steps may run at once; False if counters are read during the run.
        histograms: whether engines must count the histograms of vLLM's metrics.
    """

    def __init__(
        self,
        files: ExportOptions,
        allocator: AllocatorConfig,
        facts: Mapping[str, Any],
        inputs: Iterable[str] = (),
        engines: Sequence[EngineName] = (),
    ) -> None:
        """Open every file. Those that the run reads, `inputs`, must not be overwritten.

        Raises InputError: a file cannot be written, is given twice or is an input, or a library is missing.
        """
        self.on_finished: Callable[[RequestRecord], None] | None = None
        self.on_finished_on: Callable[[int, RequestRecord], None] | None = None
        self.macro_steps = files.openmetrics_out is None
        self.histograms = files.prometheus_out is not None or files.openmetrics_out is not None
        self._names = [str(name) for name in engines]
        self._listeners: list[list[RunListener]] = [[] for _ in engines or (None,)]
        of_engine = [(name.labels(),) for name in engines] or [()]
        self._labels = [series_labels(facts, *labels) for labels in of_engine]
        self._cache_config = [cache_config_labels(allocator, facts, *labels) for labels in of_engine]
        self._files: list[tables.OutputFile] = []
        self._finish: list[Callable[[ReplayReport], None]] = []
        self._abandon: list[Callable[[], None]] = []
        self._taken = {Path(name).resolve(): "an input of this run" for name in inputs}
        try:
            self._open_tables(files)
            self._open_metrics(files)
            if files.perfetto_out is not None:
                self._open_trace(files.perfetto_out)
        except InputError:
            self._discard()
            raise

    @property
    def listeners(self) -> list[RunListener]:
        """Listeners of a single engine."""
        return self._listeners[0]

    def listeners_of(self, index: int) -> list[RunListener]:
        """Listeners of one engine of a fleet."""
        return self._listeners[index]

    def publish(self, report: ReplayReport) -> None:
        """Finish every file, then put all of them in place.

        Raises InputError: a write failed, such as on a full disk; then no file is put in place.
        """
        for finish in self._finish:
            finish(report)
        for file in self._files:
            file.close()
        for file in self._files:
            file.publish()
        self._files.clear()

    def __exit__(self, *_: object) -> None:
        """Discard the files unless they were published."""
        self._discard()

    def _open_tables(self, files: ExportOptions) -> None:
        first = tables.ENGINE_COLUMN if self._names else {}
        if files.requests_out is not None:
            requests = self._table("--requests-out", files.requests_out, {**first, **tables.REQUEST_COLUMNS})
            if self._names:
                self.on_finished_on = lambda index, record: tables.write_request(requests, record, self._names[index])
            else:
                self.on_finished = lambda record: tables.write_request(requests, record)
        if files.series_out is not None:
            table = self._table("--series-out", files.series_out, {**first, **tables.SERIES_COLUMNS})
            for index, listeners in enumerate(self._listeners):
                listeners.append(tables.SeriesTable(table, self._names[index] if self._names else None))

    def _open_metrics(self, files: ExportOptions) -> None:
        if files.prometheus_out is not None:
            text = self._file("--prometheus-out", files.prometheus_out)

            def write(report: ReplayReport) -> None:
                snapshots = report.engine_snapshots or ([] if report.snapshot is None else [report.snapshot])
                if snapshots:
                    engines = zip(snapshots, self._labels, self._cache_config, strict=True)
                    text.stream.write(prometheus_text(engines))

            self._finish.append(write)
        if (files.openmetrics_out is None) != (files.openmetrics_start is None):
            raise InputError(
                "--openmetrics-out and --openmetrics-start go together: give the start time of the run in seconds "
                "since 1970; Prometheus drops samples that are older than its retention"
            )
        if files.openmetrics_out is not None and files.openmetrics_start is not None:
            history = self._file("--openmetrics-out", files.openmetrics_out)
            every = [
                OpenMetricsSeries(files.openmetrics_start, labels, config)
                for labels, config in zip(self._labels, self._cache_config, strict=True)
            ]
            for series, listeners in zip(every, self._listeners, strict=True):
                listeners.append(series)
                self._abandon.append(series.close)
            self._finish.append(lambda report: write_openmetrics(every, history.stream))

    def _open_trace(self, name: str) -> None:
        file = TraceEventFile(self._file("--perfetto-out", name))
        for index, listeners in enumerate(self._listeners):
            trace = EngineTrace(file, index, self._names[index] if self._names else "")
            listeners.append(trace)
            self._finish.append(lambda report, trace=trace: trace.finish())
        self._finish.append(lambda report: file.finish())

    def _table(self, option: str, name: str, columns: Mapping[str, Any]) -> tables.TableWriter:
        table = tables.open_table(self._file(option, name), columns)
        self._finish.append(lambda report: table.finish())
        self._abandon.append(table.abandon)
        return table

    def _file(self, option: str, name: str) -> tables.OutputFile:
        place = Path(name).resolve()
        if place in self._taken:
            raise InputError(f"{option} {name} is {self._taken[place]}; give another file")
        self._taken[place] = f"also the file of {option}"
        file = tables.OutputFile(option, name)
        self._files.append(file)
        return file

    def _discard(self) -> None:
        for abandon in self._abandon if self._files else ():
            abandon()
        for file in self._files:
            file.discard()
        self._files.clear()
