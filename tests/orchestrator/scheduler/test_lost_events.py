"""Logs that lost events."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InternalError, RequestError
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from tests.orchestrator.scheduler.commanded import CommandedScheduler
from tests.orchestrator.scheduler.harness import BROKEN, FLAKY, Harness, ServedBatch, version


@cache
def history(seed: int) -> Harness:
    """A run with nearly every kind of event."""
    draw = random.Random(seed)
    harness = Harness(checked=False)
    harness.run(
        group_size=2,
        batch_size=4,
        max_staleness=draw.randrange(3),
        max_uses=draw.choice([1, 1, 2]),
        attempt_lease_s=30,
        batch_lease_s=60,
        short_groups=draw.choice(["top_up", "serve"]),
        retries={"max_attempts": 2, "quarantine_after": 2},
    )
    harness.evaluate(2, deadline_s=80.0)
    harness.submit("g0", "g1")
    session = 0
    for step in range(24):
        worker = draw.choice(["w0", "w1"])
        for attempt in harness.lease(draw.randrange(1, 8), worker, slots=8):
            how = draw.choice(["finished"] * 6 + ["failed", "flaky", "held", "back"])
            if how == "back":
                harness.hand_back([attempt], worker)
            elif how == "flaky":
                harness.finish(attempt, "failed", worker, failure=FLAKY)
            elif how == "failed":
                harness.finish(attempt, "failed", worker, failure=BROKEN)
            elif how == "finished":
                low = version(attempt.pinned_version) if attempt.pinned_version else harness.core.version("r")
                harness.finish(attempt, worker=worker, low=low)
        session += draw.random() < 0.4
        reply = pull_some(harness, f"s{session}", draw)
        now = harness.core.version("r")
        if isinstance(reply, ServedBatch) and draw.random() < 0.7:
            harness.ack(reply, f"{now.lineage}.{now.n + 1}")
        elif draw.random() < 0.2:
            harness.rewind(f"{now.lineage}.{now.n}")
        if draw.random() < 0.3:
            harness.holding.pop(worker, None)
            harness.advance(35.0)
        if step == 16:
            harness.core.drain_worker("w1", harness.now)
            harness.settle()
    return harness


def pull_some(harness: Harness, session: str, draw: random.Random) -> ServedBatch | messages.EmptyReply:
    """A pull of one learner, as one process or as two ranks."""
    if draw.random() < 0.2:
        harness.resume(session)
    if draw.random() < 0.7:
        return harness.pull(session)
    name = f"both {draw.randrange(1 << 30)}"
    harness.pull(session, name, shard=0, shards=2)
    return harness.pull(session, name, shard=1, shards=2)


def replay(harness: Harness, log: list[events.AnyEvent]) -> CommandedScheduler:
    """Apply the events of a log that fit, as a restart does."""
    core = harness._scheduler()
    refused = 0
    for event in log:
        try:
            core.apply(event, harness.now)
        except InternalError:
            refused += 1
    assert refused < len(log)
    return core


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 39), lost=st.lists(st.integers(0, 1 << 16), min_size=1, max_size=12))
def test_after_any_loss_of_events_the_counts_stay_right_and_the_run_goes_on(seed, lost):
    harness = history(seed)
    missing = {1 + index % (len(harness.log) - 1) for index in lost}  # the run itself stays
    log = [event for place, event in enumerate(harness.log) if place not in missing]
    driven = Harness()
    driven.events_by_run = None
    driven.now = harness.now
    driven._ids = iter(range(1 << 20, 1 << 30))
    driven.core = replay(driven, log)
    driven.log = log
    driven.core.tick(driven.now)
    driven.settle()
    ledger = driven.core.durable()["runs"]["r"]["ledger"]
    assert min(ledger[:3]) >= 0
    assert_goes_on(driven)


def assert_goes_on(harness: Harness) -> None:
    """Assert that new workers and a new learner get a batch within a few rounds, and that the invariants hold."""
    for round_ in range(40):
        for attempt in harness.lease(16, f"fresh{round_}"):
            low = version(attempt.pinned_version) if attempt.pinned_version else harness.core.version("r")
            try:
                harness.finish(attempt, worker=f"fresh{round_}", low=low)
            except RequestError:
                harness.hand_back([attempt], f"fresh{round_}")
        reply = harness.pull("fresh")
        if isinstance(reply, ServedBatch):
            harness.ack(reply)
            return
        harness.advance(35.0)
    raise AssertionError(f"nothing is served: {reply.reasons}")


def test_an_event_that_does_not_fit_changes_nothing_and_raises(harness):
    harness.run(group_size=2, batch_size=2)
    complete = harness.lease(2)
    for attempt in complete:
        harness.finish(attempt)
    batch = harness.batch()
    (attempt, *_) = harness.lease(2, "v")
    run, group, now = "r", batch.groups[0], harness.now
    member = complete[0].episode
    retired = events.GroupRetired(run=run, group=group, reason="acked")
    unfit = [
        events.AttemptEnded(run=run, episode=member, attempt=1, reason="late", counts=True),
        events.AttemptCancelled(run=run, episode=member, attempt=1, reason="late"),
        events.MemberAdded(run=run, group=group, member=events.Member("new", 9, 9)),
        events.BatchFormed(run=run, batch="b", groups=[attempt.group, "none"], version=version("0.0")),
        events.BatchAcked(run="none", batch=batch.id, generation=1),
        events.GroupRetired(run=run, group="none", reason="stale"),
        events.RunClosed(run="none"),
    ]
    for event in unfit:
        core = harness.replayed()
        before = core.durable()
        with pytest.raises(InternalError):
            core.apply(event, now)
        assert core.durable() == before, event
        core.tick(now)
        core.check()
    core = harness.replayed([*harness.log, retired])
    before = core.durable()
    with pytest.raises(InternalError):
        core.apply(retired, now)
    assert core.durable() == before


def test_the_grants_of_a_dispatch_that_fit_are_applied(harness):
    harness.run(batch_size=2)
    granted = harness.lease(2)
    log = [r for r in harness.log if not (isinstance(r, events.GroupAdmitted) and r.group == granted[0].group)]
    core = harness._scheduler()
    for event in log[:-1]:
        core.apply(event, harness.now)
    with pytest.raises(InternalError, match=granted[0].episode):
        core.apply(log[-1], harness.now)
    core.tick(harness.now)
    core.check()
    assert core.durable()["attempts"] == {"w": [granted[1].episode]}


@pytest.mark.parametrize("uses", [1, 3])
def test_a_retired_group_proves_that_its_batch_was_acked(harness, uses):
    harness.run(batch_size=2, max_uses=uses)
    harness.work()
    for _ in range(uses):
        batch = harness.batch()
        harness.ack(batch)
    log = [r for r in harness.log if not isinstance(r, events.BatchAcked)]
    core = replay(harness, log)
    core.tick(harness.now)
    core.check()
    assert core.run_status("r", harness.now).groups.retired == {"acked": 2}
    state = core.durable()["runs"]["r"]
    assert state["batches"] == {}
    assert state["closed_batches"][batch.id].end == "acked"


def test_a_retired_group_proves_that_its_batch_was_dissolved(harness):
    harness.run(batch_size=2, max_staleness=0)
    harness.work()
    batch = harness.batch()
    harness.nack(batch)
    harness.announce("0.1")
    core = replay(harness, [r for r in harness.log if not isinstance(r, events.BatchDissolved)])
    core.tick(harness.now)
    core.check()
    assert core.run_status("r", harness.now).groups.retired == {"stale": 2}
    assert core.durable()["runs"]["r"]["closed_batches"][batch.id].end == "dissolved"


def test_an_episode_whose_dispatch_was_lost_is_not_granted_twice_at_once(harness):
    harness.run(batch_size=3)
    harness.lease(1, "a")
    first = len(harness.log) - 1
    again = harness.lease(1, "b")
    harness.hand_back(again, "b")
    core = replay(harness, harness.log[:first] + harness.log[first + 1 :])
    driven = Harness()
    driven.events_by_run = None
    driven._ids = iter(range(1 << 20, 1 << 30))
    driven.core = core
    granted = driven.lease(8, "c")
    assert len({attempt.episode for attempt in granted}) == len(granted) == 6


def test_a_group_of_which_all_results_were_lost_is_not_served_again(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.nack(harness.batch())
    driven = Harness()
    driven.events_by_run = None
    driven._ids = iter(range(1 << 20, 1 << 30))
    driven.core = replay(harness, [r for r in harness.log if not isinstance(r, events.EpisodeEnded)])
    driven.core.tick(driven.now)
    driven.settle()
    for batch in list(driven.core.durable()["runs"]["r"]["batches"]):
        driven.core.dissolve("r", batch, "damaged", driven.now)
    driven.settle()
    assert set(driven.retired().values()) == {"failed"}


def test_the_fork_of_a_lineage_may_be_lost(harness):
    harness.run(batch_size=2)
    harness.work()
    harness.ack(harness.batch(), "0.1")
    harness.rewind("0.1")
    harness.ack(harness.batch(), "1.2")
    log = [r for r in harness.log if not isinstance(r, events.VersionAnnounced)]
    core = replay(harness, log)
    core.tick(harness.now)
    core.check()
    assert core.version("r") == version("1.2")
