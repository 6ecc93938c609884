"""Runs in a known state, and pulls of several ranks, for tests of several modules."""

from __future__ import annotations

from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.queries import selection
from headrace_orchestrator.scheduler.state.eligible.filters import EVERYTHING
from tests.orchestrator.scheduler.harness import BROKEN, Harness, ServedBatch


def eligible_harness(order: str, groups: int = 6, **spec: object) -> Harness:
    """A run with eligible groups, dispatched in the order of their ids and finished in another."""
    harness = Harness()
    harness.run(source="learner", selection={"order": order, **spec.pop("selection", {})}, **spec)
    harness.submit(*[f"g{number}" for number in range(groups)])
    attempts = harness.lease(groups * 8)
    for attempt in attempts[1::2] + attempts[::2]:
        harness.finish(attempt)
    return harness


MIXED_ENVIRONMENTS = [
    {"id": "game:A", "tags": ["easy"]},
    {"id": "game:A", "tags": ["hard", "new"]},
    {"id": "game:B", "tags": ["hard"]},
]


def mixed_harness(**spec: object) -> Harness:
    """A run with eligible groups of several kinds."""
    harness = Harness()
    harness.run(environments=MIXED_ENVIRONMENTS, batch_size=2, max_staleness=9, **spec)
    harness.work()
    return harness


def kinds_of_batch(harness: Harness, batch: ServedBatch) -> set[tuple[str, ...]]:
    """The kinds of the groups in a batch: environment, then tags."""
    admitted = {event.group: event.task for event in harness.events_of(events.GroupAdmitted)}
    return {(admitted[id].environment, *sorted(admitted[id].tags)) for id in batch.groups}


def chosen_batches(harness: Harness, times: int) -> list[tuple[str, ...]]:
    """Batches that are chosen after 0, 1, ... batches were formed."""
    run = harness.core.state.runs["r"]
    batches, formed = [], run.batches_formed
    for number in range(times):
        run.batches_formed = number
        batches.append(tuple(group.id for group in selection.choose(run, EVERYTHING)))
    run.batches_formed = formed
    return batches


def pull_all_shards(harness: Harness, request: str, shards: int = 4, session: str = "s") -> list[ServedBatch]:
    """The shards of one batch, pulled by all ranks of a session."""
    return [harness.batch(session, request=request, shard=shard, shards=shards) for shard in range(shards)]


def busy_harness() -> Harness:
    """A run with groups and episodes in every state."""
    harness = Harness()
    harness.run(group_size=2, batch_size=4, max_staleness=3, attempt_lease_s=30, batch_lease_s=90)
    harness.submit("submitted")
    harness.evaluate(2, deadline_s=60.0)
    attempts = [a for a in harness.lease(14, slots=16) if not a.evaluation]
    harness.finish(attempts[0], "failed", failure=BROKEN)
    for attempt in attempts[1:9]:
        harness.finish(attempt)
    harness.batch()
    harness.announce("0.1")
    harness.rewind("0.1")
    return harness
