"""The service's metrics: their names, labels and gauges."""

from __future__ import annotations

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.pool.messages import Counts
from headrace_sandbox.service.metrics import MOST_KINDS, OTHER, ServiceMetrics


def counts(waiting: int = 0) -> Counts:
    return Counts(waiting=waiting, running=0, leases=0, memory_bytes=0, sandboxes={})


def test_every_name_has_the_prefix_and_counters_end_in_total() -> None:
    types = [
        line.split()[2:]
        for line in ServiceMetrics(counts).exposition().decode().splitlines()
        if line.startswith("# TYPE")
    ]
    assert {kind for _, kind in types} == {"counter", "gauge", "histogram"}
    for name, kind in types:
        assert name.startswith("headrace_sandbox_")
        assert name.endswith("_total") == (kind == "counter")


def test_labels_are_bounded() -> None:
    metrics = ServiceMetrics(counts)
    for number in range(2 * MOST_KINDS):
        with pytest.raises(SandboxFailure), metrics.failures():
            raise SandboxFailure("It broke.", kind=f"kind{number}", retryable=True)
    lines = metrics.exposition().decode().splitlines()
    kinds = [line for line in lines if line.startswith("headrace_sandbox_failures_total{")]
    assert len(kinds) == MOST_KINDS + 1
    assert f'headrace_sandbox_failures_total{{kind="{OTHER}"}} {float(MOST_KINDS)}' in kinds


def test_gauges_are_read_from_the_pool_when_they_are_scraped() -> None:
    waiting = [0]
    metrics = ServiceMetrics(lambda: counts(waiting[0]))
    waiting[0] = 7
    assert "headrace_sandbox_waiting 7.0" in metrics.exposition().decode().splitlines()
