"""The batch, as a learner reads it: a manifest, columns, and the stored records unchanged.

* A learner reads everything without a copy: columns and tokens are views into the body.
* Each row has its own advantages, at its own sampled positions and nowhere else.
* A body whose counts or sizes disagree with its manifest is refused; ``verify`` computes moments and advantages again.
* A shard is refused where the shards do not merge to the manifest.
* ``recut`` gives what the batch would be of the rows that are kept, exactly.

The layout of the body is in :mod:`headrace.batch.body`.
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

from headrace.batch import shards
from headrace.batch.body import PER_ROW, PER_TURN, BatchHead, read_head
from headrace.batch.build import build_head, compute, moment_set
from headrace.batch.estimator_inputs import GroupInput, Strands, collect_strands
from headrace.batch.manifest import GroupEntry, Manifest, MomentSet, Shard, ShardPart
from headrace.errors import HeadraceError, InvalidRequest
from headrace.estimators import F64, returns_to_go
from headrace.trajectory import Segment, Trajectory, Turn, Version, VersionRun
from headrace.validation import validate
from headrace.wire.codec import Buffer, TrajectoryHead, decode, decode_head, record_sizes

__all__ = ["Batch", "BatchHead", "GroupInput", "Manifest", "Row", "Shard", "ShardPart", "build_head"]

_PLACE = ("row_trajectory", "row_segment", "row_group")

MOMENT_TOLERANCE = 1e-12
"""Relative. Two machines may add in another order; more than this is another batch."""
ADVANTAGE_TOLERANCE = 1e-9
"""Relative (1e-12 absolute), as the estimators are defined: whitening enlarges rounding where the spread is small."""


def read_manifest(buffer: Buffer) -> Manifest:
    """The manifest of a body, or of the part of it that ``build_head`` made. Raises InvalidRequest if it is none."""
    return read_head(buffer).manifest


class RowAdvantages(NamedTuple):
    """What a batch says of one row: its segment in the trajectory, and ``returns`` and ``advantages`` f64[turns].
    ``advantages`` is None with estimator ``none``."""

    segment: int
    returns: F64
    advantages: F64 | None


def read_advantages(buffer: Buffer, trajectory: str) -> list[RowAdvantages]:
    """What a body, or the part of it that ``build_head`` made, says of the rows of one trajectory; nothing if the
    trajectory is not in it. Raises InvalidRequest if the bytes are no batch."""
    head = read_head(buffer)
    columns = head.columns
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

    ``index`` is its number in the whole batch, ``bin`` the bin that it is packed into. ``returns``, ``rewards``,
    ``weights`` f64[turns]; a turn's weight is 1, or its sampled tokens with token weighting.
    """

    index: int
    bin: int
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
    """A pulled batch, or a shard of one. ``generation`` and ``lease_s`` belong to its lease and travel beside the body.

    ``manifest`` is that of the whole batch; ``shard`` says which part this is, None for the whole. ``columns`` are
    read-only views by name; ``records`` is the part of the body that holds the records.
    """

    def __init__(
        self,
        manifest: Manifest,
        columns: Mapping[str, npt.NDArray[Any]],
        records: memoryview,
        generation: int,
        lease_s: float,
        *,
        shard: Shard | None = None,
    ) -> None:
        self.manifest = manifest
        self.columns = columns
        self.records = records
        self.generation = generation
        self.lease_s = lease_s
        self.shard = shard
        self.assets: dict[str, memoryview | HeadraceError] = {}
        """The assets that were pulled with it, by name, or what is wrong with them."""
        self._recut = False

    def __repr__(self) -> str:
        rows = len(self.columns["row_tokens"])
        shard = "" if self.shard is None else f", shard={self.shard.number} of {len(self.shard.parts)}"
        return f"Batch(id={self.id!r}, run={self.run!r}, version={str(self.version)!r}, rows={rows}{shard})"

    @classmethod
    def parse(cls, body: Buffer, *, generation: int = 0, lease_s: float = 0.0) -> Batch:
        """Read a body, without a copy. Raises InvalidRequest if it is no batch, its counts or sizes disagree with its
        manifest, or it is a shard that does not merge to it; ``verify`` checks the rest."""
        head = read_head(body)
        _check(head.manifest, head.shard, head.columns, memoryview(body)[head.records_start :])
        records = memoryview(body).toreadonly()[head.records_start :]
        return cls(head.manifest, head.columns, records, generation, lease_s, shard=head.shard)

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
        """All trajectories that came, in the order of the records: a shard has those of its rows. Raises
        UnreadableRecord."""
        return [decode(record) for record in self._record_views()]

    def asset_names(self) -> list[str]:
        """The assets that the trajectories refer to, once each."""
        heads = map(decode_head, self._record_views())
        return list(dict.fromkeys(asset.name for head in heads for asset in head.assets))

    def asset(self, name: str) -> memoryview:
        """The bytes of an asset that was pulled with the batch. Raises UnknownAsset or CorruptAsset where there was
        none, InvalidRequest for one that was not asked for."""
        found = self.assets.get(name)
        if isinstance(found, HeadraceError):
            raise found
        if found is None:
            raise InvalidRequest(
                f"The asset {name[:80]!r} was not pulled with batch {self.id}.",
                hint='Pull with fields=["assets"], or ask client.asset for this one.',
            )
        return found

    @cached_property
    def rows(self) -> list[Row]:
        """All rows, in the order of the columns."""
        columns = self.columns
        numbers = columns.get("row_number", np.arange(len(columns["row_tokens"]))).tolist()
        starts = columns["row_turn_offsets"].tolist()
        served = columns.get("advantages")
        bins = columns["row_bin"].tolist()
        rows = []
        for index, (t, s, g) in enumerate(zip(*(columns[name].tolist() for name in _PLACE), strict=True)):
            trajectory = self.trajectories[self._record_of[t]]
            segments = trajectory.segments
            span = slice(starts[index], starts[index + 1])
            if s >= len(segments) or len(segments[s].turns) != span.stop - span.start:
                raise self._disagrees(f"row {index} is segment {s} of trajectory {t}, which is not like that")
            rows.append(
                Row(
                    index=numbers[index],
                    bin=bins[index],
                    trajectory=trajectory,
                    segment=segments[s],
                    group=self.manifest.groups[g],
                    returns=columns["returns"][span],
                    rewards=columns["rewards"][span],
                    weights=columns["turn_weights"][span],
                    served_advantages=None if served is None else served[span],
                )
            )
        return rows

    def bins(self) -> list[list[Row]]:
        """The rows by bin, each in the order of the columns: what is to be computed as one sequence. Without
        ``bin_tokens`` in the run spec each row is a bin of its own."""
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.bin, []).append(row)
        return [found[bin] for bin in sorted(found)]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Where each record begins and ends among the records."""
        return list(itertools.pairwise(self.columns["record_offsets"].tolist()))

    @cached_property
    def _record_of(self) -> dict[int, int]:
        """Which record is trajectory t of the batch."""
        numbers = self.columns.get("record_number", np.arange(len(self._spans)))
        return {t: record for record, t in enumerate(numbers.tolist())}

    def strands(self) -> Strands:
        """The flat arrays behind the estimators, for computing one's own; ``row_turns`` leads back to the columns.
        Raises InvalidRequest for a shard: what it is compared with is elsewhere."""
        self._require_whole("Its strands")
        return collect_strands(self._group_inputs())

    def moments(self) -> MomentSet:
        """Moments of what was received, computed here. Raises InvalidRequest for a shard, whose own are in
        ``shard.part``."""
        strands = self.strands()
        experience = strands.experience
        returns = returns_to_go(experience.rewards, experience.offsets, self.manifest.estimator.gamma)
        return moment_set(strands, returns, None)

    def recut(self, keep: npt.ArrayLike) -> Batch:
        """The batch of the rows that are kept: counts, moments, baselines and advantages as if the others had never
        been trained on. ``keep`` is bool[rows]. Returns still run through all turns of an episode, the dropped ones
        included; an episode or a group of which no row is left is gone. Id and lease stay those of the batch: ack
        either. Raises InvalidRequest for a mask of another shape, and for a shard.
        """
        self._require_whole("A new cut")
        mask = np.asarray(keep)
        if mask.dtype != np.bool_ or mask.shape != (len(self.columns["row_tokens"]),):
            raise InvalidRequest(
                f"keep is {mask.dtype}{list(mask.shape)}, not bool[{len(self.columns['row_tokens'])}].",
                hint="Give one flag per row, in the order of batch.rows.",
            )
        dropped = set(zip(*(self.columns[name][~mask].tolist() for name in _PLACE[:2]), strict=True))
        inputs, spans = self._inputs_without(dropped)
        computed = compute(
            batch=self.id,
            run=self.run,
            estimator=self.manifest.estimator,
            version=self.version,
            groups=inputs,
            selection=self.manifest.selection,
            bin_tokens=self.manifest.bin_tokens,
        )
        for column in computed.columns.values():
            column.flags.writeable = False
        cut = Batch(computed.manifest, computed.columns, self.records, self.generation, self.lease_s)
        cut._spans, cut._recut, cut.assets = spans, True, self.assets
        return cut

    def verify(self) -> None:
        """Validate every record, and compute manifest and columns again. Raises InvalidTrajectory for a record that is
        not valid, InvalidRequest where the batch is not what its records give. Of a shard, whose advantages come from
        rows that are elsewhere, the rest is computed again."""
        for trajectory in self.trajectories:
            validate(trajectory)
        with np.errstate(all="ignore"):  # a number that was damaged may overflow; then it differs, and is refused
            if self.shard is None:
                self._verify_whole()
            else:
                self._verify_shard()

    def _verify_whole(self) -> None:
        stated = self.manifest
        computed = compute(
            batch=stated.batch,
            run=stated.run,
            estimator=stated.estimator,
            version=stated.version,
            groups=self._group_inputs(),
            selection=stated.selection,
            bin_tokens=stated.bin_tokens,
        )
        for name, column in computed.columns.items():
            self._require_column(name, column)
        for path, ours, theirs in _differences(msgspec.to_builtins(computed.manifest), msgspec.to_builtins(stated)):
            raise self._disagrees(f"{path} is {theirs!r}, its records give {ours!r}")

    def _verify_shard(self) -> None:
        heads = [(decode_head(record), len(record)) for record in self._record_views()]
        groups = [GroupInput(head.group, head.task, 1, [(head, size)]) for head, size in heads]
        stated = self.manifest
        computed = compute(
            batch=stated.batch, run=stated.run, estimator=stated.estimator, version=stated.version, groups=groups
        ).columns
        numbers = self.columns["record_number"][computed["row_trajectory"]].tolist()
        row_at = {place: row for row, place in enumerate(zip(numbers, computed["row_segment"].tolist(), strict=True))}
        places = zip(*(self.columns[name].tolist() for name in _PLACE[:2]), strict=True)
        rows = [row_at.get(place, -1) for place in places]
        if -1 in rows:
            raise self._disagrees(f"row {rows.index(-1)} of the shard is in none of its records")
        starts = computed["row_turn_offsets"]
        turns = np.concatenate([np.arange(0), *(np.arange(starts[row], starts[row + 1]) for row in rows)])
        for name in PER_TURN:
            if name != "advantages":
                self._require_column(name, computed[name][turns])
        for name in ("row_tokens", "row_reward"):
            self._require_column(name, computed[name][rows])

    def _require_column(self, name: str, computed: npt.NDArray[Any]) -> None:
        received = self.columns.get(name)
        tolerance = ADVANTAGE_TOLERANCE if name == "advantages" else MOMENT_TOLERANCE
        if received is None or not _agree(received, computed, tolerance):
            raise self._disagrees(f"column {name!r} is not what its records give")

    def _require_whole(self, what: str) -> None:
        if self.shard is not None:
            raise InvalidRequest(
                f"This is shard {self.shard.number} of {len(self.shard.parts)} of batch {self.id}. {what} can only be "
                "computed of the whole batch.",
                hint="Pull it without shards in one rank, and send each rank what it needs.",
            )

    def _group_inputs(self) -> list[GroupInput]:
        if self._recut:
            return self._inputs_without(set())[0]
        heads = [(decode_head(record), len(record)) for record in self._record_views()]
        inputs, start = [], 0
        for group in self.manifest.groups:
            members = heads[start : start + group.actual]
            inputs.append(GroupInput(group.id, group.task, group.expected, members))
            start += group.actual
        return inputs

    def _inputs_without(self, dropped: set[tuple[int, int]]) -> tuple[list[GroupInput], list[tuple[int, int]]]:
        """What is left without some rows, given as (trajectory, segment); and where its records are."""
        rows = set(zip(*(self.columns[name].tolist() for name in _PLACE[:2]), strict=True))
        had_rows = {t for t, _ in rows}
        left = rows - dropped
        has_rows = {t for t, _ in left}
        inputs: list[GroupInput] = []
        spans: list[tuple[int, int]] = []
        numbers = iter(range(len(self._spans)))
        for group in self.manifest.groups:
            members = []
            for t in itertools.islice(numbers, group.actual):
                if t in had_rows and t not in has_rows:
                    continue
                start, end = self._spans[t]
                members.append((_only(decode_head(self.records[start:end]), t, left), end - start))
                spans.append((start, end))
            if members:
                inputs.append(GroupInput(group.id, group.task, group.expected, members))
        return inputs, spans

    def _record_views(self) -> list[memoryview]:
        return [self.records[start:end] for start, end in self._spans]

    def _disagrees(self, problem: str) -> InvalidRequest:
        return _disagrees(self.manifest, problem)


def _only(head: TrajectoryHead, number: int, rows: set[tuple[int, int]]) -> TrajectoryHead:
    """A head in which only these rows are trained on."""
    segments = [
        msgspec.structs.replace(segment, train=segment.train and (not segment.turns or (number, position) in rows))
        for position, segment in enumerate(head.segments)
    ]
    return msgspec.structs.replace(head, segments=segments)


def _check(
    manifest: Manifest, shard: Shard | None, columns: Mapping[str, npt.NDArray[Any]], records: memoryview
) -> None:
    """What can be seen without decoding a record. Raises InvalidRequest."""
    whole = manifest.counts
    if shard is not None and shard.number >= len(shard.parts):
        raise _disagrees(manifest, f"it says that it is shard {shard.number} of {len(shard.parts)}")
    here = whole if shard is None else shard.part
    per_turn = [name for name in PER_TURN if name != "advantages" or manifest.estimator.name != "none"]
    lengths = {
        **dict.fromkeys(per_turn, here.turns),
        **dict.fromkeys(PER_ROW, here.rows),
        "row_turn_offsets": here.rows + 1,
        "record_offsets": here.trajectories + 1,
        **({} if shard is None else {"row_number": here.rows, "record_number": here.trajectories}),
    }
    for name, length in lengths.items():
        if name not in columns or len(columns[name]) != length:
            raise _disagrees(manifest, f"column {name!r} is missing or does not have {length} entries")
    for name, end in (("row_turn_offsets", here.turns), ("record_offsets", len(records))):
        offsets = columns[name].view(np.int64)
        if offsets[0] != 0 or offsets[-1] != end or (offsets[1:] < offsets[:-1]).any():
            raise _disagrees(manifest, f"column {name!r} does not rise from 0 to {end}")
    for name, below in (
        ("row_trajectory", whole.trajectories),
        ("row_group", whole.groups),
        ("row_bin", whole.bins),
        ("row_segment", 1 << 31),
        ("row_number", whole.rows),
        ("record_number", whole.trajectories),
    ):
        # Without its sign a negative number is a large one.
        if name in columns and len(columns[name]) and columns[name].view(np.uint64).max() >= below:
            raise _disagrees(manifest, f"column {name!r} points outside [0, {below})")
    if shard is not None and not np.array_equal(np.unique(columns["row_trajectory"]), columns["record_number"]):
        raise _disagrees(manifest, "its records are not those of its rows")
    for what, stated, found in (
        ("trajectories", whole.trajectories, len(manifest.trajectories)),
        ("groups", whole.groups, len(manifest.groups)),
        ("members of groups", whole.trajectories, sum(group.actual for group in manifest.groups)),
        ("sampled tokens", here.sampled_tokens, int(columns["turn_tokens"].sum())),
        ("tokens", here.tokens, int(columns["row_tokens"].sum())),
    ):
        if stated != found:
            raise _disagrees(manifest, f"it counts {stated} {what}, there are {found}")
    if manifest.bin_tokens:
        fullest = np.bincount(columns["row_bin"], weights=columns["row_tokens"]).max(initial=0)
        if fullest > manifest.bin_tokens:
            raise _disagrees(manifest, f"a bin holds {fullest:.0f} tokens, more than {manifest.bin_tokens}")
    offsets = columns["record_offsets"]
    sizes, stated_sizes = record_sizes(records, offsets[:-1]), offsets[1:] - offsets[:-1]
    if (sizes != stated_sizes).any():
        position = np.flatnonzero(sizes != stated_sizes)[0]
        said = f"is {sizes[position]} bytes long" if sizes[position] >= 0 else "is no record"
        raise _disagrees(manifest, f"record {position} {said}, not one of {stated_sizes[position]} bytes")
    if shard is not None:
        with np.errstate(all="ignore"):  # a damaged number may overflow; then it differs, and is refused
            problem = shards.find_disagreement(manifest, shard, columns)
        if problem:
            raise _disagrees(manifest, problem)


def _disagrees(manifest: Manifest, problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"Batch {manifest.batch} disagrees with its manifest: {problem}.",
        hint="Nothing of it can be trusted; give it back and pull again.",
        batch=manifest.batch,
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
