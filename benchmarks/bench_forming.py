"""Forming batches with a million small trajectories stored, and with a million stale ones ahead.

In one process, scheduler and index of the store: no HTTP, no log, nothing is read. A claim is a pull that forms a batch
of 32 groups of 8, with the places of its records; between claims the batch is acked and as many groups are played anew,
so that what is stored stays the same. Medians of 400 claims.

    python -m benchmarks.bench_forming [--stored 1000000]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

from benchmarks.table import Row, report
from headrace.common.ids import new_id
from headrace.runspec import RunSpec
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.scheduler.commands import batches, leases, pulls, runs, submissions, versions
from headrace_orchestrator.scheduler.commands.pull_plan import Form, Redeliver
from headrace_orchestrator.scheduler.core import Scheduler
from headrace_orchestrator.scheduler.events import AnyEvent, BatchFormed, EpisodeEnded
from headrace_orchestrator.scheduler.queries import views
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service.storage.location_index import LocationIndex

GROUP, BATCH_GROUPS, CLAIMS = 8, 32, 400
STORED, SMALL = 1_000_000, 10_000
REACH = 1.5

RECORD_BYTES = 1024
"""Size of a stored record in the index."""

MEMORY_MB = 600.0
"""Memory that the whole orchestrator may use with a million trajectories stored."""

HOLD_UP_MS = 50.0
"""Longest time for which one command may delay the others."""

RUN = "forming"


class Buffer:
    """A scheduler and an index with one run, which stores ``stored`` trajectories in whole groups."""

    def __init__(self, stored: int) -> None:
        self.stored = stored
        self.core = Scheduler(epoch=1, new_id=new_id, new_nonce=lambda: f"{next(self._numbers):016x}")
        self.index = LocationIndex()
        self._numbers = itertools.count()
        #: Every stored trajectory stays fresh enough while batches are acked.
        formed = stored // (GROUP * BATCH_GROUPS) + 4
        spec = RunSpec(
            name=RUN,
            environments=[{"id": "bench:Null"}],
            group_size=GROUP,
            batch_size=GROUP * BATCH_GROUPS,
            max_staleness=formed - 1,
            max_bytes=1 << 44,
            attempt_lease_s=1e6,
            batch_lease_s=1e6,
        )
        runs.create_run(self.state(), spec, self.now())

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def state(self) -> SchedulerState:
        """The state at this moment, as commands are given it."""
        return self.core.state_at(self.now())

    def run(self) -> Run:
        """The state of the one run."""
        return self.core.state.run(RUN)

    def play(self, count: int) -> None:
        """End ``count`` more episodes; the rest of the queue waits."""
        while count > 0:
            request = messages.LeaseRequest(worker="w", slots=1024, free=min(1024, count))
            attempts = leases.lease(self.state(), request, self.now()).attempts
            self.note()
            version = self.run().versions.now
            for attempt in attempts:
                submissions.judge(self.state(), "w", attempt.nonce, outcome(attempt, version), self.now())
            self.note()
            if not attempts:
                raise RuntimeError(f"there are no episodes to play: {self.status()}")
            count -= len(attempts)

    def status(self) -> messages.RunStatus:
        return views.run_status(self.core.state, self.run(), self.now())

    def note(self) -> None:
        """Apply the events of the last commands to the index."""
        self.take(self.core.drain())

    def take(self, events: list[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, EpisodeEnded):
                self.index.add_trajectory(
                    event, Location.from_position(next(self._numbers) * RECORD_BYTES, RECORD_BYTES)
                )
            elif not isinstance(event, BatchFormed):
                self.index.apply(event)

    def claims_ms(self) -> float:
        """The median time of a claim."""
        taken = []
        for number in range(CLAIMS):
            begun = self.now()
            lease = self.claim(number)
            taken.append(self.now() - begun)
            ack = messages.AckRequest(learner="l", session="s", generation=lease.generation)
            batches.ack(self.state(), self.run(), lease.batch, ack, self.now())
            self.note()
            self.play(GROUP * BATCH_GROUPS)
        return statistics.median(taken) * 1e3

    def claim(self, number: int) -> Redeliver:
        request = messages.PullRequest(learner="l", session="s", request=str(number))
        plan = pulls.pull(self.state(), self.run(), request, self.now())
        if not isinstance(plan, Form):
            raise RuntimeError(f"nothing to form: {plan}")
        for group, ids in plan.groups:
            places = dict(self.index.groups[RUN][group])
            if not len(ids) == len(places) == GROUP:
                raise RuntimeError(f"a group of {len(ids)} records is planned, {len(places)} are known")
        lease = pulls.form(self.state(), self.run(), plan, request, self.now())
        self.note()
        return lease

    def tick_s(self) -> float:
        """Seconds that the next slice of retirements takes, with the index's part of it; 0 if none is due."""
        begun = self.now()
        deadline = self.core.next_deadline()
        if deadline is None or deadline > begun:
            return 0.0
        self.core.tick(begun)
        self.note()
        return self.now() - begun


def outcome(attempt: messages.Assignment, version: Version) -> EpisodeEnded:
    return EpisodeEnded(
        run=RUN,
        group=attempt.group,
        member=attempt.member,
        episode=attempt.episode,
        attempt=attempt.attempt,
        task=attempt.task,
        status="finished",
        rewards={"agent": 1.0},
        low=version,
        high=version,
        turns=1,
        rows=1,
        row_tokens=100,
        size_bytes=RECORD_BYTES,
        trajectory=new_id(),
    )


def resident_mb() -> float:
    """Resident memory of this process, in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def rows(stored: int) -> list[Row]:
    small = Buffer(SMALL)
    small.play(SMALL)
    small_ms = small.claims_ms()
    del small
    print(f"storing {stored:,} trajectories", flush=True)
    empty_mb = resident_mb()
    buffer = Buffer(stored)
    buffer.play(stored)
    used_mb = resident_mb() - empty_mb
    claim = f"claim of {BATCH_GROUPS} groups, "
    found = [
        Row(f"{claim}{stored:,} stored", buffer.claims_ms(), "ms", f"{SMALL:,} stored", small_ms, REACH, "lower"),
        Row(f"scheduler and index, {stored:,} stored", used_mb, "MB", "the bound of all", MEMORY_MB, 1.0, "lower"),
    ]
    behind_ms, slice_ms = behind(buffer)
    return [
        *found,
        Row(f"{claim}{stored:,} stale ahead", behind_ms, "ms", f"{SMALL:,} stored", small_ms, REACH, "lower"),
        Row(f"slice of {stored:,} stale that retire, p99", slice_ms, "ms", "the bound", HOLD_UP_MS, 1.0, "lower"),
    ]


def behind(buffer: Buffer) -> tuple[float, float]:
    """Make all stored groups stale but those of two batches; return the milliseconds of a claim meanwhile, and the 99th
    percentile of those of a slice."""
    bound = buffer.run().spec.max_staleness
    for n in (bound, bound + 1):
        versions.announce(buffer.state(), buffer.run(), messages.VersionRequest(version=f"0.{n}"), buffer.now())
        buffer.note()
        buffer.play(2 * GROUP * BATCH_GROUPS)
    claims_ms = buffer.claims_ms()
    slices = list(iter(buffer.tick_s, 0.0))
    left = buffer.status().groups.eligible * GROUP
    print(f"{len(slices):,} slices after the claims, {left:,} trajectories of groups left, {resident_mb():.0f} MB")
    return claims_ms, statistics.quantiles(slices or [0.0, 0.0], n=100)[-1] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=int, default=STORED)
    report("forming", rows(parser.parse_args().stored))


if __name__ == "__main__":
    main()
