"""The head and the body of a planned batch, computed from stored records.

* A record that is damaged, or has a reward beyond the bound of today, is left out of its batch, and logged; a group
  without an intact record is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headrace.batch.body import read_manifest
from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.errors import CorruptRecord
from headrace.runspec import RunSpec
from headrace.server import logs
from headrace.validation import MAX_REWARD
from headrace.wire.codec import TrajectoryHead, decode_head
from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Log
from headrace_orchestrator.scheduler.commands.pull_plan import Form
from headrace_orchestrator.service.batches.bodies import BatchBody, is_small
from headrace_orchestrator.service.storage.store import Store

_log = logs.logger(__name__)


@dataclass(frozen=True)
class BuiltBatch:
    """A batch that can be frozen: its plan without damaged records, its head, and its body (head and records), empty
    if that is too large to be kept. ``lost``: groups without an intact record; ``damaged``: number of records that were
    left out."""

    plan: Form
    head: bytes
    body: BatchBody
    trajectories: int
    lost: Sequence[str]
    damaged: int

    @property
    def staleness(self) -> int:
        """Staleness of the oldest row."""
        return read_manifest(self.head).staleness_max


class PlannedGroup(NamedTuple):
    """A group of a planned batch: its size at admission, and the locations of its records, None for lost ones."""

    id: str
    expected: int
    members: dict[str, Location | None]


def planned_groups(store: Store, run: str, plan: Form) -> list[PlannedGroup]:
    """The groups of a planned batch with the current locations of their records."""
    groups = store.index.groups.get(run, {})
    planned = []
    for id, trajectories in plan.groups:
        group = groups.get(id)
        locations = {} if group is None else dict(group)
        members = {trajectory: locations.get(trajectory) for trajectory in trajectories}
        planned.append(PlannedGroup(id, 0 if group is None else group.expected, members))
    return planned


def build_batch(log: Log, plan: Form, groups: Sequence[PlannedGroup], spec: RunSpec) -> BuiltBatch:
    """Read the members' records and compute the head. Blocking."""
    kept: list[tuple[str, list[str]]] = []
    inputs: list[GroupInput] = []
    records: list[bytes] = []
    for group in groups:
        intact = _read_group(log, group)
        if intact:
            members = [(head, len(record)) for head, record in intact.values()]
            kept.append((group.id, list(intact)))
            inputs.append(GroupInput(group.id, members[0][0].task, group.expected, members))
            records += [record for _, record in intact.values()]
    head = build_head(
        batch=plan.batch,
        run=spec.name,
        estimator=spec.estimator,
        version=plan.version,
        groups=inputs,
        selection=plan.selection,
        bin_tokens=spec.bin_tokens or 0,
    )
    kept_ids = {id for id, _ in kept}
    lost = [group.id for group in groups if group.id not in kept_ids]
    damaged = sum(len(trajectories) for _, trajectories in plan.groups) - len(records)
    body = (head, *records)
    kept_body = body if is_small(sum(map(len, body))) else ()
    return BuiltBatch(msgspec.structs.replace(plan, groups=kept), head, kept_body, len(records), lost, damaged)


def _read_group(log: Log, group: PlannedGroup) -> dict[str, tuple[TrajectoryHead, bytes]]:
    """The heads and bytes of the intact records of a group by id."""
    intact: dict[str, tuple[TrajectoryHead, bytes]] = {}
    for trajectory, location in group.members.items():
        try:
            if location is None:
                raise CorruptRecord("It was lost in the log.")
            record = log.read(location)
            head = decode_head(record)
            _require_bounded(head)
            intact[trajectory] = head, record
        except CorruptRecord as error:
            _log.error("damaged record left out of a batch", group=group.id, trajectory=trajectory, detail=error.detail)
    return intact


def _require_bounded(head: TrajectoryHead) -> None:
    """Raise CorruptRecord for a reward that only an earlier version accepted: in float32 it may be infinite."""
    for segment in head.segments:
        for turn in segment.turns:
            if not -MAX_REWARD <= turn.reward <= MAX_REWARD:
                raise CorruptRecord(f"Turn {turn.index} has the reward {turn.reward:g}, beyond {MAX_REWARD:g}.")
