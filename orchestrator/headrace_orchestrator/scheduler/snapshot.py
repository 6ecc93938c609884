"""The durable state as bytes. Log files begin with such a snapshot, so that a start need not read earlier files.

* A restored scheduler has the same durable state, and makes the same decisions.
* After a restore every lease has a full term, as after a replay.
* A damaged snapshot, or one of an unknown format, is refused as a whole; no part of it is restored.
* Soft state is not in it; each slot of the state is either stored or listed as soft.

Rows are arrays: the fields of a row class are the attributes of the object that it stores, in the order of the bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import msgspec

from headrace.errors import CorruptRecord
from headrace.trajectory import Failure, Task, Version
from headrace.wire.messages import EvaluationEpisode, Weights
from headrace_orchestrator.scheduler.state.batches import ClosedBatch, LearnerSessions, OpenBatch
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import Episode, EpisodeState, Group, GroupState
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState, stored_run
from headrace_orchestrator.scheduler.state.workers import WorkerState

FORMAT = 3
"""Number of this format, stored first; snapshots with another number are refused."""


class SnapshotRow(msgspec.Struct, array_like=True, frozen=True):
    """Base of the rows."""


class EpisodeRow(SnapshotRow, frozen=True):
    id: str
    member: int
    sampling_seed: int
    state: EpisodeState
    history: list[tuple[str, str]]
    attempt: int
    nonce: str
    worker: str
    version: Version | None
    retries_used: int
    workers_lost: int
    low: Version | None
    high: Version | None
    rewards: dict[str, float]
    trajectory: str
    failure: Failure | None
    by_worker: bool
    reward_errors: dict[str, float] = {}


class GroupRow(SnapshotRow, frozen=True):
    id: str
    task: Task
    position: int
    submitted: bool
    adapters: dict[str, str]
    state: GroupState
    history: list[tuple[str, str]]
    size: int
    added_members: int
    live: int
    usable: int
    dispatch_order: int
    uses: int
    priority: float
    packed_trajectories: bytes
    kept_versions: tuple[Version, ...]
    row_tokens: int
    longest_row: int
    held_bytes: int
    damaged: bool
    batch: str
    reason: str
    rowless: int = 0
    first_prompt: str = ""
    prompts_differ: bool = False


class BatchRow(SnapshotRow, frozen=True):
    id: str
    version: Version
    leased: bool
    lapsed: bool
    generation: int
    learner: str
    session: str
    request: str
    shards: int
    fetched: list[int]
    release_reason: str
    before: str


class EvaluationRow(SnapshotRow, frozen=True):
    id: str
    version: Version
    wanted: int
    deadline_s: float
    temperature: float | None
    left: int
    done: int
    episodes: list[EvaluationEpisode]
    cut: bool
    reason: str


class VersionsRow(SnapshotRow, frozen=True):
    now: Version
    forks: list[Version | None]
    tops: list[int]


class PolicyServersRow(SnapshotRow, frozen=True):
    servers: dict[str, bool]
    target: Version | None
    weights: Weights | None
    held: Version
    loaded: Weights | None
    skipped: list[Version]
    sampled: dict[str, Version] = {}
    confirmed: bool = True
    digests: dict[str, Version] = {}


class SharesRow(SnapshotRow, frozen=True):
    drawn: dict[str, int] = {}
    trained: dict[str, int] = {}


class LedgerRow(SnapshotRow, frozen=True):
    in_flight: int
    unfinished: int
    held_bytes: int
    sizes: list[int]
    tokens: list[int]
    estimate: int
    batch_groups: int


class RunRow(SnapshotRow, frozen=True):
    closed: bool
    position: int
    admitted: int
    queued: int
    evaluation_queued: int
    leased: int
    evaluation_leased: int
    group_states: dict[str, int]
    open: int
    next_dispatch_order: int
    closed_batches: dict[str, ClosedBatch]
    batches_formed: int
    sessions: dict[str, LearnerSessions]
    batches_acked: int
    selected: dict[str, int]
    submitted_ends: dict[str, str]
    retired: dict[str, int]
    stale_since_batch: int
    zero_variance_since_batch: int
    zero_variance_tokens: int
    too_long_since_batch: int
    stale_in_row: int
    episode_ends: dict[str, int]
    rewards: list[float]
    recent_failures: list[Failure | None]
    kills: dict[bytes, list[str]]
    quarantined: dict[bytes, Task]
    submitted_failures: dict[str, str] = {}
    unusable_in_row: int = 0
    rowless: int = 0
    rowless_since_batch: dict[str, int] = {}
    returned: dict[int, None] = {}
    prompts_differ_since_batch: dict[str, int] = {}
    rewinds: dict[str, Version] = {}


class SnapshotGroup(SnapshotRow, frozen=True):
    """A group with its members, and the id of its evaluation."""

    group: GroupRow
    evaluation: str
    members: list[EpisodeRow]


class SnapshotRun(SnapshotRow, frozen=True):
    """A run, with the ids of its groups and episodes as references. A group is a ``SnapshotGroup`` encoded separately:
    the garbage collector would traverse a tree of a million rows again and again."""

    spec: dict[str, Any]
    run: RunRow
    versions: VersionsRow
    policy_servers: PolicyServersRow
    ledger: LedgerRow
    evaluations: list[EvaluationRow]
    groups: list[msgspec.Raw]
    batches: list[tuple[BatchRow, list[str]]]
    undecided: list[str]
    queue: list[str]
    evaluation_queue: list[str]
    shares: SharesRow = SharesRow()


class SnapshotWorker(SnapshotRow, frozen=True):
    """A worker that holds attempts, or drains."""

    name: str
    pool: str
    attempts: list[str]
    instance: str = ""


class SnapshotFormat(SnapshotRow, frozen=True):
    """The beginning of every snapshot, common to all formats."""

    format: int


class SnapshotState(SnapshotRow, frozen=True):
    format: int
    runs: list[SnapshotRun]
    workers: list[SnapshotWorker]
    draining: list[str]
    drain_keys: dict[str, str] = {}


def _reader(row: type[SnapshotRow]) -> Callable[[Any], Any]:
    """A function that reads the attributes of a row as a tuple."""
    return attrgetter(*row.__struct_fields__)


_episode, _group, _batch = _reader(EpisodeRow), _reader(GroupRow), _reader(BatchRow)
_evaluation, _versions = _reader(EvaluationRow), _reader(VersionsRow)
_policy_servers, _ledger, _run = _reader(PolicyServersRow), _reader(LedgerRow), _reader(RunRow)
_shares = _reader(SharesRow)


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be stored in a snapshot")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_format_decoder = msgspec.msgpack.Decoder(SnapshotFormat)
_decoder = msgspec.msgpack.Decoder(SnapshotState)
_group_decoder = msgspec.msgpack.Decoder(SnapshotGroup)


def snapshot(state: SchedulerState) -> bytes:
    """The durable state."""
    parts = (
        FORMAT,
        [_stored_run(run) for run in state.runs.values()],
        [
            (worker.name, worker.pool, list(worker.attempts), worker.instance)
            for worker in state.workers.by_name.values()
            if worker.attempts or worker.name in state.workers.draining
        ],
        sorted(state.workers.draining),
        state.workers.drain_keys,
    )
    return _encoder.encode(parts)


def _stored_run(run: Run) -> tuple[Any, ...]:
    return (
        msgspec.Raw(run.plain_spec),
        _run(run),
        _versions(run.versions),
        _policy_servers(run.policy_servers),
        _ledger(run.ledger),
        [_evaluation(evaluation) for evaluation in run.evaluations.values()],
        [msgspec.Raw(_encoder.encode(_stored_group(group))) for group in run.groups.values()],
        [(_batch(batch), [group.id for group in batch.groups]) for batch in run.batches.values()],
        list(run.undecided),
        [episode.id for episode in run.queue if episode.state == "queued"],
        [episode.id for episode in run.evaluation_queue if episode.state == "queued"],
        _shares(run.shares),
    )


def _stored_group(group: Group) -> tuple[Any, ...]:
    evaluation = "" if group.evaluation is None else group.evaluation.id
    return _group(group), evaluation, [_episode(episode) for episode in group.members]


def restore(state: SchedulerState, data: bytes, now: float) -> None:
    """Restore a snapshot into an empty state. Raises CorruptRecord."""
    episodes = state.episodes
    try:
        _require_format(_format_decoder.decode(data).format)
        stored = _decoder.decode(data)
        runs = [_restored_run(row, state, now) for row in stored.runs]
        attempts_of = [(row, [episodes[id] for id in row.attempts]) for row in stored.workers]
    except (KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        episodes.clear()
        raise CorruptRecord(
            f"A snapshot of the scheduler is damaged: {error!r}.",
            hint="Earlier files of the log hold the same data; `headrace fsck` lists all damage.",
        ) from error
    for run in runs:
        state.add_run(run)
    for row, attempts in attempts_of:
        _restore_worker(state, row, attempts, now)
    state.workers.draining.update(stored.draining)
    state.workers.drain_keys.update(stored.drain_keys)


def _require_format(number: int) -> None:
    if number != FORMAT:
        raise CorruptRecord(
            f"A snapshot of the scheduler has format {number}; this version of Headrace reads format {FORMAT}.",
            hint="Start the version that wrote it.",
        )


def _restored_run(stored: SnapshotRun, state: SchedulerState, now: float) -> Run:
    run = stored_run(state, stored.spec)
    episodes = state.episodes
    _fill(run, stored.run)
    _set(run.versions, stored.versions)
    _set(run.policy_servers, stored.policy_servers)
    _fill(run.ledger, stored.ledger)
    _fill(run.shares, stored.shares)
    for row in stored.evaluations:
        evaluation = Evaluation(row.id, row.version, row.wanted, row.deadline_s, row.temperature, now)
        _set(evaluation, row)
        run.evaluations[row.id] = evaluation
        if not row.reason:
            run.active_evaluations[row.id] = evaluation
    for raw in stored.groups:
        _restore_group(run, _group_decoder.decode(raw), now)
    for group in sorted(run.open_groups.values(), key=lambda group: group.dispatch_order):
        if group.dispatch_order >= 0 and run.is_for_any_pull(group):
            run.in_progress[group.id] = group
    for batch_row, ids in stored.batches:
        batch = OpenBatch(batch_row.id, [run.groups[id] for id in ids], batch_row.version)
        _set(batch, batch_row)
        batch.deadline = now + run.spec.batch_lease_s
        run.batches[batch.id] = batch
    run.undecided.update((id, run.groups[id]) for id in stored.undecided)
    run.queue.extend(episodes[id] for id in stored.queue)
    run.evaluation_queue.extend(episodes[id] for id in stored.evaluation_queue)
    return run


def _restore_group(run: Run, stored: SnapshotGroup, now: float) -> None:
    row = stored.group
    evaluation = run.evaluations[stored.evaluation] if stored.evaluation else None
    group = Group(run.name, row.id, row.task, row.position, row.submitted, evaluation)
    _set(group, row)
    group.begun_at = now
    run.groups[group.id] = group
    if group.state == "open":
        run.open_groups[group.id] = group
    elif group.state == "eligible":
        run.index_of(group).add(group, run.versions)
    if evaluation is not None:
        evaluation.groups.append(group.id)
    for member in stored.members:
        episode = Episode(group, member.id, member.member, member.sampling_seed)
        _set(episode, member)
        group.members.append(episode)
        run.episodes[episode.id] = episode


def _restore_worker(state: SchedulerState, row: SnapshotWorker, attempts: Iterable[Episode], now: float) -> None:
    worker: WorkerState = state.workers.named(row.name, row.pool, now)
    worker.instance = row.instance
    for episode in attempts:
        worker.attempts[episode.id] = episode
        episode.deadline = now + state.run_of(episode).spec.attempt_lease_s
        state.workers.watch(worker, episode.deadline)


def _set(target: Any, row: SnapshotRow) -> None:
    """Set the attributes of a row."""
    for name, value in zip(row.__struct_fields__, msgspec.structs.astuple(row), strict=True):
        setattr(target, name, value)


def _fill(target: Any, row: SnapshotRow) -> None:
    """Set the attributes of a row; bounded queues and counters are filled in place."""
    for name, value in zip(row.__struct_fields__, msgspec.structs.astuple(row), strict=True):
        current = getattr(target, name)
        if isinstance(current, deque):
            current.extend(value)
        elif isinstance(current, Counter):
            current.update(value)
        else:
            setattr(target, name, value)
