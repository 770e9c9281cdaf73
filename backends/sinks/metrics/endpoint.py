"""Serves figures over HTTP for Prometheus, reading them from their source at each scrape."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, Protocol

import attrs
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from ....core.errors import InputError


@attrs.frozen
class Figure:
    """One metric value."""

    # vLLM's name if it means the same, else a name that begins with "kvledger:"; without a counter's "_total".
    name: str
    kind: Literal["gauge", "counter"]  # the metric's type for Prometheus
    text: str  # the help text, with the unit
    value: float  # the value now; NaN omits the figure
    labels: Mapping[str, str] = attrs.field(factory=dict)  # labels that distinguish it from others with the same name


class HasFigures(Protocol):
    """A source of figures: `LedgerMetrics`, `ServingMetrics` or the ledger behind `kvledger follow`."""

    def figures(self) -> Iterable[Figure]:
        """Return the figures now."""
        ...


class FigureCollector:
    """Reads the figures of one source whenever a registry is scraped."""

    def __init__(self, source: HasFigures, labels: Mapping[str, str]) -> None:
        self._source = source
        self._labels = labels

    def collect(self) -> Iterator[Family]:
        """Yield the figures now, one family for each name."""
        by_name: dict[str, list[Figure]] = {}
        for figure in self._source.figures():
            if not math.isnan(figure.value):
                by_name.setdefault(figure.name, []).append(figure)
        for name, figures in by_name.items():
            labels = sorted({*self._labels, *(label for each in figures for label in each.labels)})
            family_of: Callable[..., Family] = (
                CounterMetricFamily if figures[0].kind == "counter" else GaugeMetricFamily
            )
            family = family_of(name, figures[0].text, labels=labels)
            for each in figures:
                values = {**self._labels, **each.labels}
                family.add_metric([values.get(label, "") for label in labels], each.value)
            yield family


class PrometheusEndpoint:
    """`http://HOST:PORT/metrics` for one source of figures.

    Attributes:
        port: where it listens.
    """

    def __init__(
        self, source: HasFigures, port: int, host: str = "127.0.0.1", labels: Mapping[str, str] | None = None
    ) -> None:
        """Start serving; port 0 takes a free one. Raises InputError if the port is taken."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(FigureCollector(source, dict(labels or {})))  # pyright: ignore[reportArgumentType]
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InputError(f"cannot serve metrics on {host}:{port}: {error.strerror}") from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "PrometheusEndpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
