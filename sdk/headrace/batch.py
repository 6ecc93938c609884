"""The batch, as a learner reads it: a manifest, columns, and the stored records unchanged.

* A learner reads everything without a copy: columns and tokens are views into the body.
* Each row has its own advantages, at its own sampled positions and nowhere else.
* A body whose counts or sizes disagree with its manifest is refused; ``verify`` computes moments and advantages again.

The layout of the body is in :mod:`headrace.forming`, which makes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.codec import ALIGNMENT, Buffer, decode, decode_head, record_sizes
from headrace.errors import InvalidRequest
from headrace.estimators import F64, returns_to_go
from headrace.forming import (
    MAGIC,
    PER_ROW,
    PER_TURN,
    PREFIX,
    BatchHead,
    Column,
    build_head,
    compute,
    moment_set,
    padded,
)
from headrace.manifest import GroupEntry, Manifest, MomentSet
from headrace.strands import GroupInput, Strands, collect_strands
from headrace.trajectory import SCHEMA, Segment, Trajectory, Turn, Version, VersionRun
from headrace.validation import validate

__all__ = ["Batch", "BatchHead", "GroupInput", "Manifest", "Row", "build_head"]

_head_decoder = msgspec.msgpack.Decoder(BatchHead)
_PLACE = ("row_trajectory", "row_segment", "row_group")

MOMENT_TOLERANCE = 1e-12
"""Relative. Two machines may add in another order; more than this is another batch."""
ADVANTAGE_TOLERANCE = 1e-9
"""Relative (1e-12 absolute), as the estimators are defined: whitening enlarges rounding where the spread is small."""


def read_manifest(buffer: Buffer) -> Manifest:
    """The manifest of a body, or of the part of it that ``build_head`` made. Raises InvalidRequest if it is none."""
    return _read_head(memoryview(buffer))[0].manifest


class RowAdvantages(NamedTuple):
    """What a batch says of one row: its segment in the trajectory, and ``returns`` and ``advantages`` f64[turns].
    ``advantages`` is None with estimator ``none``."""

    segment: int
    returns: F64
    advantages: F64 | None


def read_advantages(buffer: Buffer, trajectory: str) -> list[RowAdvantages]:
    """What a body, or the part of it that ``build_head`` made, says of the rows of one trajectory; nothing if the
    trajectory is not in it. Raises InvalidRequest if the bytes are no batch."""
    view = memoryview(buffer)
    head, start, end = _read_head(view)
    columns = {column.name: _view_column(view, column, start, end) for column in head.columns}
    if trajectory not in head.manifest.trajectories:
        return []
    offsets = columns["row_turn_offsets"]
    found = []
    for row in np.flatnonzero(columns["row_trajectory"] == head.manifest.trajectories.index(trajectory)):
        turns = slice(offsets[row], offsets[row + 1])
        advantages = columns.get("advantages")
        found.append(
            RowAdvantages(
                int(columns["row_segment"][row]),
                columns["returns"][turns],
                None if advantages is None else advantages[turns],
            )
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One segment to train on. Arrays are read-only views into the batch.

    ``returns``, ``rewards``, ``weights`` f64[turns]; a turn's weight is 1, or its sampled tokens with token weighting.
    """

    index: int
    trajectory: Trajectory
    segment: Segment
    group: GroupEntry
    returns: F64
    rewards: F64
    weights: F64
    served_advantages: F64 | None

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """i32[n]."""
        return self.segment.token_ids

    @property
    def sampled(self) -> npt.NDArray[np.uint8]:
        """u8[n], 1 where the policy chose the token."""
        return self.segment.sampled

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """f32[n], at the position of the token it scores; 0 where not sampled."""
        return self.segment.logprobs

    @property
    def turns(self) -> list[Turn]:
        return self.segment.turns

    @property
    def versions(self) -> list[VersionRun]:
        return self.segment.versions

    @property
    def temperature(self) -> float:
        return self.segment.sampling.temperature

    @property
    def advantages(self) -> F64:
        """f64[turns]. Raises InvalidRequest with estimator ``none``."""
        if self.served_advantages is None:
            raise InvalidRequest(
                "The run's estimator is 'none', so the batch carries no advantages.",
                hint="Compute your own from returns, or choose an estimator in the run spec.",
            )
        return self.served_advantages

    def token_advantages(self) -> npt.NDArray[np.float32]:
        """f32[n]: each turn's advantage at its own sampled positions, 0 elsewhere."""
        found = np.zeros(len(self.segment.token_ids), np.float32)
        for turn, advantage in zip(self.segment.turns, self.advantages, strict=True):
            found[turn.start : turn.end] = advantage
        return found


class Batch:
    """A pulled batch. ``generation`` and ``lease_s`` belong to its lease and travel beside the body.

    ``columns`` are read-only views by name; ``records`` is the part of the body that holds the records.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Mapping[str, npt.NDArray[Any]],
        records: memoryview,
        generation: int,
        lease_s: float,
    ) -> None:
        self.manifest = manifest
        self.columns = columns
        self.records = records
        self.generation = generation
        self.lease_s = lease_s

    @classmethod
    def parse(cls, body: Buffer, *, generation: int = 0, lease_s: float = 0.0) -> Batch:
        """Read a body, without a copy. Raises InvalidRequest if it is no batch or its counts or sizes disagree with
        its manifest; ``verify`` checks the rest."""
        view = memoryview(body).toreadonly()
        head, columns_start, records_start = _read_head(view)
        columns = {column.name: _view_column(view, column, columns_start, records_start) for column in head.columns}
        batch = cls(head.manifest, columns, view[records_start:], generation, lease_s)
        batch._check_counts()
        return batch

    @property
    def id(self) -> str:
        return self.manifest.batch

    @property
    def run(self) -> str:
        return self.manifest.run

    @property
    def version(self) -> Version:
        """The run's version when the batch was formed."""
        return self.manifest.version

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories, in the order of the records. Raises UnreadableRecord."""
        return [decode(record) for record in self._record_views()]

    @cached_property
    def rows(self) -> list[Row]:
        """All rows, in the order of the columns."""
        columns = self.columns
        starts = columns["row_turn_offsets"].tolist()
        served = columns.get("advantages")
        rows = []
        for index, (t, s, g) in enumerate(zip(*(columns[name].tolist() for name in _PLACE), strict=True)):
            segments = self.trajectories[t].segments
            span = slice(starts[index], starts[index + 1])
            if s >= len(segments) or len(segments[s].turns) != span.stop - span.start:
                raise self._disagrees(f"row {index} is segment {s} of trajectory {t}, which is not like that")
            rows.append(
                Row(
                    index=index,
                    trajectory=self.trajectories[t],
                    segment=segments[s],
                    group=self.manifest.groups[g],
                    returns=columns["returns"][span],
                    rewards=columns["rewards"][span],
                    weights=columns["turn_weights"][span],
                    served_advantages=None if served is None else served[span],
                )
            )
        return rows

    def strands(self) -> Strands:
        """The flat arrays behind the estimators, for computing one's own; ``row_turns`` leads back to the columns."""
        return collect_strands(self._group_inputs())

    def moments(self) -> MomentSet:
        """Moments of what was received, computed here."""
        strands = self.strands()
        experience = strands.experience
        returns = returns_to_go(experience.rewards, experience.offsets, self.manifest.estimator.gamma)
        return moment_set(strands, returns, None)

    def verify(self) -> None:
        """Validate every record, and compute manifest and columns again. Raises InvalidTrajectory for a record that is
        not valid, InvalidRequest where the batch is not what its records give."""
        for trajectory in self.trajectories:
            validate(trajectory)
        stated = self.manifest
        with np.errstate(all="ignore"):  # a number that was damaged may overflow; then it differs, and is refused
            computed = compute(
                batch=stated.batch,
                run=stated.run,
                estimator=stated.estimator,
                version=stated.version,
                groups=self._group_inputs(),
            )
        for name, column in computed.columns.items():
            received = self.columns.get(name)
            tolerance = ADVANTAGE_TOLERANCE if name == "advantages" else MOMENT_TOLERANCE
            if received is None or not _agree(received, column, tolerance):
                raise self._disagrees(f"column {name!r} is not what its records give")
        for path, ours, theirs in _differences(msgspec.to_builtins(computed.manifest), msgspec.to_builtins(stated)):
            raise self._disagrees(f"{path} is {theirs!r}, its records give {ours!r}")

    def _group_inputs(self) -> list[GroupInput]:
        heads = [(decode_head(record), len(record)) for record in self._record_views()]
        inputs, start = [], 0
        for group in self.manifest.groups:
            members = heads[start : start + group.actual]
            inputs.append(GroupInput(group.id, group.task, group.expected, members))
            start += group.actual
        return inputs

    def _record_views(self) -> list[memoryview]:
        offsets = self.columns["record_offsets"].tolist()
        return [self.records[a:b] for a, b in itertools.pairwise(offsets)]

    def _check_counts(self) -> None:
        """What can be seen without decoding a record."""
        counts, columns = self.manifest.counts, self.columns
        per_turn = [name for name in PER_TURN if name != "advantages" or self.manifest.estimator.name != "none"]
        lengths = {
            **dict.fromkeys(per_turn, counts.turns),
            **dict.fromkeys(PER_ROW, counts.rows),
            "row_turn_offsets": counts.rows + 1,
            "record_offsets": counts.trajectories + 1,
        }
        for name, length in lengths.items():
            if name not in columns or len(columns[name]) != length:
                raise self._disagrees(f"column {name!r} is missing or does not have {length} entries")
        for name, end in (("row_turn_offsets", counts.turns), ("record_offsets", len(self.records))):
            offsets = columns[name]
            if offsets[0] != 0 or offsets[-1] != end or np.any(np.diff(offsets) < 0):
                raise self._disagrees(f"column {name!r} does not rise from 0 to {end}")
        for name, below in (
            ("row_trajectory", counts.trajectories),
            ("row_group", counts.groups),
            ("row_segment", 1 << 31),
        ):
            if np.any((columns[name] < 0) | (columns[name] >= below)):
                raise self._disagrees(f"column {name!r} points outside [0, {below})")
        for what, stated, found in (
            ("trajectories", counts.trajectories, len(self.manifest.trajectories)),
            ("groups", counts.groups, len(self.manifest.groups)),
            ("members of groups", counts.trajectories, sum(group.actual for group in self.manifest.groups)),
            ("sampled tokens", counts.sampled_tokens, int(columns["turn_tokens"].sum())),
            ("tokens", counts.tokens, int(columns["row_tokens"].sum())),
        ):
            if stated != found:
                raise self._disagrees(f"it counts {stated} {what}, there are {found}")
        offsets = columns["record_offsets"]
        sizes, stated_sizes = record_sizes(self.records, offsets[:-1]), np.diff(offsets)
        for position in np.flatnonzero(sizes != stated_sizes)[:1]:
            said = f"is {sizes[position]} bytes long" if sizes[position] >= 0 else "is no record"
            raise self._disagrees(f"record {position} {said}, not one of {stated_sizes[position]} bytes")

    def _disagrees(self, problem: str) -> InvalidRequest:
        return InvalidRequest(
            f"Batch {self.manifest.batch} disagrees with its manifest: {problem}.",
            hint="Nothing of it can be trusted; give it back and pull again.",
            batch=self.manifest.batch,
        )


def _read_head(view: memoryview) -> tuple[BatchHead, int, int]:
    """Head, start of the columns, start of the records."""
    if len(view) < PREFIX.size:
        raise _no_batch(f"{len(view)} bytes are too few")
    magic, schema, reserved, length, records_start = PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise _no_batch(f"they start with {bytes(magic)!r}, not {MAGIC!r}")
    if schema != SCHEMA:
        raise _no_batch(f"they have wire schema {schema}, this reader knows {SCHEMA}")
    columns_start = padded(PREFIX.size + length)
    if reserved or records_start % ALIGNMENT or not columns_start <= records_start <= len(view):
        raise _no_batch(f"lengths do not fit: head {length}, records from {records_start}, body {len(view)} bytes")
    try:
        head = _head_decoder.decode(view[PREFIX.size : PREFIX.size + length])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _no_batch(f"the head does not decode: {error}") from error
    return head, columns_start, records_start


def _view_column(view: memoryview, column: Column, start: int, end: int) -> npt.NDArray[Any]:
    begin = start + column.offset
    if column.offset < 0 or column.offset % ALIGNMENT or column.length < 0 or begin + 8 * column.length > end:
        raise _no_batch(f"column {column.name!r} lies outside its part of the body")
    return np.frombuffer(view, column.dtype, column.length, begin)


def _no_batch(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"The bytes are no batch: {problem}.", hint="The body is damaged, cut short, or of another version of Headrace."
    )


def _differences(ours: Any, theirs: Any, path: str = "manifest") -> list[tuple[str, Any, Any]]:
    """Places where two trees of builtins differ, floats beyond rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [found for key in ours for found in _differences(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [found for k, (one, other) in pairs for found in _differences(one, other, f"{path}[{k}]")]
    if isinstance(ours, float) and isinstance(theirs, float | int):
        return [] if _agree(np.array([theirs]), np.array([ours]), MOMENT_TOLERANCE) else [(path, ours, theirs)]
    return [] if ours == theirs else [(path, ours, theirs)]


def _agree(received: npt.NDArray[Any], computed: npt.NDArray[Any], tolerance: float) -> bool:
    if received.shape != computed.shape:
        return False
    if computed.dtype.kind != "f":
        return bool(np.array_equal(received, computed))
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(received - computed) <= 1e-12 + tolerance * np.abs(computed)))
