"""Credit after crashes: a restarted scheduler admits no more than one that never crashed.

AReaL's rule: admitted groups are at most ``(max_staleness + 1)`` batches ahead of retired ones. Systems that restart
the count after a recovery submit a burst there.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.harness import Harness, ServedBatch

CRASHES = ["crash", "crash-from-snapshot", "crash-from-old-snapshot"]
STEPS = st.lists(
    st.sampled_from(["work", "work", "lease", "step", "step", "announce", "rewind", "silence", "snapshot", *CRASHES]),
    min_size=5,
    max_size=40,
)


class Crashing:
    """A run, the number of groups that pulls admitted beyond its credit while it was idle, and a snapshot."""

    def __init__(self, **spec: int) -> None:
        self.harness = Harness()
        self.harness.run(**spec)
        self.beyond = 0
        self.snapshot = (self.harness.core.snapshot(), len(self.harness.log))

    def step(self, name: str) -> None:
        harness = self.harness
        now = harness.core.version("r")
        match name:
            case "work":
                harness.work(slots=5)
            case "lease":
                harness.lease(3)
                harness.holding.clear()
            case "step":
                admitted = len(harness.events_of(events.GroupAdmitted))
                reply = harness.pull()
                if isinstance(reply, ServedBatch):
                    harness.ack(reply, f"{now.lineage}.{now.n + 1}")
                else:
                    self.beyond += len(harness.events_of(events.GroupAdmitted)) - admitted
            case "announce":
                harness.announce(f"{now.lineage}.{now.n + 1}")
            case "rewind":
                harness.rewind(f"{now.lineage}.{max(0, now.n - 1)}" if now.n else str(now))
            case "silence":
                harness.advance(70.0)
            case "snapshot":
                self.snapshot = (harness.core.snapshot(), len(harness.log))
            case _:
                self.crash(name)

    def crash(self, name: str) -> None:
        """Crash and restart, with requests of workers that have far more slots than the credit allows."""
        harness = self.harness
        before = harness.status()
        begun = len(harness.log)
        if name == "crash":
            harness.restart()
        elif name == "crash-from-snapshot":
            harness.restart(harness.restored(harness.core.snapshot()))
        else:
            harness.restart(harness.restored(*self.snapshot))
        harness.holding.clear()
        granted = harness.lease(10_000, f"hungry since {begun}", slots=10_000)
        harness.holding.clear()
        assert len(granted) <= before.queued
        assert harness.events_of(events.GroupAdmitted, begun) == []
        assert harness.status().in_flight == before.in_flight


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    steps=STEPS,
    group_size=st.integers(1, 3),
    batch_groups=st.integers(1, 3),
    max_staleness=st.integers(0, 3),
)
def test_credit_in_flight_never_exceeds_the_ledger_however_often_the_scheduler_starts_again(
    steps, group_size, batch_groups, max_staleness
):
    batch_size = group_size * batch_groups
    crashing = Crashing(group_size=group_size, batch_size=batch_size, max_staleness=max_staleness, attempt_lease_s=30)
    harness = crashing.harness
    for step in steps:
        crashing.step(step)
        retired = len(harness.retired())
        admitted = len(harness.events_of(events.GroupAdmitted))
        assert admitted - retired == harness.status().in_flight
        assert admitted - retired <= (max_staleness + 1) * batch_groups + crashing.beyond


@pytest.mark.parametrize("how", ["replay", "snapshot"])
def test_a_learner_goes_back_to_a_checkpoint_after_a_crash(how):
    """Groups with rows above the checkpoint are retired, the others are served, acked ones stay acked."""
    harness = Harness()
    harness.run(group_size=1, batch_size=2, max_staleness=3, attempt_lease_s=30)
    play(harness, 2)
    acked = harness.batch()
    harness.ack(acked, "0.1")
    checkpoint = play(harness, 3)
    harness.announce("0.2")
    above = play(harness, 1)
    leased = harness.batch()
    harness.announce("0.3")
    above += play(harness, 2)
    begun, admitted = len(harness.log), len(harness.events_of(events.GroupAdmitted))
    harness.restart(harness.restored(harness.core.snapshot()) if how == "snapshot" else None)
    harness.rewind("0.1")
    assert harness.retired(begun) == dict.fromkeys(above, "rewound")
    assert len(harness.events_of(events.GroupAdmitted)) == admitted + len(above)  # their credit, and no more
    again = harness.batch("a new session")
    assert (again.id, again.groups) == (leased.id, checkpoint[:2])
    harness.ack(again, "1.2")
    harness.work()
    served = harness.batch("a new session").groups
    assert served[0] == checkpoint[2]
    assert not set(served) & {*above, *acked.groups}


def play(harness: Harness, count: int) -> list[str]:
    """End some groups of one episode each; returns their ids."""
    attempts = harness.lease(count)
    for attempt in attempts:
        harness.finish(attempt)
    return [attempt.group for attempt in attempts]
