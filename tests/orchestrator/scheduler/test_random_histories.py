"""Random histories: workers die, replies are lost, clocks jump, learners restart, logs and snapshots are replayed.

After every command ``check()`` holds. At the end of every history the log replays to the same durable state, whole or
from a snapshot on, every dispatched episode has at most one terminal record, and a run that can go on is brought to
serve once more.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from headrace.errors import RequestError
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.scheduler import events
from headrace_orchestrator.scheduler.commands import follow_ups
from tests.orchestrator.scheduler.harness import BROKEN, FLAKY, NO_POLICY, Harness, ServedBatch

WORKERS = st.sampled_from(["w0", "w1", "w2"])
SESSIONS = st.sampled_from([0, 0, 0, 1])
"""Number of later processes of the learner."""
INDEX = st.integers(0, 1 << 16)

SPECS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["mixture", "mixture", "list", "learner"]),
        "group_size": st.integers(1, 3),
        "batch_size": st.integers(1, 6),
        "bin_tokens": st.sampled_from([None, None, 300]),
        "batch_tokens": st.sampled_from([None, None, 250, 900]),
        "max_staleness": st.integers(0, 2),
        "selection": st.sampled_from([{}, *({"order": order} for order in ("lifo", "uniform", "prioritized"))]),
        "max_uses": st.sampled_from([1, 1, 3]),
        "short_groups": st.sampled_from(["top_up", "serve", "drop"]),
        "partial_after_s": st.sampled_from([None, None, 5.0, 90.0]),
        "zero_variance": st.sampled_from(["keep", "keep", "drop", "replace"]),
        "partial_batches": st.booleans(),
        "max_concurrent": st.sampled_from([3, 4096]),
        "max_bytes": st.sampled_from([30_000, 1 << 30, 1 << 30]),
        "retries": st.fixed_dictionaries({"max_attempts": st.integers(1, 3), "quarantine_after": st.integers(1, 4)}),
    }
)


def make_run(harness: Harness, spec: dict[str, Any]) -> None:
    fields = dict(spec)
    kind = fields.pop("kind")
    if fields["short_groups"] == "drop":
        fields["partial_after_s"] = None
    if kind == "mixture":
        fields["environments"] = [{"id": "game:A", "tags": ["a"]}, {"id": "game:B", "weight": 3.0}]
    elif kind == "list":
        fields["tasks"] = [{"environment": "game:A", "seed": seed} for seed in range(5)]
        fields["epochs"] = 2
    else:
        fields["source"] = "learner"
    harness.run(seed=7, attempt_lease_s=30, batch_lease_s=100, **fields)


class Histories(RuleBasedStateMachine):
    """One history."""

    @initialize(spec=SPECS, slice=st.sampled_from([1, 2, 64]))
    def begin(self, spec, slice):
        follow_ups.SLICE = slice
        self.harness = Harness()
        self.spec = spec
        make_run(self.harness, spec)
        #: Every attempt ever granted, with its worker.
        self.granted: list[tuple[str, messages.Assignment]] = []
        self.served: list[ServedBatch] = []
        self.accepted: set[tuple[str, int]] = set()
        self.closed = False
        self.submitted = 0
        self.processes = 0
        #: A snapshot, and how many events are in it.
        self.snapshot: tuple[bytes, int] | None = None

    def attempt(self, command, *arguments: Any, **fields: Any) -> Any:
        """Run a command that may be refused; a refused one must have decided nothing."""
        try:
            return command(*arguments, **fields)
        except RequestError:
            assert self.harness.settle() == []
            return None

    # Workers
    @rule(worker=WORKERS, free=st.integers(1, 6), lost=st.sampled_from([False, False, False, True]))
    def lease(self, worker, free, lost):
        held = dict(self.harness.holding.get(worker, {}))
        attempts = self.harness.lease(free, worker, slots=6)
        assert len(attempts) <= free
        self.granted += [(worker, attempt) for attempt in attempts]
        if lost:
            self.harness.holding[worker] = held

    @precondition(lambda self: self.granted)
    @rule(
        index=INDEX,
        recent=st.booleans(),
        how=st.sampled_from(["finished"] * 6 + ["truncated", "rowless", "failed", "flaky", "no-policy", "cancelled"]),
        behind=st.sampled_from([0, 0, 0, 1, 2, -1]),
        reward=st.sampled_from([0.0, 1.0]),
        right_nonce=st.sampled_from([True] * 9 + [False]),
        first_prompt=st.sampled_from(["", "a", "a", "a", "a", "b"]),
    )
    def submit(self, index, recent, how, behind, reward, right_nonce, first_prompt):
        pool = self.granted[-6:] if recent else self.granted
        worker, attempt = pool[index % len(pool)]
        failure = {"failed": BROKEN, "flaky": FLAKY, "no-policy": NO_POLICY}.get(how)
        fields: dict[str, Any] = {"size_bytes": 700 + index % 9000, "worker": worker, "first_prompt": first_prompt}
        if failure is not None:
            fields |= {"status": "failed", "failure": failure}
        elif how == "cancelled":
            fields |= {"status": "cancelled"}
        elif how == "rowless":
            fields |= {"status": "truncated", "low": None, "rewards": {}}
        else:
            now = self.harness.core.version("r")
            low = Version(now.lineage, max(0, now.n - behind))
            if attempt.pinned_version:
                low = Version.parse(attempt.pinned_version)
            fields |= {"status": how, "low": low, "rewards": {"agent": reward}, "row_tokens": index % 400}
            fields["longest_row"] = fields["row_tokens"]
        if not right_nonce:
            fields["nonce"] = "guessed"
        verdict = self.attempt(self.harness.finish, attempt, **fields)
        key = (attempt.episode, attempt.attempt)
        if verdict == "accepted":
            assert right_nonce
            assert key not in self.accepted
            self.accepted.add(key)
        if verdict == "duplicate":
            assert key in self.accepted

    @rule(worker=WORKERS, free=st.integers(2, 12), reward=st.sampled_from([None, 0.0]))
    def work(self, worker, free, reward):
        """Lease and submit without a failure, as workers do most of the time."""
        for number, attempt in enumerate(self.harness.lease(free, worker, slots=12)):
            self.granted.append((worker, attempt))
            low = Version.parse(attempt.pinned_version) if attempt.pinned_version else self.harness.core.version("r")
            rewards = {"agent": float(number) if reward is None else reward}
            assert self.harness.finish(attempt, worker=worker, low=low, rewards=rewards) == "accepted"
            self.accepted.add((attempt.episode, attempt.attempt))

    @rule(worker=WORKERS)
    def work_on(self, worker):
        self.work(worker, 12, None)

    @rule(session=SESSIONS, request=st.sampled_from(["a", "b"]))
    def work_and_pull(self, session, request):
        self.work("w0", 12, None)
        self.pull(session, "l0", request, None, {})

    @rule(worker=WORKERS)
    def heartbeat(self, worker):
        for cancel in self.harness.heartbeat(worker).cancels:
            if not cancel.record:
                self.harness.holding[worker].pop(cancel.episode, None)

    @rule(worker=WORKERS)
    def die(self, worker):
        self.harness.holding.pop(worker, None)

    @precondition(lambda self: self.granted)
    @rule(index=INDEX)
    def hand_back(self, index):
        worker, attempt = self.granted[index % len(self.granted)]
        self.harness.hand_back([attempt], worker)

    @rule(worker=st.just("w2"))
    def drain(self, worker):
        self.harness.core.drain_worker(worker, self.harness.now)
        self.harness.settle()

    # Time
    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 31.0, 61.0, 101.0, 700.0]))
    def jump(self, seconds):
        self.harness.advance(seconds)
        deadline = self.harness.core.next_deadline()
        assert deadline is None or deadline > self.harness.now

    @rule(seconds=st.sampled_from([12.0, 40.0, 200.0]))
    def stall(self, seconds):
        self.harness.stall(seconds)

    @rule()
    def restart(self):
        self.harness.restart()

    @rule()
    def restart_from_a_snapshot(self):
        taken = self.harness.core.snapshot()
        core = self.harness.restored(taken)
        assert core.snapshot() == taken
        self.harness.restart(core)

    @rule()
    def take_a_snapshot(self):
        self.snapshot = (self.harness.core.snapshot(), len(self.harness.log))

    @precondition(lambda self: self.snapshot)
    @rule()
    def restart_from_an_old_snapshot_and_what_follows_it(self):
        self.harness.restart(self.harness.restored(*self.snapshot))

    # Learners
    @rule()
    def start_a_learner_again(self):
        self.processes += 1

    def session(self, back: int) -> str:
        return f"s{max(0, self.processes - back)}"

    @rule(
        session=SESSIONS,
        learner=st.sampled_from(["l0", "l0", "l1"]),
        request=st.sampled_from(["a", "b", "c", "d"]),
        shard=st.sampled_from([None, None, 0, 1]),
        filters=st.sampled_from([{}, {}, {"environments": ["game:A"]}, {"tags": ["a"]}, {"environments": ["game:B"]}]),
    )
    def pull(self, session, learner, request, shard, filters):
        fields = filters if shard is None else filters | {"shard": shard, "shards": 2}
        begun = len(self.harness.log)
        reply = self.attempt(self.harness.pull, self.session(session), request, learner=learner, **fields)
        if reply is not None:
            self.take(reply)
        self.assert_formed_in_bound(begun)

    @rule(session=SESSIONS, learner=st.sampled_from(["l0", "l0", "l1"]), shards=st.integers(1, 2))
    def resume(self, session, learner, shards):
        reply = self.attempt(self.harness.resume, self.session(session), learner=learner, shards=shards)
        for id in reply.batches if reply is not None else ():
            batch = self.attempt(self.harness.pull, self.session(session), learner=learner, shards=shards, batch=id)
            if batch is not None:
                assert batch.id == id
                assert id not in reply.lost
                self.served.append(batch)

    @precondition(lambda self: self.submitted)
    @rule(session=SESSIONS, index=INDEX, count=st.integers(1, 2))
    def pull_awaited(self, session, index, count):
        begun = len(self.harness.log)
        ids = {f"g{(index + number) % self.submitted}" for number in range(count)}
        reply = self.attempt(self.harness.pull, self.session(session), groups=sorted(ids), learner="l0")
        if isinstance(reply, ServedBatch):
            assert sorted(reply.groups) == sorted(ids)
        if reply is not None:
            self.take(reply)
        self.assert_formed_in_bound(begun)

    def assert_formed_in_bound(self, begun: int) -> None:
        """Assert that no batch is formed of groups that wait to be retired."""
        run = self.harness.core.state.runs["r"]
        for event in self.harness.events_of(events.BatchFormed, begun):
            assert not any(run.bound_violation(run.groups[id]) for id in event.groups)

    def take(self, reply):
        if isinstance(reply, ServedBatch):
            self.served.append(reply)
        else:
            assert reply.reasons
            assert all(reason.message for reason in reply.reasons)

    @precondition(lambda self: self.served)
    @rule(
        index=INDEX,
        recent=st.booleans(),
        step=st.sampled_from([0, 0, 1, 1, 2]),
        nack=st.sampled_from([False] * 4 + [True]),
    )
    def end_batch(self, index, recent, step, nack):
        batch = self.served[-1] if recent else self.served[index % len(self.served)]
        if nack:
            self.attempt(self.harness.nack, batch)
            return
        now = self.harness.core.version("r")
        self.attempt(self.harness.ack, batch, f"{now.lineage}.{now.n + step}" if step else "")

    @rule(step=st.sampled_from([1, 1, 1, 2, 0, -1]))
    def announce(self, step):
        now = self.harness.core.version("r")
        self.attempt(self.harness.announce, f"{now.lineage}.{max(0, now.n + step)}")

    @rule(back=st.integers(0, 3), lineage=st.integers(0, 1))
    def rewind(self, back, lineage):
        now = self.harness.core.version("r")
        self.attempt(self.harness.rewind, f"{max(0, now.lineage - lineage)}.{max(0, now.n - back)}")

    @rule(slots=st.sampled_from([None, 1, 4, 64]))
    def set_concurrency_cap(self, slots):
        self.harness.set_concurrency_cap(slots)

    @rule(index=INDEX, priority=st.sampled_from([0.25, 1.0, 1e6]))
    def prioritize(self, index, priority):
        groups = list(self.harness.core.state.runs["r"].groups) or ["unknown"]
        self.attempt(self.harness.prioritize, {groups[index % len(groups)]: priority})

    @rule(session=SESSIONS)
    def doing(self, session):
        request = messages.DoingRequest(learner="l0", session=self.session(session), doing="training")
        self.harness.core.doing("r", request, self.harness.now)
        self.harness.settle()

    @rule(count=st.integers(1, 3))
    def submit_groups(self, count):
        ids = [f"g{self.submitted + number}" for number in range(count)]
        if self.attempt(self.harness.submit, *ids) is not None:
            self.submitted += count

    @rule(tasks=st.integers(1, 2), deadline_s=st.sampled_from([20.0, 50.0]))
    def evaluate(self, tasks, deadline_s):
        self.attempt(self.harness.evaluate, tasks, episodes_per_task=2, deadline_s=deadline_s)

    @precondition(lambda self: len(self.harness.log) > 60)
    @rule()
    def close(self):
        self.closed = True
        self.harness.core.close_run("r", self.harness.now)
        self.harness.settle()

    # The end
    def teardown(self):
        if not hasattr(self, "harness"):
            return
        harness = self.harness
        try:
            harness.catch_up()
        finally:
            follow_ups.SLICE = 64
        assert harness.replayed().durable() == harness.core.durable()
        if self.snapshot:
            assert harness.restored(*self.snapshot).durable() == harness.core.durable()
        assert_one_record_each(harness)
        if not self.closed and self.spec["kind"] == "mixture" and self.spec["max_bytes"] > 1 << 20:
            assert_serves_again(harness)


def assert_one_record_each(harness: Harness) -> None:
    """Assert that each dispatched episode has one terminal record, and that no group is used too often."""
    dispatched = {grant.episode for event in harness.events_of(events.Dispatched) for grant in event.grants}
    ended = Counter(event.episode for event in harness.events_of(events.EpisodeEnded))
    assert set(ended) <= dispatched
    assert set(ended.values()) <= {1}
    acked = Counter(event.batch for event in harness.events_of(events.BatchAcked))
    assert set(acked.values()) <= {1}
    uses = Counter(group for batch in acked for group in harness.groups_of(batch))
    assert max(uses.values(), default=0) <= harness.core.spec("r").max_uses


def assert_serves_again(harness: Harness) -> None:
    """Assert that a new worker and a new learner session get a batch after any history."""
    reward = 0
    for _ in range(60):
        reply = harness.pull("fresh", learner="l0")
        if isinstance(reply, ServedBatch):
            harness.ack(reply)
            return
        harness.advance(110.0)
        for attempt in harness.lease(64, "fresh"):
            reward += 1
            low = Version.parse(attempt.pinned_version) if attempt.pinned_version else harness.core.version("r")
            harness.finish(attempt, worker="fresh", low=low, rewards={"agent": float(reward)})
    raise AssertionError(f"nothing is served: {reply.reasons}")


@pytest.mark.timeout(900)  # 2,000 histories take a minute on one quiet core
def test_after_every_command_of_every_history_the_invariants_hold():
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=2000,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
