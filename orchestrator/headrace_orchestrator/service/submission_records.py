"""Submitted records: from a body to verdicts.

* A body that cannot be read as a whole is refused whole; a bad record costs only itself.
* Only what ``validate`` accepts reaches the scheduler.
* A record that contradicts its worker, or what its run trains, is refused.
* A record that refers to a missing asset is not stored; the result names the assets that its worker must send.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.errors import (
    AssetsMissing,
    AttemptNotYours,
    AttemptSuperseded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    InvalidTrajectory,
    StoreError,
    UnknownRun,
)
from headrace.server import logs
from headrace.trajectory import PolicyRef, Trajectory
from headrace.validation import validate
from headrace.wire import codec
from headrace.wire.alignment import ALIGNMENT, padded
from headrace.wire.messages import SubmissionHead, SubmitResult
from headrace_orchestrator.buffer.assets.store import AssetStore
from headrace_orchestrator.buffer.projection.entries import ProjectedTrajectory
from headrace_orchestrator.scheduler.commands.submissions import judge
from headrace_orchestrator.scheduler.events import EpisodeEnded
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.service.storage.frames import TrajectoryWrite
from headrace_orchestrator.service.storage.record_events import event_of
from headrace_orchestrator.service.storage.store import Store

log = logs.logger(__name__)

_LENGTH = struct.Struct("<I")
_decoder = msgspec.json.Decoder(list[SubmissionHead])

MAX_SUBMISSIONS = 4096
"""Most records of one body: each holds the event loop for some 50 microseconds."""


class SubmittedRecord(NamedTuple):
    """A record as it was received, with its head and the worker that submits it."""

    worker: str
    head: SubmissionHead
    record: memoryview


def parse_submission(worker: str, body: bytes) -> list[SubmittedRecord]:
    """Split a submission's body into its records. Raises InvalidRequest."""
    if len(body) < _LENGTH.size:
        raise _unreadable(f"it is {len(body)} bytes long")
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    if start > len(body):
        raise _unreadable(f"its JSON would be {start - _LENGTH.size} bytes long, but the body ends before that")
    try:
        heads = _decoder.decode(memoryview(body)[_LENGTH.size : start])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(f"its JSON does not decode: {error}") from error
    if len(heads) > MAX_SUBMISSIONS:
        raise _unreadable(f"it has {len(heads)} records; one body may have at most {MAX_SUBMISSIONS}")
    offset = padded(start)
    submitted, view = [], memoryview(body)
    for head in heads:
        if head.size_bytes <= 0 or head.size_bytes % ALIGNMENT or offset + head.size_bytes > len(body):
            raise _unreadable(f"the record of episode {head.episode} has size {head.size_bytes}, which does not fit")
        submitted.append(SubmittedRecord(worker, head, view[offset : offset + head.size_bytes]))
        offset += head.size_bytes
    if heads and offset != len(body):
        raise _unreadable(f"{len(body) - offset} bytes are left over after the last record")
    return submitted


STALE_VERDICTS = frozenset({"superseded", "not-yours"})
"""Verdicts on attempts that the worker does not hold any more; an error explains each."""


def explained_result(head: SubmissionHead, result: SubmitResult, worker: str) -> SubmitResult:
    """The result with the error that explains its stale verdict."""
    attempt = f"Attempt {head.attempt} of episode {head.episode}"
    error: HeadraceError
    if result.verdict == "superseded":
        error = AttemptSuperseded(
            f"{attempt} was superseded: a newer attempt exists, or the episode is over.",
            hint="Drop the record: the episode has another result, or will have one.",
        )
    else:
        error = AttemptNotYours(
            f"{attempt} does not belong to worker {worker!r} with this nonce.",
            hint="Submit under the name and the nonce that the attempt was leased with.",
        )
    return msgspec.structs.replace(result, problem=error.problem())


class SubmissionJudge:
    """Judges records together. ``accepted``: the records that the scheduler took, by episode.

    Only the bytes of a record and its listed fields are kept. The rest is freed before the next record is read, while
    its memory is still in the processor's cache.
    """

    def __init__(self, state: SchedulerState, store: Store, assets: AssetStore, now: float) -> None:
        self.accepted: dict[str, TrajectoryWrite] = {}
        self._state = state
        self._store = store
        self._assets = assets
        self._now = now
        #: Episodes by the ids of their trajectories, stored or accepted here.
        self._owners: dict[str, str] = {}
        #: The policy that is trained, by run and agent; most records share a few of them.
        self._trained: dict[tuple[str, str], PolicyRef | None] = {}

    def judge(self, submitted: Sequence[SubmittedRecord]) -> list[SubmitResult]:
        """Validate each record and have the scheduler decide; one result each, in their order. Raises StoreError."""
        decoded: list[TrajectoryWrite | SubmitResult] = []
        for item in submitted:
            try:
                decoded.append(self._read(item))
            except Exception as error:  # noqa: BLE001 - it becomes the record's result, or is raised again
                decoded.append(_refusal(item.head, error))
        # One lookup for all: one for each record would cost more than everything else.
        self._owners = self._store.episodes_of(
            [item.entry.event.trajectory for item in decoded if isinstance(item, TrajectoryWrite)]
        )
        results: list[SubmitResult] = []
        for item, write in zip(submitted, decoded, strict=True):
            try:
                results.append(self._decide(item, write) if isinstance(write, TrajectoryWrite) else write)
            except Exception as error:  # noqa: BLE001 - it becomes the record's result, or is raised again
                results.append(_refusal(item.head, error))
        return results

    def _read(self, item: SubmittedRecord) -> TrajectoryWrite:
        """Decode a record; raises unless it is valid, of the attempt in its head, and made by the worker."""
        head, record = item.head, bytes(item.record)
        trajectory = codec.decode(record)
        validate(trajectory)
        if trajectory.episode != head.episode or trajectory.attempt != head.attempt:
            raise InvalidTrajectory(
                f"The submission names attempt {head.attempt} of episode {head.episode}, its record attempt "
                f"{trajectory.attempt} of episode {trajectory.episode}.",
                hint="Lay the records end to end in the order of their heads.",
            )
        self._check_provenance(item.worker, trajectory)
        assets = [asset.name for asset in trajectory.assets] if trajectory.assets else ()
        outcome = event_of(trajectory, len(record))
        return TrajectoryWrite(
            ProjectedTrajectory(outcome, trajectory.stop_reason, trajectory.provenance, assets), record
        )

    def _decide(self, item: SubmittedRecord, write: TrajectoryWrite) -> SubmitResult:
        head, entry = item.head, write.entry
        outcome = entry.event
        self._check_owner(outcome)
        if entry.assets:
            self._check_assets(entry.assets)
        verdict = judge(self._state, item.worker, head.nonce, outcome, self._now)
        if verdict == "accepted":
            self.accepted[head.episode] = write
            self._owners[outcome.trajectory] = head.episode
        elif verdict == "superseded" and outcome.trajectory in self._owners:
            verdict = "duplicate"  # this very record is stored; the scheduler forgets it with its group
        return SubmitResult(episode=head.episode, verdict=verdict)

    def _check_owner(self, outcome: EpisodeEnded) -> None:
        """Raise InvalidTrajectory where the record has the trajectory id of another episode's record."""
        owner = self._owners.get(outcome.trajectory)
        if owner is not None and owner != outcome.episode:
            raise InvalidTrajectory(
                f"The trajectory id {outcome.trajectory} belongs to episode {owner}.",
                hint="Make a fresh id for each record.",
            )

    def _check_assets(self, names: Sequence[str]) -> None:
        """Raise AssetsMissing unless all assets of the record are stored. None of them is deleted before the record is
        stored."""
        missing = [name for name in names if not self._assets.is_stored(name)]
        if missing:
            raise AssetsMissing(
                f"The record refers to {len(missing)} of {len(names)} assets that are not stored: "
                f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}.",
                hint="Send them, then submit the record again.",
                assets=missing,
            )

    def _check_provenance(self, worker: str, trajectory: Trajectory) -> None:
        """Raise InvalidTrajectory where another worker made the record, or it trains a policy that its run does not."""
        maker = trajectory.provenance.worker
        if maker != worker:
            raise InvalidTrajectory(
                f"The record was made by worker {maker!r}, but {worker!r} submits it.",
                hint="A worker submits its own records, under the name that it leases with.",
            )
        for segment in trajectory.segments:
            if not segment.train:
                continue
            key = trajectory.run, segment.agent
            if key not in self._trained:
                self._trained[key] = self._trained_policy(*key)
            expected = self._trained[key]
            if expected is not None and segment.policy != expected:
                raise InvalidTrajectory(
                    f"The record trains policy {_describe(segment.policy)} as agent {segment.agent!r}; run "
                    f"{trajectory.run} trains {_describe(expected)}.",
                    hint="Record the base and the adapter of the run's policy spec.",
                )

    def _trained_policy(self, run: str, agent: str) -> PolicyRef | None:
        """The policy that a run trains as that agent; None for an unknown run, which the scheduler handles. Raises
        InvalidTrajectory for an agent that the run freezes."""
        try:
            policy = self._state.run(run).spec.policy
        except UnknownRun:
            return None
        spec = policy.agents.get(agent)
        if spec is not None and not spec.train:
            raise InvalidTrajectory(
                f"The record trains agent {agent!r}, which run {run} freezes.",
                hint="Segments of a frozen agent have train = false.",
            )
        base = None if spec is None else spec.base
        return PolicyRef(base=base or policy.base, adapter=None if base else policy.adapter)


def _refusal(head: SubmissionHead, error: Exception) -> SubmitResult:
    """Turn an error into the result of its record. Raises StoreError."""
    if isinstance(error, StoreError):
        raise error  # a fault of the disk: the worker submits the record again
    if isinstance(error, AssetsMissing):
        return SubmitResult(episode=head.episode, verdict="assets-missing", problem=error.problem())
    if isinstance(error, HeadraceError):
        return SubmitResult(episode=head.episode, verdict="refused", problem=error.problem())
    log.exception("a record could not be judged", episode=head.episode, attempt=head.attempt)
    refusal = InternalError(
        f"The record could not be judged ({type(error).__name__}).", hint="The service's log has the details."
    )
    return SubmitResult(episode=head.episode, verdict="refused", problem=refusal.problem())


def _describe(policy: PolicyRef) -> str:
    return repr(policy.base) + (f" with adapter {policy.adapter!r}" if policy.adapter else "")


def _unreadable(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"The submission cannot be read: {problem}.",
        hint="A body is: length of the JSON (u32), JSON, padding to 64 bytes, records of a multiple of 64 bytes.",
    )
