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
from .engine_trace import EngineTrace, TraceEventFile
from .prometheus import OpenMetricsSeries, prometheus_text, write_openmetrics
from .tables import (
    ENGINE_COLUMN,
    REQUEST_COLUMNS,
    SERIES_COLUMNS,
    OutputFile,
    SeriesTable,
    TableWriter,
    open_table,
    write_request,
)


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
    """

    def __init__(
        self,
        files: ExportOptions,
        allocator: AllocatorConfig,
        facts: Mapping[str, Any],
        inputs: Iterable[str] = (),
        engines: Sequence[EngineName] = (),
    ) -> None:
        """Open every file.

        Args:
            files: the files to write.
            allocator: the pool of the run.
            facts: facts of the pool's model, if it has one.
            inputs: files that the run reads and that must not be overwritten.
            engines: names of a fleet's engines; empty for a single engine.

        Raises:
            InputError: a file cannot be written, is given twice or is an input, or a library is missing.
        """
        self.on_finished: Callable[[RequestRecord], None] | None = None
        self.on_finished_on: Callable[[int, RequestRecord], None] | None = None
        self._engines = tuple(engines)
        self._listeners: list[list[RunListener]] = [[] for _ in engines or (None,)]
        self._files: list[OutputFile] = []
        self._tables: list[TableWriter] = []
        self._trace_file: TraceEventFile | None = None
        self._traces: list[EngineTrace] = []
        self._prometheus: OutputFile | None = None
        self._openmetrics: list[OpenMetricsSeries] = []
        self._openmetrics_file: OutputFile | None = None
        of_engine = [name.labels() for name in engines]
        self._labels = [series_labels(facts, labels) for labels in of_engine] or [series_labels(facts)]
        self._cache_config = [cache_config_labels(allocator, facts, labels) for labels in of_engine] or [
            cache_config_labels(allocator, facts)
        ]
        self._taken = {Path(name).resolve(): "an input of this run" for name in inputs}
        try:
            self._open_all(files)
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

    @property
    def macro_steps(self) -> bool:
        """Whether several steps may run at once; False if counters are read during the run."""
        return not self._openmetrics

    @property
    def histograms(self) -> bool:
        """Whether engines must count the histograms of vLLM's metrics."""
        return self._prometheus is not None or bool(self._openmetrics)

    def publish(self, report: ReplayReport) -> None:
        """Finish every file, then put all of them in place.

        Raises InputError: a write failed, such as on a full disk; then no file is put in place.
        """
        for table in self._tables:
            table.finish()
        for trace in self._traces:
            trace.finish()
        if self._trace_file is not None:
            self._trace_file.finish()
        snapshots = report.engine_snapshots or ([] if report.snapshot is None else [report.snapshot])
        if self._prometheus is not None and snapshots:
            metrics = zip(snapshots, self._labels, self._cache_config, strict=True)
            self._prometheus.stream.write(prometheus_text(metrics))
        if self._openmetrics_file is not None:
            write_openmetrics(self._openmetrics, self._openmetrics_file.stream)
        for file in self._files:
            file.close()
        for file in self._files:
            file.publish()
        self._files.clear()

    def __exit__(self, *_: object) -> None:
        """Discard the files unless they were published."""
        self._discard()

    def _open_all(self, files: ExportOptions) -> None:
        self._open_tables(files)
        if files.prometheus_out is not None:
            self._prometheus = self._file("--prometheus-out", files.prometheus_out)
        if (files.openmetrics_out is None) != (files.openmetrics_start is None):
            raise InputError(
                "--openmetrics-out and --openmetrics-start go together: give the start time of the run in seconds "
                "since 1970; Prometheus drops samples that are older than its retention"
            )
        if files.openmetrics_out is not None and files.openmetrics_start is not None:
            self._openmetrics_file = self._file("--openmetrics-out", files.openmetrics_out)
            for labels, config, listeners in zip(self._labels, self._cache_config, self._listeners, strict=True):
                series = OpenMetricsSeries(files.openmetrics_start, labels, config)
                self._openmetrics.append(series)
                listeners.append(series)
        if files.perfetto_out is not None:
            self._trace_file = TraceEventFile(self._file("--perfetto-out", files.perfetto_out))
            for index, listeners in enumerate(self._listeners):
                name = str(self._engines[index]) if self._engines else ""
                trace = EngineTrace(self._trace_file, index, name)
                self._traces.append(trace)
                listeners.append(trace)

    def _open_tables(self, files: ExportOptions) -> None:
        first = ENGINE_COLUMN if self._engines else {}
        if files.requests_out is not None:
            requests = self._table("--requests-out", files.requests_out, {**first, **REQUEST_COLUMNS})
            if self._engines:
                names = [str(name) for name in self._engines]
                self.on_finished_on = lambda index, record: write_request(requests, record, names[index])
            else:
                self.on_finished = lambda record: write_request(requests, record)
        if files.series_out is not None:
            table = self._table("--series-out", files.series_out, {**first, **SERIES_COLUMNS})
            for index, listeners in enumerate(self._listeners):
                listeners.append(SeriesTable(table, str(self._engines[index]) if self._engines else None))

    def _table(self, option: str, name: str, columns: Mapping[str, Any]) -> TableWriter:
        table = open_table(self._file(option, name), columns)
        self._tables.append(table)
        return table

    def _file(self, option: str, name: str) -> OutputFile:
        place = Path(name).resolve()
        if place in self._taken:
            raise InputError(f"{option} {name} is {self._taken[place]}; give another file")
        self._taken[place] = f"also the file of {option}"
        file = OutputFile(option, name)
        self._files.append(file)
        return file

    def _discard(self) -> None:
        for table in self._tables if self._files else ():
            table.abandon()
        for series in self._openmetrics:
            series.close()
        for file in self._files:
            file.discard()
        self._files.clear()
