"""The attempts that a worker holds: running ones in slots, finished ones in the spool.

* Every attempt ends in one record, unless the orchestrator discards it or the worker returns it.
* An attempt that is granted twice (its first reply was lost) is run once.
* Finished attempts wait a little for others to be submitted with them; longer episodes allow longer waits, except for
  the last attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType

from headrace.assets import AssetData
from headrace.errors import EpisodeFailure, HeadraceError, InfrastructureFailure, InvalidTrajectory
from headrace.trajectory import Failure, Trajectory
from headrace.wire import codec, messages
from headrace_workers.episode import AttemptOutcome, EpisodeRun, EpisodeTools, failed, record_of
from headrace_workers.worker.episode_duration import EpisodeDuration
from headrace_workers.worker.logs import logger
from headrace_workers.worker.run_plans import RunPlans
from headrace_workers.worker.spool import AttemptName, Spool, SpoolEntry, key_of

SUBMIT_EPISODE_SHARE, LONGEST_SUBMIT_S = 0.04, 0.1
"""Time that finished episodes may wait to be submitted together while others run: this share of an episode's usual
duration, up to a limit."""


class RunningAttempt:
    """An attempt in a slot. ``wanted`` is False once its record is not needed any more."""

    __slots__ = ("assignment", "cancel_reason", "episode", "recorded", "started_at", "task", "wanted")

    def __init__(self, assignment: messages.Assignment, started_at: float) -> None:
        self.assignment = assignment
        self.started_at = started_at
        self.task: asyncio.Task[None] | None = None
        self.episode: EpisodeRun | None = None
        self.cancel_reason = ""
        self.wanted = True
        self.recorded = False

    def cancel(self, reason: str, *, wanted: bool) -> None:
        """Cancel the attempt. ``wanted``: whether to make a ``cancelled`` record."""
        if self.recorded or self.task is None:
            return
        self.wanted = self.wanted and wanted
        if not self.cancel_reason:
            self.cancel_reason = reason
            if self.episode is not None:
                self.episode.cancel_reason = reason
            self.task.cancel()


class HeldAttempts:
    """The attempts of one worker. ``on_end`` is called when a running attempt has ended and its slot is free."""

    def __init__(self, tools: EpisodeTools, plans: RunPlans, spool: Spool, on_end: Callable[[], None]) -> None:
        self._tools = tools
        self._plans = plans
        self._spool = spool
        self._on_end = on_end
        self.running: dict[AttemptName, RunningAttempt] = {}
        self.episode_duration = EpisodeDuration()

    def start(self, assignment: messages.Assignment) -> None:
        """Run an attempt, unless the worker holds it already."""
        name = (assignment.episode, assignment.attempt)
        if name in self.running or name in self._spool:
            return
        running = self.running[name] = RunningAttempt(assignment, self._tools.clock())
        running.task = asyncio.create_task(self._run(running))
        running.task.add_done_callback(lambda task: self._end_attempt(name, running, task))

    def assignments(self) -> list[messages.Assignment]:
        """Return all held attempts. Safe to call from another thread."""
        held = {name: running.assignment for name, running in list(self.running.items())}
        held |= {entry.name: entry.assignment for entry in self._spool.entries()}
        return list(held.values())

    def keys(self) -> list[messages.AttemptKey]:
        """Return the keys of all held attempts."""
        return [key_of(attempt) for attempt in self.assignments()]

    def cancel(self, cancels: list[messages.Cancel]) -> None:
        """Cancel attempts, as the orchestrator requests."""
        for cancel in cancels:
            running = self.running.get((cancel.episode, cancel.attempt))
            if running is not None:
                running.cancel(cancel.reason, wanted=cancel.record)

    async def _run(self, running: RunningAttempt) -> None:
        assignment = running.assignment
        try:
            plan = self._plans.get(assignment.run) or await self._plans.fetch(assignment.run)
        except EpisodeFailure as error:
            self._finish(running, self._bare_record(assignment, failed(error)))
            return
        episode = running.episode = EpisodeRun(self._tools, assignment, plan)
        self._finish(running, await episode.run(), episode.assets)
        try:
            await episode.close()
        except EpisodeFailure as error:
            logger(assignment).warning("the environment did not close", error=str(error))
        running.episode = None  # free the memory now, not in the task's callback: other episodes need it

    def _end_attempt(self, name: AttemptName, running: RunningAttempt, task: asyncio.Task[None]) -> None:
        """Free the slot, and make a record of an attempt that ended without one."""
        del self.running[name]
        self.episode_duration.add(self._tools.clock() - running.started_at)
        self._on_end()
        if task.cancelled():
            failure = Failure(layer="infrastructure", kind="cancelled", message=running.cancel_reason)
            outcome = AttemptOutcome(status="cancelled", stop_reason="cancelled", failure=failure)
        elif (error := task.exception()) is not None:
            logger(running.assignment).error("the worker failed", exc_info=error)
            outcome = failed(
                InfrastructureFailure(f"The worker failed: {error!r}", kind="worker-fault", retryable=True)
            )
        else:
            return
        if not running.recorded:
            self._finish(running, self._bare_record(running.assignment, outcome))

    def _finish(
        self, running: RunningAttempt, trajectory: Trajectory, assets: Mapping[str, AssetData] = MappingProxyType({})
    ) -> None:
        running.recorded = True
        if not running.wanted:
            return
        if (failure := trajectory.failure) is not None:
            logger(running.assignment).warning(
                f"episode {trajectory.status}", layer=failure.layer, kind=failure.kind, message=failure.message
            )
        try:
            record = codec.encode(trajectory)
        except InvalidTrajectory as error:
            self._spool.add(self.substitute(SpoolEntry(running.assignment, b""), error))
            return
        record_assets = {asset.name: assets[asset.name] for asset in trajectory.assets}
        self._spool.add(SpoolEntry(running.assignment, record, record_assets))

    def submit_gather_s(self) -> float:
        """Time that finished attempts may wait for others to be submitted with them; zero for the last one."""
        others = any(not running.recorded for running in self.running.values())
        return self.episode_duration.share_s(SUBMIT_EPISODE_SHARE, LONGEST_SUBMIT_S) if others else 0.0

    def substitute(self, entry: SpoolEntry, error: HeadraceError) -> SpoolEntry:
        """Make a failed record that replaces a refused one."""
        failure = InfrastructureFailure(
            f"The record of this attempt was refused: {error}", kind="record-refused", retryable=False
        )
        trajectory = self._bare_record(entry.assignment, failed(failure))
        return SpoolEntry(entry.assignment, codec.encode(trajectory), is_substitute=True)

    def _bare_record(self, assignment: messages.Assignment, outcome: AttemptOutcome) -> Trajectory:
        return record_of(assignment, outcome, trajectory_id=self._tools.new_id(), worker=self._tools.worker)
