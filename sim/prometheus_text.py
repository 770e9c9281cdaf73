"""A run as Prometheus text under vLLM's metric names, so that what reads a vLLM server reads a simulated one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from ..core.errors import InputError
from .vllm_metrics import CACHE_CONFIG_INFO, FINISHED_REASON, METRICS, HistogramCounts, Metric, Snapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


def check_prometheus_client(option: str) -> None:
    """Raises InputError where the library that writes the text is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise InputError(
            f"{option} needs prometheus_client, which is not installed; install the extra `sim` (pip install "
            "'kvledger[sim]')"
        ) from None


@attrs.frozen
class EngineMetrics:
    """What one engine's metrics stood at, and what tells its series from those of others.

    Attributes:
        snapshot: from `take_snapshot`.
        labels: from `series_labels`.
        cache_config: from `cache_config_labels`.
    """

    snapshot: Snapshot
    labels: Mapping[str, str]
    cache_config: Mapping[str, str]


def prometheus_text(engines: Sequence[EngineMetrics]) -> bytes:
    """The text exposition of one scrape of every engine. All of them have the same names of labels."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(_families(engines))))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: "list[Family]") -> None:
        self._families = families

    def collect(self) -> "Iterable[Family]":
        """What the registry writes."""
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
