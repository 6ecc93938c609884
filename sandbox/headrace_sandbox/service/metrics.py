"""Metrics of the service, for Prometheus.

* Every name begins with ``headrace_sandbox_`` and contains its unit; counters end in ``_total``.
* Labels are bounded: routes by template, endings and kinds of failures by a list of known ones. Owners are not labels.
* Gauges are read from the pool when they are scraped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.errors import SandboxFailure
from headrace_sandbox.pool.messages import Counts
from headrace_sandbox.result import ExecResult

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

MOST_KINDS = 100
"""Kinds of failures with a label of their own: a third-party runtime may invent any number."""

OTHER = "other"


class ServiceMetrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._registry = CollectorRegistry()
        self._kinds: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"headrace_sandbox_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"headrace_sandbox_{name}", text, buckets=BUCKETS_S, registry=self._registry)

        self._executions = counter("executions", "Executions that ended, by kind of end.", "ending")
        self._failures = counter("failures", "Requests that failed without a fault of the program, by kind.", "kind")
        self._requests = counter("http_requests", "HTTP requests, by route template.", "route", "status")
        self._queue = histogram("queue_seconds", "Time that a request waited for its turn.")
        self._start = histogram("start_seconds", "Time in which a sandbox was made for a request.")
        self._wall = histogram("wall_seconds", "Time that programs ran.")
        self._answer = histogram("http_request_seconds", "Time to answer.")
        self._registry.register(_PoolCollector(counts))

    def ended(self, result: ExecResult) -> None:
        """Count the result of an execution."""
        ending = "lost" if result.lost is not None else result.limit if result.fault == "limit" else result.fault
        self._executions.labels(ending or "ok").inc()
        self._queue.observe(result.queue_s)
        self._start.observe(result.start_s)
        self._wall.observe(result.wall_s)

    def leased(self, queue_s: float, start_s: float) -> None:
        """Count a lease."""
        self._queue.observe(queue_s)
        self._start.observe(start_s)

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Count failures of the enclosed block."""
        try:
            yield
        except SandboxFailure as failure:
            self._failures.labels(self._kind(failure.kind)).inc()
            raise

    def answered(self, route: str, status: int, duration_s: float) -> None:
        """Count a request."""
        self._requests.labels(route, status).inc()
        self._answer.observe(duration_s)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def _kind(self, kind: str) -> str:
        if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
            return OTHER
        self._kinds.add(kind)
        return kind


class _PoolCollector(Collector):
    """Gauges of the pool, read at each scrape."""

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        counts = self._counts()
        for name, text, value in (
            ("waiting", "Requests that wait.", counts.waiting),
            ("running", "Executions that run, beside those in leased sandboxes.", counts.running),
            ("leases", "Sandboxes that are leased.", counts.leases),
            ("memory_bytes", "Sum of the memory limits of what runs and of all sandboxes.", counts.memory_bytes),
        ):
            yield GaugeMetricFamily(f"headrace_sandbox_{name}", text, value=value)
        family = GaugeMetricFamily("headrace_sandbox_sandboxes", "Sandboxes, by state.", labels=["state"])
        for state, count in counts.sandboxes.items():
            family.add_metric([state], count)
        yield family
