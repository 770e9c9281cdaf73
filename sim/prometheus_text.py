"""A run as Prometheus text under vLLM's metric names, so that what reads a vLLM server reads a simulated one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

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


def prometheus_text(snapshot: Snapshot, labels: Mapping[str, str], cache_config: Mapping[str, str]) -> bytes:
    """The text exposition of a snapshot, as of one scrape.

    Args:
        snapshot: from `take_snapshot`.
        labels: from `series_labels`.
        cache_config: from `cache_config_labels`.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(_families(snapshot, labels, cache_config))))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: "list[Family]") -> None:
        self._families = families

    def collect(self) -> "Iterable[Family]":
        """What the registry writes."""
        return self._families


def _families(snapshot: Snapshot, labels: Mapping[str, str], cache_config: Mapping[str, str]) -> "Iterator[Family]":
    from prometheus_client.core import GaugeMetricFamily

    for metric in METRICS:
        yield _family(metric, snapshot[metric.name], labels)
    info = GaugeMetricFamily(CACHE_CONFIG_INFO, "What the pool is.", labels=list(cache_config))
    info.add_metric(list(cache_config.values()), 1)
    yield info


def _family(metric: Metric, value: Any, labels: Mapping[str, str]) -> "Family":
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    names, values = list(labels), list(labels.values())
    if isinstance(value, HistogramCounts):
        family = HistogramMetricFamily(metric.name, metric.text, labels=names)
        family.add_metric(values, [(floatToGoString(le), count) for le, count in value.buckets], value.total)
    elif isinstance(value, dict):
        family = CounterMetricFamily(metric.name, metric.text, labels=[*names, FINISHED_REASON])
        for reason, number in value.items():
            family.add_metric([*values, reason], number)
    elif metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.text, labels=names)
        family.add_metric(values, value)
    else:
        family = GaugeMetricFamily(metric.name, metric.text, labels=names)
        family.add_metric(values, value)
    return family
