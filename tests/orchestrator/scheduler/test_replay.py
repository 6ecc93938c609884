"""Logs that were cut, or lost one event."""

from __future__ import annotations

from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import version


def test_after_a_replay_changes_that_a_cut_log_left_unfinished_are_completed(harness):
    harness.run(group_size=2, batch_size=2, max_staleness=0, attempt_lease_s=30)
    harness.lease(1)
    harness.announce("0.1")
    harness.work()
    harness.ack(harness.batch(), "0.2")
    log = list(harness.log)
    for end in range(1, len(log)):
        core = harness.replayed(log[:end])
        core.tick(harness.now)
        core.check()


def test_a_lost_result_costs_only_itself(harness):
    harness.run(group_size=2, batch_size=4, max_staleness=1, retries={"max_attempts": 9})
    for number in range(1, 6):
        attempts = harness.lease(8)
        harness.finish(attempts[0], "failed")
        for attempt in attempts[1:]:
            harness.finish(attempt)
        harness.work()
        harness.ack(harness.batch(), f"0.{number}")
    log = list(harness.log)
    for lost, event in enumerate(log):
        if isinstance(event, events.EpisodeEnded):
            core = harness.replayed(log[:lost] + log[lost + 1 :])
            core.tick(harness.now)
            core.check()
            core.tick(harness.now + 40.0)
            core.check()
            assert core.version("r") == version("0.5")


def test_a_lost_batch_definition_costs_only_itself(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.ack(harness.batch(), "0.1")
    core = harness._scheduler()
    for event in harness.log:
        if isinstance(event, events.BatchFormed | events.BatchLeased):
            continue
        core.apply(event, harness.now)
    core.tick(harness.now)
    core.check()
    assert core.version("r") == version("0.1")
    assert core.run_status("r", harness.now).groups.retired == {"acked": 2}
