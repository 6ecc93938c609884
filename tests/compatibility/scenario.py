"""The events of the stored runs: one method for each file of the log, and two for its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from examples.learner import State, fetch, improve, load
from headrace import Batch, Client, Version
from headrace.errors import LAYERS, GroupEnded
from headrace.trajectory import Failure, Provenance, Segment, StopReason
from headrace.wire.messages import Assignment, GroupRequest
from headrace_workers.tiny_policy.model import neutral_weights
from headrace_workers.tiny_policy.weight_updates import write_folder
from tests.builders import make_segment
from tests.compatibility.full_record import ASSETS, full_record
from tests.compatibility.http_worker import HttpWorker, request_bytes, request_json
from tests.e2e.processes import wait_for
from tests.orchestrator.serving import record_for

UNREACHABLE = ("http://127.0.0.1:9", "http://127.0.0.1:19")
"""Addresses without a policy server."""

PULL_S = 60.0


class Scenario:
    """The scenario. ``addresses``: of the policy servers, by pool. ``weights``: the folder of weights to load."""

    def __init__(self, url: str, addresses: dict[str, str], weights: Path) -> None:
        self._url, self._addresses, self._weights = url, addresses, weights

    # In order -------------------------------------------------------------------------------------------------

    def first_file(self) -> None:
        """Write nearly every kind of event."""
        self._train_and_go_back()
        self._share_among_ranks("ranks-1")
        self._have_weights_loaded(1)
        self._pull_all_pictures()
        self._submit_groups()
        self._end_attempts()
        self._lose_attempts()
        self._go_stale()
        self._end_in_every_way()
        self._close_a_run("over")
        with self._learner("trainer", "trainer-1") as trainer:
            trainer.pull("guess", timeout_s=PULL_S, tags=["game"])
        with self._learner("ranks", "ranks-2") as rank:
            rank.pull("guess", timeout_s=PULL_S, shard=0, shards=2)

    def second_file(self) -> None:
        """Resume sessions, and prepare the state at the head of the next file."""
        with self._learner("trainer", "trainer-2") as trainer:
            (batch,) = trainer.resume("guess").batches
            self._step(trainer, batch, Version(1, 3))
            trainer.drain_worker("default-2")
        with self._learner("ranks", "ranks-3") as rank:
            (batch,) = rank.resume("guess", shard=0, shards=2).batches
        self._have_weights_loaded(2)
        self._announce_weights_without_a_server(3, 4)
        self._hold_attempts()

    def third_file(self) -> None:
        """Write events behind the newest state."""
        self._share_among_ranks("ranks-4")
        self._close_a_run("over-too")
        with self._learner("trainer", "trainer-2") as trainer:
            batch = trainer.pull("guess", timeout_s=PULL_S)
            trainer.nack(batch, "its checkpoint is not written yet")
            self._step(trainer, trainer.pull("guess", timeout_s=PULL_S), Version(1, 4))
            trainer.evaluate("guess", [{"environment": "math:Arithmetic-v0", "seed": 4}], deadline_s=60)
            trainer.add_server("nim", self._addresses["hosted"])
            wait_for("weights are served", lambda: [s.version for s in trainer.servers("nim").servers] == ["0.4"])
            trainer.submit_groups("chosen", [GroupRequest(id="last", task={"environment": "math:Arithmetic-v0"})])
            trainer.set_priorities("chosen", {"last": 0.125, "b": 2.0})
            wait_for("all episodes are over", lambda: not any(_busy(trainer, run) for run in ("guess", "chosen")))
            wait_for("a drained worker is gone", lambda: not self._knows("default-2"), 2 * PULL_S)

    def leave_open(self) -> None:
        """Leave batches, groups and attempts open; the real workers are gone."""
        with self._learner("trainer", "trainer-3") as trainer, self._learner("ranks", "ranks-5") as rank:
            trainer.resume("guess")
            self._announce_weights_without_a_server(5, 6)
            for address in UNREACHABLE:
                trainer.add_server("nim", address)
            trainer.drain_server("nim", UNREACHABLE[1])
            trainer.drain_worker("plain-1")
            trainer.pull("guess", timeout_s=PULL_S)
            rank.pull("guess", timeout_s=PULL_S, shard=0, shards=2)
        with self._learner("other", "other-1") as other:
            other.nack(other.pull("guess", timeout_s=PULL_S), "not needed")

    def continue_after_the_backup(self) -> None:
        """The trainer acks its batch and pulls another one."""
        with self._learner("trainer", "trainer-4") as trainer:
            (batch,) = trainer.resume("guess").batches
            trainer.ack(batch, version=5)
            trainer.pull("guess", timeout_s=PULL_S)
        with self._learner("ranks", "ranks-6") as rank:
            rank.resume("guess", shard=0, shards=2)

    # One run at a time ----------------------------------------------------------------------------------------

    def _train_and_go_back(self) -> None:
        with self._learner("trainer", "trainer-1") as trainer:
            self._step(trainer, trainer.pull("guess", timeout_s=PULL_S), Version(0, 1))
            trainer.nack(trainer.pull("guess", timeout_s=PULL_S), "not now")
            self._step(trainer, trainer.pull("guess", timeout_s=PULL_S), Version(0, 2))
            tasks = [{"environment": "game:GuessTheNumber-v0-easy", "seed": seed, "id": f"e{seed}"} for seed in (1, 2)]
            assert trainer.evaluate("guess", tasks, temperature=0.0, deadline_s=60).finished
            # A released batch is dissolved as stale, a leased one as rewound.
            trainer.nack(trainer.pull("guess", timeout_s=PULL_S), "too old soon")
            self._serve(Version(0, 9))
            trainer.announce("guess", "0.9")
            trainer.pull("guess", timeout_s=PULL_S)
            assert trainer.rewind("guess", "0.1").version == "1.1"
            self._serve(Version(1, 1))
            self._step(trainer, trainer.pull("guess", timeout_s=PULL_S), Version(1, 2))

    def _share_among_ranks(self, session: str) -> None:
        with self._learner("ranks", session) as first, self._learner("ranks", session) as second:
            batch = first.pull("guess", timeout_s=PULL_S, shard=0, shards=2)
            second.pull("guess", timeout_s=PULL_S, shard=1, shards=2)
            first.ack(batch)

    def _have_weights_loaded(self, n: int) -> None:
        with self._learner("nim-learner", f"nim-{n}") as learner:
            batch = learner.pull("nim", timeout_s=PULL_S)
            learner.ack(batch, version=n, weights=self._write_weights(n))
            wait_for("weights are served", lambda: [s.version for s in learner.servers("nim").servers] == [f"0.{n}"])
            learner.add_server("nim", UNREACHABLE[0])
            learner.drain_server("nim", UNREACHABLE[0])
            learner.remove_server("nim", UNREACHABLE[0])

    def _announce_weights_without_a_server(self, *versions: int) -> None:
        with self._learner("nim-learner", f"nim-{versions[0]}") as learner:
            learner.remove_server("nim", self._addresses["hosted"])
            for n in versions:  # all but the last are skipped
                learner.announce("nim", n, weights=self._write_weights(n))

    def _write_weights(self, n: int) -> str:
        write_folder(self._weights / str(n), neutral_weights())
        return str(self._weights / str(n))

    def _pull_all_pictures(self) -> None:
        with self._learner("viewer", "viewer-1") as learner:
            for batch in learner.batches("pictures", timeout_s=PULL_S):
                learner.ack(batch)

    def _submit_groups(self) -> None:
        sums = [GroupRequest(id=id, task={"environment": "math:Arithmetic-v0", "seed": 1, "id": id}) for id in "abc"]
        broken = GroupRequest(id="broken", task={"environment": "compatibility:Broken"}, size=2)
        with self._learner("chooser", "chooser-1") as learner:
            learner.submit_groups("chosen", [*sums, broken])
            assert learner.set_priorities("chosen", {"a": 4.0, "b": 0.25, "gone": 1.0}).over == ["gone"]
            learner.ack(learner.pull("chosen", timeout_s=PULL_S, groups=["c"]), version=1)
            with pytest.raises(GroupEnded):
                learner.pull("chosen", timeout_s=PULL_S, groups=["broken"])
            learner.ack(learner.pull("chosen", timeout_s=PULL_S))

    def _end_attempts(self) -> None:
        worker = HttpWorker(self._url, "plain-1", "plain")
        one, two, three, four = worker.lease(4)
        _finish(worker, one, 1.0)
        _finish(worker, two, 1.0)  # without variance, so another group takes its place
        _finish(worker, three, 1.0)
        wait_for("its group is cut", lambda: bool(worker.heartbeat(four)))
        _submit(worker, four, status="cancelled", stop_reason="cancelled", segments=[], messages=[])
        with self._learner("slow", "slow-1") as slow, self._learner("fast", "fast-1") as fast:
            slow.pull("plain", timeout_s=PULL_S)
            fast.ack(fast.pull("plain", timeout_s=PULL_S), version=1)  # once the lease of the slow one ran out
            assert fast.evaluate("plain", [{"environment": "test:Echo"}], deadline_s=0.5).done == 0
        worker.give_back(*worker.lease(2))
        five, six = worker.lease(2)
        failure = Failure(layer="tool", kind="no-tool", message="The tool is missing.")
        _submit(worker, five, status="failed", stop_reason="failure", failure=failure, segments=[], messages=[])
        (seven,) = worker.lease(1)  # in place of the one that failed
        _finish(worker, six, 0.0)
        for asset in ASSETS:
            request_bytes("PUT", f"{self._url}/v1/assets/{asset.name}", asset.data)
        worker.submit(seven, full_record(seven, worker.name))

    def _lose_attempts(self) -> None:
        worker = HttpWorker(self._url, "brief-1", "brief")
        with self._learner("nobody", "nobody-1") as client:
            for _ in range(2):
                worker.lease(1)
                wait_for("a silent worker counts as lost", lambda: not client.run("brief").leased)
            worker.lease(1)
            wait_for("a worker drops it", lambda: not worker.heartbeat() and not client.run("brief").leased)

    def _go_stale(self) -> None:
        worker = HttpWorker(self._url, "stale-1", "stale")
        with self._learner("nobody", "nobody-1") as client:
            for version in (2, 4):  # each leaves one group behind
                (attempt,) = worker.lease(1)
                _submit(worker, attempt, version=Version(0, version - 2))
                client.announce("stale", version)
        short, long = worker.lease(2)
        _submit(worker, short, version=Version(0, 4))
        _submit(worker, long, version=Version(0, 4), turns=8)  # longer than a bin

    def _end_in_every_way(self) -> None:
        worker = HttpWorker(self._url, "ends-1", "ends")
        for reason in sorted(set(get_args(StopReason)) - {"terminated", "failure", "cancelled"}):
            (attempt,) = worker.lease(1)
            segment = make_segment(terminated=False, truncated=reason == "environment_truncated")
            _submit(worker, attempt, status="truncated", stop_reason=reason, segments=[_processed(segment)])
        for layer in LAYERS:
            attempt, other = worker.lease(2)
            _submit(
                worker, other, segments=[_processed(make_segment())]
            )  # otherwise the failure backoff would slow the run down
            failure = Failure(layer=layer, kind="broken", message=f"The {layer} broke.")
            _submit(worker, attempt, status="failed", stop_reason="failure", failure=failure, segments=[], messages=[])

    def _close_a_run(self, name: str) -> None:
        with self._learner("nobody", "nobody-1") as client:
            client.create_run({"name": name, "tasks": [{"environment": "test:Echo"}], "pool": "nobody"})
            client.close_run(name)

    def _hold_attempts(self) -> None:
        worker = HttpWorker(self._url, "plain-1", "plain")
        one, two, three, four = worker.lease(4)
        worker.submit(one, full_record(one, worker.name))
        wait_for("its group is cut", lambda: bool(worker.heartbeat(two)))
        with self._learner("slow", "slow-1") as slow, self._learner("fast", "fast-1") as fast:
            slow.pull("plain", timeout_s=PULL_S)
            fast.pull("plain", timeout_s=PULL_S)  # once the lease of the slow one ran out; then its own does
            _finish(worker, three, 1.0)
            _finish(worker, four, 1.0)
            tasks = [{"environment": "test:Echo", "seed": seed} for seed in (6, 7, 8, 9)]
            started = fast.evaluate("plain", tasks, temperature=0.5, deadline_s=3600, wait=False)
        (evaluated,) = worker.lease(1)
        assert evaluated.evaluation == started.evaluation
        _finish(worker, evaluated, 0.5)
        worker.lease(3)

    # Helpers --------------------------------------------------------------------------------------------------

    @contextmanager
    def _learner(self, name: str, session: str) -> Iterator[Client]:
        with Client(self._url, learner=name, session=session, keepalive=False) as client:
            yield client

    def _step(self, client: Client, batch: Batch, version: Version) -> None:
        policy = self._addresses["default"]
        load(policy, State(improve(fetch(policy).weights, batch), version, ""))
        client.doing("guess", "training")
        client.ack(batch, version=version)

    def _serve(self, version: Version) -> None:
        policy = self._addresses["default"]
        load(policy, fetch(policy)._replace(version=version))

    def _knows(self, worker: str) -> bool:
        return worker in [item["worker"] for item in request_json("GET", f"{self._url}/v1/workers")]


def _busy(client: Client, run: str) -> bool:
    status = client.run(run)
    return bool(status.queued or status.leased)


def _finish(worker: HttpWorker, attempt: Assignment, reward: float) -> None:
    _submit(worker, attempt, rewards=[0.0, reward], version=Version.parse(attempt.pinned_version or "0.0"))


def _processed(segment: Segment) -> Segment:
    """The segment as from an engine with logprobs after temperature and filters."""
    return msgspec.structs.replace(segment, sampling=msgspec.structs.replace(segment.sampling, logprobs="processed"))


def _submit(worker: HttpWorker, attempt: Assignment, **fields: object) -> None:
    provenance = Provenance(worker=worker.name, evaluation=attempt.evaluation, sampling_seed=attempt.sampling_seed)
    worker.submit(attempt, record_for(attempt, provenance=provenance, **fields))
