"""Metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The counters and histograms of one server, for Prometheus.

    >>> metrics = Metrics()
    >>> metrics.observe_request("GET", "/healthz", 200, 0.01)
    >>> line = b'qkv_requests_total{method="GET",route="/healthz",status="200"} 1.0'
    >>> line in metrics.render_text()
    True
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("method", "route")
        self._requests = Counter(
            "qkv_requests", "Requests answered.", (*labels, "status"), registry=registry
        )
        self._seconds = Histogram(
            "qkv_request_seconds", "Seconds per request.", labels, registry=registry
        )
        self._batches = Histogram(
            "qkv_batch_queries",
            "Queries answered in one batch.",
            ("database",),
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self.open_requests = Gauge("qkv_requests_open", "Requests in progress.", registry=registry)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is the path of the route, `seconds` the duration."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def batch_observer(self, database: str) -> Callable[[int], None]:
        """Return the function that records the number of queries in each batch of a database."""
        observe: Callable[[int], None] = self._batches.labels(database).observe
        return observe

    def render_text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
