"""Writes metrics of a run under vLLM's names: Prometheus text of its end, and OpenMetrics with timestamps over time.

`promtool tsdb create-blocks-from openmetrics FILE DATA_DIR` imports the latter into a Prometheus server, where
dashboards made for vLLM show the run.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

import attrs

from ...core.errors import InputError, MisuseError
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

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

SCRAPE_INTERVAL_S = 15


class OpenMetricsSeries(RunListener):
    """Takes a snapshot of every metric at the first scheduling decision of each scrape interval, and at the end.

    An idle engine is scraped at the interval itself. The format needs the samples of a series together, so each series
    has a temporary file; memory does not grow with the run.
    """

    def __init__(self, start_unix_s: int, labels: Mapping[str, str], cache_config: Mapping[str, str]) -> None:
        """Start without samples.

        Args:
            start_unix_s: shown time of the start of the run, seconds since 1970.
            labels: of every series except that of the cache's configuration.
            cache_config: labels of `vllm:cache_config_info`.
        """
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
            for reason, lines in self._lines(metric, value, self._timestamp(at_ns)):
                gathered = self._gathered.get((metric.name, reason))
                if gathered is None:
                    gathered = self._gathered[metric.name, reason] = tempfile.TemporaryFile()  # noqa: SIM115
                gathered.write(lines.encode())

    def _lines(self, metric: Metric, value: Any, at: str) -> Iterator[tuple[str, str]]:
        """Yield (reason or "", the lines of one series)."""
        if isinstance(value, HistogramCounts):
            buckets = [
                f'{metric.name}_bucket{{{self._labels},le="{"+Inf" if le == float("inf") else le}"}} {count} {at}\n'
                for le, count in value.buckets
            ]
            count = f"{metric.name}_count{{{self._labels}}} {value.buckets[-1][1]} {at}\n"
            yield "", "".join(buckets) + count + f"{metric.name}_sum{{{self._labels}}} {value.total} {at}\n"
        elif isinstance(value, dict):
            for reason, number in value.items():
                labels = f'{self._labels},{FINISHED_REASON}="{reason}"'
                yield reason, f"{metric.name}_total{{{labels}}} {number} {at}\n"
        else:
            suffix = "_total" if metric.kind == "counter" else ""
            yield "", f"{metric.name}{suffix}{{{self._labels}}} {value} {at}\n"


def write_openmetrics(series: Sequence[OpenMetricsSeries], stream: IO[bytes]) -> None:
    """Write and close the series of one engine, or of several engines with labels that identify them."""
    for one in series:
        one.finish()
    for metric in METRICS:
        stream.write(_header(metric.name, metric.kind, metric.text))
        for one in series:
            one.write_samples(metric, stream)
    stream.write(_header(CACHE_CONFIG_INFO, "gauge", "What the pool is."))
    for one in series:
        one.write_cache_config(stream)
    stream.write(b"# EOF\n")
    for one in series:
        one.close()


def _header(name: str, kind: str, text: str) -> bytes:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n".encode()


def _labels(labels: Mapping[str, str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())


def check_prometheus_client(option: str) -> None:
    """Raise InputError if prometheus_client is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise InputError(
            f"{option} needs prometheus_client, which is not installed; install the extra `sim` (pip install "
            "'kvledger[sim]')"
        ) from None


@attrs.frozen
class EngineMetrics:
    """One engine's metrics, and the labels of its series.

    Attributes:
        snapshot: from `take_snapshot`.
        labels: from `series_labels`.
        cache_config: from `cache_config_labels`.
    """

    snapshot: Snapshot
    labels: Mapping[str, str]
    cache_config: Mapping[str, str]


def prometheus_text(engines: Sequence[EngineMetrics]) -> bytes:
    """The text exposition of one scrape of every engine; all engines have the same label names."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(_families(engines))))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: "list[Family]") -> None:
        self._families = families

    def collect(self) -> "Iterable[Family]":
        """The metric families, for the registry."""
        return self._families


def _families(engines: Sequence[EngineMetrics]) -> "Iterator[Family]":
    from prometheus_client.core import GaugeMetricFamily

    for metric in METRICS:
        yield _family(metric, engines)
    info = GaugeMetricFamily(CACHE_CONFIG_INFO, "What the pool is.", labels=list(engines[0].cache_config))
    for engine in engines:
        info.add_metric(list(engine.cache_config.values()), 1)
    yield info


def _family(metric: Metric, engines: Sequence[EngineMetrics]) -> "Family":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    names = list(engines[0].labels)
    first = engines[0].snapshot[metric.name]
    if isinstance(first, HistogramCounts):
        histogram = HistogramMetricFamily(metric.name, metric.text, labels=names)
        for engine in engines:
            value = engine.snapshot[metric.name]
            buckets = [(floatToGoString(le), count) for le, count in value.buckets]
            histogram.add_metric(list(engine.labels.values()), buckets, value.total)
        return histogram
    if isinstance(first, dict):
        reasons = CounterMetricFamily(metric.name, metric.text, labels=[*names, FINISHED_REASON])
        for engine in engines:
            for reason, number in engine.snapshot[metric.name].items():
                reasons.add_metric([*engine.labels.values(), reason], number)
        return reasons
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.text, labels=names)
    for engine in engines:
        family.add_metric(list(engine.labels.values()), engine.snapshot[metric.name])
    return family
