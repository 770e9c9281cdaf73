"""A run as Prometheus text under vLLM's metric names, so that what reads a vLLM server reads a simulated one."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.allocator_config import AllocatorConfig
from ..core.errors import InputError
from .vllm_metrics import FINISHED_REASON, METRICS, HistogramCounts, Metric, Snapshot

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

MODEL_NAME_WITHOUT_MODEL = "simulated"
_ENGINE = "0"


def check_prometheus_client(option: str) -> None:
    """Raises InputError where the library that writes the text is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise InputError(
            f"{option} needs prometheus_client, which is not installed; install the extra `sim` (pip install "
            "'kvledger[sim]')"
        ) from None


def cache_config_labels(config: AllocatorConfig, assumptions: Mapping[str, Any]) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` that a simulation knows, spelled as vLLM does.

    With groups of several block sizes, `block_size` is the one that hits are multiples of.
    """
    labels = {
        "block_size": str(config.scheduler_block_size),
        "enable_prefix_caching": str(config.enable_caching),
        "num_gpu_blocks": str(config.num_blocks),
    }
    if "model" in assumptions:
        labels["cache_dtype"] = str(assumptions["kv_cache_dtype"])
        labels["gpu_memory_utilization"] = str(assumptions["gpu_memory_utilization"])
    return labels


def prometheus_text(snapshot: Snapshot, cache_config: Mapping[str, str], model_name: str | None) -> bytes:
    """The text exposition of a snapshot, as of one scrape.

    Args:
        snapshot: from `take_snapshot`.
        cache_config: from `cache_config_labels`.
        model_name: the label that dashboards select by; None: "simulated".
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(list(_families(snapshot, cache_config, model_name or MODEL_NAME_WITHOUT_MODEL))))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: "list[Family]") -> None:
        self._families = families

    def collect(self) -> "Iterable[Family]":
        """What the registry writes."""
        return self._families


def _families(snapshot: Snapshot, cache_config: Mapping[str, str], model_name: str) -> "Iterator[Family]":
    from prometheus_client.core import GaugeMetricFamily

    labels = {"engine": _ENGINE, "model_name": model_name}
    for metric in METRICS:
        yield _family(metric, snapshot[metric.name], labels)
    info = GaugeMetricFamily("vllm:cache_config_info", "What the pool is.", labels=["engine", *cache_config])
    info.add_metric([_ENGINE, *cache_config.values()], 1)
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
