"""Time to form a batch while a million small trajectories are stored, and while a million stale ones precede the rest.

The scheduler and the index of the store run in this process, without HTTP or the log, and no record is read. Forming
a batch plans 32 groups of 8 and looks up the locations of their records. After each batch it is acked and as many
groups are added, so the number of stored trajectories stays the same. The figures are medians of 400 batches.

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
from headrace_orchestrator.scheduler.events import BatchFormed, EpisodeEnded
from headrace_orchestrator.scheduler.queries import views
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service.storage.location_index import LocationIndex

GROUP_SIZE, BATCH_GROUPS, BATCHES = 8, 32, 400
STORED, SMALL = 1_000_000, 10_000
MAX_RATIO = 1.5

RECORD_BYTES = 1024
"""Size of a stored record in the index."""

MEMORY_MB = 600.0
"""Memory that the whole orchestrator may use with a million trajectories stored."""

MAX_DELAY_MS = 50.0
"""Longest time for which one command may delay the others."""

RUN = "forming"


class Buffer:
    """A scheduler and an index with one run, which stores ``stored`` trajectories in whole groups."""

    def __init__(self, stored: int) -> None:

        self.core = Scheduler(epoch=1, new_id=new_id, new_nonce=lambda: f"{next(self._numbers):016x}")
        self.index = LocationIndex()
        self._numbers = itertools.count()
        spec = RunSpec(
            name=RUN,
            environments=[{"id": "bench:Null"}],
            group_size=GROUP_SIZE,
            batch_size=GROUP_SIZE * BATCH_GROUPS,
            # Every stored trajectory stays fresh enough while batches are acked.
            max_staleness=stored // (GROUP_SIZE * BATCH_GROUPS) + 3,
            max_bytes=1 << 44,
            attempt_lease_s=1e6,
            batch_lease_s=1e6,
        )
        runs.create_run(self.state(), runs.prepare(self.state(), spec), self.now())

    @staticmethod
    def now() -> float:
        return time.perf_counter()

    def state(self) -> SchedulerState:
        """The state at this moment, as commands receive it."""
        return self.core.state_at(self.now())

    def run(self) -> Run:
        """The state of the one run."""
        return self.core.state.run(RUN)

    def add(self, count: int) -> None:
        """Lease and finish ``count`` more episodes."""
        while count > 0:
            request = messages.LeaseRequest(worker="w", slots=1024, free=min(1024, count))
            attempts = leases.lease(self.state(), request, self.now()).attempts
            self.apply_events()
            version = self.run().versions.now
            for attempt in attempts:
                submissions.judge(self.state(), "w", attempt.nonce, outcome(attempt, version), self.now())
            self.apply_events()
            if not attempts:
                raise RuntimeError(f"the scheduler granted no attempts: {self.status()}")
            count -= len(attempts)

    def status(self) -> messages.RunStatus:
        return views.run_status(self.core.state, self.run(), self.now())

    def apply_events(self) -> None:
        """Apply the events of the last commands to the index."""
        for event in self.core.drain():
            if isinstance(event, EpisodeEnded):
                position = next(self._numbers) * RECORD_BYTES
                self.index.add_trajectory(event, Location.from_position(position, RECORD_BYTES))
            elif not isinstance(event, BatchFormed):
                self.index.apply(event)

    def median_form_ms(self) -> float:
        """Form and ack batches; return the median milliseconds to form one."""
        times = []
        for number in range(BATCHES):
            started_at = self.now()
            lease = self.form_batch(number)
            times.append(self.now() - started_at)
            ack = messages.AckRequest(learner="l", session="s", generation=lease.generation)
            batches.ack(self.state(), self.run(), lease.batch, ack, self.now())
            self.apply_events()
            self.add(GROUP_SIZE * BATCH_GROUPS)
        return statistics.median(times) * 1e3

    def form_batch(self, number: int) -> Redeliver:
        """Form a batch as a pull does, without reading its records."""
        request = messages.PullRequest(learner="l", session="s", request=str(number))
        plan = pulls.pull(self.state(), self.run(), request, self.now())
        if not isinstance(plan, Form):
            raise RuntimeError(f"no batch can be formed: {plan}")
        for group, ids in plan.groups:
            locations = dict(self.index.groups[RUN][group])
            if not len(ids) == len(locations) == GROUP_SIZE:
                raise RuntimeError(f"{len(ids)} records of a group are planned, {len(locations)} are in the index")
        lease = pulls.form(self.state(), self.run(), plan, request, self.now())
        self.apply_events()
        return lease

    def tick_s(self) -> float:
        """Retire the next slice of stale groups, in the index too; return the seconds, or 0 if none is due."""
        started_at = self.now()
        deadline = self.core.next_deadline()
        if deadline is None or deadline > started_at:
            return 0.0
        self.core.tick(started_at)
        self.apply_events()
        return self.now() - started_at


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
    small.add(SMALL)
    small_ms = small.median_form_ms()
    del small
    print(f"storing {stored:,} trajectories", flush=True)
    empty_mb = resident_mb()
    buffer = Buffer(stored)
    buffer.add(stored)
    used_mb = resident_mb() - empty_mb
    large_ms = buffer.median_form_ms()
    stale_ms, slice_ms = measure_stale(buffer)
    work, against = f"forming {BATCH_GROUPS} groups", f"{SMALL:,} stored"
    return [
        Row(f"{work}, {stored:,} stored", large_ms, "ms", against, small_ms, MAX_RATIO, "lower"),
        Row(f"scheduler and index, {stored:,} stored", used_mb, "MB", "limit of the service", MEMORY_MB, 1.0, "lower"),
        Row(f"{work}, {stored:,} stale ones before them", stale_ms, "ms", against, small_ms, MAX_RATIO, "lower"),
        Row(f"retiring a slice of {stored:,} stale, p99", slice_ms, "ms", "limit", MAX_DELAY_MS, 1.0, "lower"),
    ]


def measure_stale(buffer: Buffer) -> tuple[float, float]:
    """Make all stored groups stale except those of two batches. Return the median milliseconds to form a batch
    meanwhile, and the 99th percentile of the milliseconds to retire a slice of stale groups."""
    bound = buffer.run().spec.max_staleness
    for n in (bound, bound + 1):
        versions.announce(buffer.state(), buffer.run(), messages.VersionRequest(version=f"0.{n}"), buffer.now())
        buffer.apply_events()
        buffer.add(2 * GROUP_SIZE * BATCH_GROUPS)
    form_ms = buffer.median_form_ms()
    slices = list(iter(buffer.tick_s, 0.0))
    remaining = buffer.status().groups.eligible * GROUP_SIZE
    print(f"retired in {len(slices):,} slices; {remaining:,} trajectories remain; {resident_mb():.0f} MB")
    return form_ms, statistics.quantiles(slices or [0.0, 0.0], n=100)[-1] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=int, default=STORED)
    report("forming", rows(parser.parse_args().stored))


if __name__ == "__main__":
    main()
