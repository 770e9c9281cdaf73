"""The files that a replay leaves behind: opened before it starts, written while it runs, in place only when all are."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

from ..core.allocator_config import AllocatorConfig
from ..core.errors import InputError
from .engine_trace import EngineTrace
from .openmetrics_series import OpenMetricsSeries
from .output_file import OutputFile
from .prometheus_text import check_prometheus_client, prometheus_text
from .replay import ReplayReport
from .request_record import RequestRecord
from .run_listener import RunListener
from .run_tables import REQUEST_COLUMNS, SERIES_COLUMNS, RequestTable, SeriesTable
from .table_writer import TableWriter, open_table
from .trace_event_file import TraceEventFile
from .vllm_metrics import cache_config_labels, series_labels


@attrs.frozen(kw_only=True)
class ExportOptions:
    """The files asked for, as typed; None where an option was not given.

    `openmetrics_start` is when the run is to have started in `openmetrics_out`, in seconds since 1970.
    """

    requests_out: str | None = None
    series_out: str | None = None
    prometheus_out: str | None = None
    openmetrics_out: str | None = None
    openmetrics_start: int | None = None
    perfetto_out: str | None = None


class RunExports(AbstractContextManager["RunExports"]):
    """Writes the files of one replay. Leaving it without `publish` leaves every place as it was.

        with RunExports(options, pool.allocator, pool.facts, inputs=[trace]) as exports:
            report = replay(
                ...,
                listeners=exports.listeners,
                on_finished=exports.on_finished,
                macro_steps=exports.macro_steps,
            )
            exports.publish(report)

    Attributes:
        listeners: to be told of the run.
        on_finished: to be given the record of each finished request; None if nothing wants them.
    """

    def __init__(
        self, options: ExportOptions, allocator: AllocatorConfig, facts: Mapping[str, Any], inputs: Iterable[str] = ()
    ) -> None:
        """Open every file.

        Args:
            options: the files.
            allocator: the pool of the run.
            facts: what is known of the pool's model, if it has one.
            inputs: files that are read meanwhile and must not be written over.

        Raises:
            InputError: a file cannot be written, is asked for twice or is an input, or a library is missing.
        """
        self.listeners: list[RunListener] = []
        self.on_finished: Callable[[RequestRecord], None] | None = None
        self._files: list[OutputFile] = []
        self._tables: list[TableWriter] = []
        self._trace: EngineTrace | None = None
        self._prometheus: OutputFile | None = None
        self._openmetrics: OpenMetricsSeries | None = None
        self._labels = series_labels(facts)
        self._cache_config = cache_config_labels(allocator, facts)
        self._taken = {Path(name).resolve(): "read by this run" for name in inputs}
        try:
            self._open_all(options)
        except InputError:
            self._discard()
            raise

    @property
    def macro_steps(self) -> bool:
        """Whether steps may be taken several at once; not where counters are read while the run goes on."""
        return self._openmetrics is None

    def publish(self, report: ReplayReport) -> None:
        """Finish every file, then put them all in their places.

        Raises:
            InputError: the system did not take the bytes, such as on a full disk. No file is put in its place then.
        """
        for table in self._tables:
            table.finish()
        if self._trace is not None:
            self._trace.finish()
        if self._prometheus is not None and report.snapshot is not None:
            self._prometheus.stream.write(prometheus_text(report.snapshot, self._labels, self._cache_config))
        if self._openmetrics is not None:
            self._openmetrics.finish()
        for file in self._files:
            file.close()
        for file in self._files:
            file.publish()
        self._files.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Discard what was not published."""
        self._discard()

    def _open_all(self, options: ExportOptions) -> None:
        if options.requests_out is not None:
            table = self._table("--requests-out", options.requests_out, REQUEST_COLUMNS)
            self.on_finished = RequestTable(table).add
        if options.series_out is not None:
            self.listeners.append(SeriesTable(self._table("--series-out", options.series_out, SERIES_COLUMNS)))
        if options.prometheus_out is not None:
            check_prometheus_client("--prometheus-out")
            self._prometheus = self._file("--prometheus-out", options.prometheus_out)
        if (options.openmetrics_out is None) != (options.openmetrics_start is None):
            raise InputError(
                "--openmetrics-out and --openmetrics-start go together: samples need a time. Give when the run is to "
                "have started, in seconds since 1970; Prometheus drops what is older than its retention"
            )
        if options.openmetrics_out is not None and options.openmetrics_start is not None:
            file = self._file("--openmetrics-out", options.openmetrics_out)
            self._openmetrics = OpenMetricsSeries(file, options.openmetrics_start, self._labels, self._cache_config)
            self.listeners.append(self._openmetrics)
        if options.perfetto_out is not None:
            self._trace = EngineTrace(TraceEventFile(self._file("--perfetto-out", options.perfetto_out)))
            self.listeners.append(self._trace)

    def _table(self, option: str, name: str, columns: Mapping[str, Any]) -> TableWriter:
        table = open_table(self._file(option, name), columns)
        self._tables.append(table)
        return table

    def _file(self, option: str, name: str) -> OutputFile:
        place = Path(name).resolve()
        if place in self._taken:
            raise InputError(f"{option} {name} is {self._taken[place]}; give each its own file")
        self._taken[place] = f"{option}'s file as well"
        file = OutputFile(option, name)
        self._files.append(file)
        return file

    def _discard(self) -> None:
        for table in self._tables if self._files else ():
            table.abandon()
        if self._openmetrics is not None:
            self._openmetrics.close()
        for file in self._files:
            file.discard()
        self._files.clear()
