"""The durable state as bytes: what a log file opens with, so that a start need not read the files before it.

* A restored scheduler has the same durable state, and goes on to the same decisions.
* After a restore every lease has a full term, as after a replay.
* A damaged snapshot, or one of a format that is not known, is refused whole; nothing of it is taken.
* What is soft is not in it; a slot of the state is named here or named soft.

Rows are arrays: the fields of a row class are the attributes of what it stands for, in the order of the bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import msgspec

from headrace.errors import CorruptRecord
from headrace.runspec import RunSpec
from headrace.trajectory import Failure, Task, Version
from headrace.wire.messages import EvaluationEpisode, Weights
from headrace_orchestrator.scheduler.state.batches import Batch, Closed, Sessions
from headrace_orchestrator.scheduler.state.evaluations import Evaluation
from headrace_orchestrator.scheduler.state.groups import Episode, EpisodeState, Group, GroupState
from headrace_orchestrator.scheduler.state.run import Run
from headrace_orchestrator.scheduler.state.scheduler_state import SchedulerState
from headrace_orchestrator.scheduler.state.workers import Worker

FORMAT = 3
"""Of the bytes, and the first thing in them; another one is refused."""


class Row(msgspec.Struct, array_like=True, frozen=True):
    """Base of the rows."""


class EpisodeRow(Row, frozen=True):
    id: str
    member: int
    sampling_seed: int
    state: EpisodeState
    history: list[tuple[str, str]]
    attempt: int
    nonce: str
    worker: str
    version: Version | None
    draws: int
    losses: int
    low: Version | None
    high: Version | None
    rewards: dict[str, float]
    trajectory: str
    failure: Failure | None
    worker_wrote: bool


class GroupRow(Row, frozen=True):
    id: str
    task: Task
    position: int
    submitted: bool
    adapters: dict[str, str]
    state: GroupState
    history: list[tuple[str, str]]
    size: int
    extra: int
    live: int
    usable: int
    order: int
    uses: int
    priority: float
    records: bytes
    kept: tuple[Version, ...]
    row_tokens: int
    longest_row: int
    held_bytes: int
    damaged: bool
    batch: str
    reason: str


class BatchRow(Row, frozen=True):
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
    released: str
    before: str


class EvaluationRow(Row, frozen=True):
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


class VersionsRow(Row, frozen=True):
    now: Version
    forks: list[Version | None]
    tops: list[int]


class PolicyServersRow(Row, frozen=True):
    servers: dict[str, bool]
    target: Version | None
    weights: Weights | None
    held: Version
    loaded: Weights | None
    skipped: list[Version]


class LedgerRow(Row, frozen=True):
    in_flight: int
    unfinished: int
    held_bytes: int
    sizes: list[int]
    tokens: list[int]
    estimate: int
    batch_groups: int


class RunRow(Row, frozen=True):
    closed: bool
    position: int
    admitted: int
    queued: int
    evaluation_queued: int
    leased: int
    evaluation_leased: int
    states: dict[str, int]
    open: int
    next_order: int
    closed_batches: dict[str, Closed]
    batches_formed: int
    sessions: dict[str, Sessions]
    batches_acked: int
    selected: dict[str, int]
    submitted_ends: dict[str, str]
    retired: dict[str, int]
    stale_since_batch: int
    zero_variance_since_batch: int
    zero_variance_tokens: int
    too_long_since_batch: int
    stale_in_row: int
    ends: dict[str, int]
    rewards: list[float]
    recent: list[Failure | None]
    kills: dict[bytes, list[str]]
    quarantined: dict[bytes, Task]
    submitted_failures: dict[str, str] = {}


class GroupWhole(Row, frozen=True):
    group: GroupRow
    evaluation: str
    members: list[EpisodeRow]


class RunState(Row, frozen=True):
    """A run, with what refers to groups and episodes by id. A group is a ``GroupWhole`` encoded by itself: the garbage
    collector would go through a tree of a million rows again and again."""

    given: dict[str, Any]
    run: RunRow
    versions: VersionsRow
    policy_servers: PolicyServersRow
    ledger: LedgerRow
    evaluations: list[EvaluationRow]
    groups: list[msgspec.Raw]
    batches: list[tuple[BatchRow, list[str]]]
    due: list[str]
    queue: list[str]
    evaluation_queue: list[str]


class WorkerState(Row, frozen=True):
    """A worker that holds attempts, or drains."""

    name: str
    pool: str
    attempts: list[str]


class Format(Row, frozen=True):
    """What every snapshot begins with, whatever comes behind."""

    format: int


class State(Row, frozen=True):
    format: int
    runs: list[RunState]
    workers: list[WorkerState]
    draining: list[str]


def _fields(row: type[Row]) -> Callable[[Any], Any]:
    """Reads the attributes that a row has, as a tuple."""
    return attrgetter(*row.__struct_fields__)


_episode, _group, _batch = _fields(EpisodeRow), _fields(GroupRow), _fields(BatchRow)
_evaluation, _versions = _fields(EvaluationRow), _fields(VersionsRow)
_policy_servers, _ledger, _run = _fields(PolicyServersRow), _fields(LedgerRow), _fields(RunRow)


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(f"a {type(value).__name__} has no place in a snapshot")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_format_decoder = msgspec.msgpack.Decoder(Format)
_decoder = msgspec.msgpack.Decoder(State)
_group_decoder = msgspec.msgpack.Decoder(GroupWhole)


def snapshot(state: SchedulerState) -> bytes:
    """The durable state."""
    parts = (
        FORMAT,
        [_run_state(run) for run in state.runs.values()],
        [
            (worker.name, worker.pool, list(worker.attempts))
            for worker in state.workers.by_name.values()
            if worker.attempts or worker.name in state.workers.draining
        ],
        sorted(state.workers.draining),
    )
    return _encoder.encode(parts)


def _run_state(run: Run) -> tuple[Any, ...]:
    return (
        run.given,
        _run(run),
        _versions(run.versions),
        _policy_servers(run.policy_servers),
        _ledger(run.ledger),
        [_evaluation(evaluation) for evaluation in run.evaluations.values()],
        [msgspec.Raw(_encoder.encode(_whole(group))) for group in run.groups.values()],
        [(_batch(batch), [group.id for group in batch.groups]) for batch in run.batches.values()],
        list(run.due),
        [episode.id for episode in run.queue if episode.state == "queued"],
        [episode.id for episode in run.evaluation_queue if episode.state == "queued"],
    )


def _whole(group: Group) -> tuple[Any, ...]:
    evaluation = "" if group.evaluation is None else group.evaluation.id
    return _group(group), evaluation, [_episode(episode) for episode in group.members]


def restore(state: SchedulerState, data: bytes, now: float) -> None:
    """Bring a snapshot into a book that knows nothing yet. Raises CorruptRecord."""
    episodes = state.episodes
    try:
        _require_format(_format_decoder.decode(data).format)
        stored = _decoder.decode(data)
        runs = [_restored_run(row, state, now) for row in stored.runs]
        held = [(row, [episodes[id] for id in row.attempts]) for row in stored.workers]
    except (KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        episodes.clear()
        raise CorruptRecord(
            f"A snapshot of the scheduler is damaged: {error!r}.",
            hint="The files of the log before it say the same; `headrace fsck` lists all damage.",
        ) from error
    for run in runs:
        state.add_run(run)
    for row, attempts in held:
        _restore_worker(state, row, attempts, now)
    state.workers.draining.update(stored.draining)


def _require_format(found: int) -> None:
    if found != FORMAT:
        raise CorruptRecord(
            f"A snapshot of the scheduler is of format {found}; this version of Headrace reads format {FORMAT}.",
            hint="Start the version that wrote it.",
        )


def _restored_run(stored: RunState, state: SchedulerState, now: float) -> Run:
    run = Run(RunSpec.model_validate(stored.given), state.bounds, state.episodes)
    episodes = state.episodes
    _fill(run, stored.run)
    _set(run.versions, stored.versions)
    _set(run.policy_servers, stored.policy_servers)
    _fill(run.ledger, stored.ledger)
    for row in stored.evaluations:
        evaluation = Evaluation(row.id, row.version, row.wanted, row.deadline_s, row.temperature, now)
        _set(evaluation, row)
        run.evaluations[row.id] = evaluation
        if not row.reason:
            run.active_evaluations[row.id] = evaluation
    for raw in stored.groups:
        _restore_group(run, _group_decoder.decode(raw))
    for batch_row, ids in stored.batches:
        batch = Batch(batch_row.id, [run.groups[id] for id in ids], batch_row.version)
        _set(batch, batch_row)
        batch.deadline = now + run.spec.batch_lease_s
        run.batches[batch.id] = batch
    run.due.update((id, run.groups[id]) for id in stored.due)
    run.queue.extend(episodes[id] for id in stored.queue)
    run.evaluation_queue.extend(episodes[id] for id in stored.evaluation_queue)
    return run


def _restore_group(run: Run, whole: GroupWhole) -> None:
    row = whole.group
    evaluation = run.evaluations[whole.evaluation] if whole.evaluation else None
    group = Group(run, row.id, row.task, row.position, row.submitted, evaluation)
    _set(group, row)
    run.groups[group.id] = group
    if group.state == "open":
        run.open_groups[group.id] = group
    elif group.state == "eligible":
        (run.eligible if run.plain(group) else run.apart).add(group, run.versions)
    if evaluation is not None:
        evaluation.groups.append(group)
    for member in whole.members:
        episode = Episode(group, member.id, member.member, member.sampling_seed)
        _set(episode, member)
        group.members.append(episode)
        run.episodes[episode.id] = episode


def _restore_worker(state: SchedulerState, row: WorkerState, attempts: Iterable[Episode], now: float) -> None:
    worker: Worker = state.workers.named(row.name, row.pool, now)
    for episode in attempts:
        worker.attempts[episode.id] = episode
        episode.deadline = now + episode.group.run.spec.attempt_lease_s
        state.workers.watch(worker, episode.deadline)


def _set(target: Any, row: Row) -> None:
    """Set the attributes that a row has."""
    for name, value in zip(row.__struct_fields__, msgspec.structs.astuple(row), strict=True):
        setattr(target, name, value)


def _fill(target: Any, row: Row) -> None:
    """Set the attributes that a row has; what is a memory of its own kind is filled."""
    for name, value in zip(row.__struct_fields__, msgspec.structs.astuple(row), strict=True):
        there = getattr(target, name)
        if isinstance(there, deque):
            there.extend(value)
        elif isinstance(there, Counter):
            there.update(value)
        else:
            setattr(target, name, value)
