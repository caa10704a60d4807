"""What is counted, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The numbers of one server.

    >>> metrics = Metrics()
    >>> metrics.observe_request("GET", "/healthz", 200, 0.01)
    >>> line = b'qkv_requests_total{method="GET",route="/healthz",status="200"} 1.0'
    >>> line in metrics.render_text()
    True
    """

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        labels = ("method", "route")
        self._requests = Counter(
            "qkv_requests", "Requests answered.", (*labels, "status"), registry=own
        )
        self._seconds = Histogram(
            "qkv_request_seconds", "Time until a request was answered.", labels, registry=own
        )
        self._batches = Histogram(
            "qkv_batch_queries",
            "Queries that were answered together.",
            ("database",),
            buckets=BATCH_BUCKETS,
            registry=own,
        )
        self.open_requests = Gauge(
            "qkv_requests_open", "Requests that are being answered.", registry=own
        )

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def batch_observer(self, database: str) -> Callable[[int], None]:
        """What a database's batches are counted by."""
        observe: Callable[[int], None] = self._batches.labels(database).observe
        return observe

    def render_text(self) -> bytes:
        return generate_latest(self._registry)
