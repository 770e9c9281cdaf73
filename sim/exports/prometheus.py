"""Writes metrics of a run under vLLM's names: Prometheus text of its end, and OpenMetrics with timestamps over time.

`promtool tsdb create-blocks-from openmetrics FILE DATA_DIR` imports the latter into a Prometheus server, where
dashboards made for vLLM show the run.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

from ...core.errors import MisuseError
from ...core.scheduler.scheduler import Scheduler
from ..engine.distributions import NANOSECONDS
from ..engine.engine import RunListener
from ..engine.metrics import Recorder
from ..engine.vllm_metrics import (
    CACHE_CONFIG_INFO,
    FINISHED_REASON,
    METRICS,
    HistogramCounts,
    Metric,
    Snapshot,
    take_snapshot,
)

SCRAPE_INTERVAL_S = 15


class OpenMetricsSeries(RunListener):
    """Takes a snapshot of every metric at the first scheduling decision of each scrape interval, and at the end.

    An idle engine is scraped at the interval itself. The format needs the samples of a series together, so each series
    has a temporary file; memory does not grow with the run.
    """

    def __init__(self, start_unix_s: int, labels: Mapping[str, str], cache_config: Mapping[str, str]) -> None:
        """Start without samples; `vllm:cache_config_info` has the labels `cache_config`, all others `labels`."""
        self._start_ns = start_unix_s * NANOSECONDS
        self._labels = _labels(labels)
        self._cache_config = _labels(cache_config)
        self._due_ns = self._now_ns = 0
        self._last_ns = -1
        self._at_rest: Snapshot | None = None
        self._recorder: Recorder | None = None
        self._scheduler: Scheduler | None = None
        # Keyed by metric, and by reason for a metric that is counted by reason.
        self._gathered: dict[tuple[str, str], IO[bytes]] = {}

    def started(self, recorder: Recorder) -> None:
        """Keep the recorder to read from."""
        self._recorder = recorder

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """Scrape if the interval is over."""
        self._scheduler, self._now_ns = scheduler, now_ns
        interval_ns = SCRAPE_INTERVAL_S * NANOSECONDS
        while self._at_rest is not None and self._due_ns < now_ns:
            self._add(self._due_ns, self._at_rest)
            self._due_ns += interval_ns
        self._at_rest = None
        if now_ns >= self._due_ns:
            self._add(now_ns, self._snapshot())
            self._due_ns = (now_ns // interval_ns + 1) * interval_ns
        if not scheduler.has_unfinished:
            self._at_rest = self._snapshot()

    def finish(self) -> None:
        """Scrape at the end of the run."""
        if self._now_ns > self._last_ns:
            self._add(self._now_ns, self._snapshot())

    def write_samples(self, metric: Metric, stream: IO[bytes]) -> None:
        """Write the samples of one metric."""
        for (name, _), gathered in self._gathered.items():
            if name == metric.name:
                gathered.seek(0)
                shutil.copyfileobj(gathered, stream)

    def write_cache_config(self, stream: IO[bytes]) -> None:
        """Write the configuration of the pool, at the start and at the end."""
        for at_ns in sorted({0, self._last_ns}):
            stream.write(f"{CACHE_CONFIG_INFO}{{{self._cache_config}}} 1 {self._timestamp(at_ns)}\n".encode())

    def close(self) -> None:
        """Delete the temporary files."""
        for gathered in self._gathered.values():
            gathered.close()
        self._gathered.clear()

    def _snapshot(self) -> Snapshot:
        if self._recorder is None or self._scheduler is None:
            raise MisuseError("no run has started, so there are no metrics")
        return take_snapshot(self._scheduler, self._recorder)

    def _timestamp(self, at_ns: int) -> str:
        seconds, rest = divmod(self._start_ns + at_ns, NANOSECONDS)
        return f"{seconds}.{rest:09d}"

    def _add(self, at_ns: int, snapshot: Snapshot) -> None:
        self._last_ns = at_ns
        for metric in METRICS:
            value = snapshot[metric.name]
            for reason, lines in _lines(metric, value, self._labels, f" {self._timestamp(at_ns)}"):
                gathered = self._gathered.get((metric.name, reason))
                if gathered is None:
                    gathered = self._gathered[metric.name, reason] = tempfile.TemporaryFile()  # noqa: SIM115
                gathered.write(lines.encode())


def _lines(metric: Metric, value: Any, labels: str, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield (reason or "", the lines of one series); `at` is a time stamp behind a space."""
    if isinstance(value, HistogramCounts):
        lines = [
            f'{metric.name}_bucket{{{labels},le="{"+Inf" if le == float("inf") else le}"}} {count}{at}\n'
            for le, count in value.buckets
        ]
        lines.append(f"{metric.name}_count{{{labels}}} {value.buckets[-1][1]}{at}\n")
        yield "", "".join([*lines, f"{metric.name}_sum{{{labels}}} {value.total}{at}\n"])
    elif isinstance(value, dict):
        for reason, number in value.items():
            yield reason, f'{metric.name}_total{{{labels},{FINISHED_REASON}="{reason}"}} {number}{at}\n'
    else:
        suffix = "_total" if metric.kind == "counter" else ""
        yield "", f"{metric.name}{suffix}{{{labels}}} {value}{at}\n"


def write_openmetrics(series: Sequence[OpenMetricsSeries], stream: IO[bytes]) -> None:
    """Write and close the series of one engine, or of several engines with labels that identify them."""
    for one in series:
        one.finish()
    for metric in METRICS:
        stream.write(_header(metric.name, metric.kind, metric.text).encode())
        for one in series:
            one.write_samples(metric, stream)
    stream.write(_header(CACHE_CONFIG_INFO, "gauge", "What the pool is.").encode())
    for one in series:
        one.write_cache_config(stream)
    stream.write(b"# EOF\n")
    for one in series:
        one.close()


def _header(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


def prometheus_text(engines: Iterable[tuple[Snapshot, Mapping[str, str], Mapping[str, str]]]) -> bytes:
    """The text exposition of one scrape: each engine's snapshot, the labels of its series, and those of its cache."""
    scraped = [(snapshot, _labels(labels), _labels(cache_config)) for snapshot, labels, cache_config in engines]
    out: list[str] = []
    for metric in METRICS:
        out.append(_header(metric.name + ("_total" if metric.kind == "counter" else ""), metric.kind, metric.text))
        out += [lines for one, labels, _ in scraped for _, lines in _lines(metric, one[metric.name], labels)]
    out.append(_header(CACHE_CONFIG_INFO, "gauge", "What the pool is."))
    out += [f"{CACHE_CONFIG_INFO}{{{cache_config}}} 1\n" for _, _, cache_config in scraped]
    return "".join(out).encode()
