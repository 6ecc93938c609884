"""The transition of each event."""

from __future__ import annotations

from typing import get_args

import pytest

from headrace.errors import InternalError
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.apply.transition_table import TRANSITIONS
from tests.orchestrator.scheduler.scenarios import busy_harness


def test_every_event_has_a_transition():
    assert TRANSITIONS.keys() == set(get_args(events.AnyEvent))


def test_an_unknown_name_in_an_event_is_an_error_that_names_it(harness):
    harness.run()
    with pytest.raises(InternalError, match="GroupRetired names 'nowhere', which is unknown here"):
        harness.replayed().apply(events.GroupRetired(run="nowhere", group="g", reason="stale"), harness.now)


def test_state_changes_only_by_applying_an_event():
    harness = busy_harness()
    core = harness.replayed()
    before = core.durable()
    core.heartbeat(messages.HeartbeatRequest(worker="w", slots=8), harness.now)
    core.run_status("r", harness.now)
    core.worker_statuses(harness.now)
    core.doing("r", messages.DoingRequest(learner="l", session="s", doing="training"), harness.now)
    assert core.drain() == []
    assert core.durable() == before
