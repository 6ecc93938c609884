"""The state of one policy server."""

from __future__ import annotations

import pytest

from headrace.trajectory import Version
from headrace_orchestrator.policy_servers.server_state import (
    CallProblem,
    ProbeResult,
    WatchedServer,
    retry_delay_s,
)


def probed(weights: str, *, run: str = "math", problem: str = "") -> WatchedServer:
    server = WatchedServer("http://127.0.0.1:8000", run)
    server.last_probe = ProbeResult(problem, weights)
    return server


def test_the_version_of_a_server_is_the_one_that_it_confirmed_last_and_otherwise_unknown():
    server = WatchedServer("http://127.0.0.1:8000", "math")
    assert (server.up, server.version) == (False, None)
    server.last_probe = ProbeResult(weights="math@0.3")
    assert (server.up, server.version, server.weights_known) == (True, Version(0, 3), True)
    server.last_probe = ProbeResult(weights="math@0.3 -> math@0.4")
    assert (server.version, server.weights_known) == (None, False)
    assert probed("math@0.3", problem="it did not answer").version is None


@pytest.mark.parametrize("weights", ["other@0.3", "other@9.9"])
def test_weights_of_another_run_are_not_a_version_of_this_run_whatever_their_number(weights: str):
    server = probed(weights)
    assert (server.version, server.weights_known) == (None, True)


def test_the_paused_time_is_a_sum_that_includes_the_current_pause():
    server = probed("math@0.3")
    server.set_paused(True, 10.0)
    server.set_paused(True, 11.0)
    assert (server.paused_at, server.status(12.0).paused_s) == (10.0, 2.0)
    server.set_paused(False, 13.0)
    assert (server.paused_at, server.status(50.0).paused_s) == (None, 3.0)
    server.set_paused(True, 60.0)
    assert server.status(61.0).paused_s == 4.0


def test_the_delay_before_the_next_attempt_doubles_with_each_consecutive_failure_up_to_a_bound():
    server = probed("math@0.3")
    delays = []
    for _ in range(7):
        server.record_failure(CallProblem("timeout", "no answer"), 100.0)
        delays.append(server.retry_at - 100.0)
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert retry_delay_s(5_000) == 30.0, "hours of failures do not overflow"
    server.reset_failures()
    server.record_failure(CallProblem("timeout", "no answer"), 200.0)
    assert server.retry_at == 201.0
