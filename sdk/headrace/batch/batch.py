"""The batch as a learner reads it: a manifest, columns, and the unchanged stored records.

* A learner reads a batch without a copy: columns and tokens are views of the body.
* Each row has its own advantages, at its own sampled positions and nowhere else.
* A body that disagrees with its manifest is refused; ``verify`` also recomputes moments and advantages.
* ``recut`` returns exactly the batch that the kept rows would form.

The layout of the body is in :mod:`headrace.batch.body`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.batch.body import PER_TURN, read_head
from headrace.batch.build import compute, moment_set
from headrace.batch.consistency import (
    ADVANTAGE_TOLERANCE,
    MOMENT_TOLERANCE,
    agree,
    check_columns,
    differences,
    disagreement,
)
from headrace.batch.estimator_inputs import AgentEpisodes, GroupInput, collect_agent_episodes
from headrace.batch.manifest import GroupEntry, Manifest, MomentSet, Shard
from headrace.errors import HeadraceError, InvalidRequest
from headrace.estimators import F64, returns_to_go
from headrace.trajectory import Segment, Trajectory, Turn, Version, VersionRun
from headrace.validation import validate
from headrace.wire.codec import Buffer, TrajectoryHead, decode, decode_head

_ROW_PLACE = ("row_trajectory", "row_segment", "row_group")


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A segment to train on. Arrays are read-only views of the batch.

    ``index`` is its number in the whole batch, ``bin`` the number of its bin. ``returns``, ``rewards``,
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
        """Token ids i32[n]."""
        return self.segment.token_ids

    @property
    def sampled(self) -> npt.NDArray[np.uint8]:
        """Flags u8[n], 1 where the policy sampled the token."""
        return self.segment.sampled

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Logprobs f32[n], each at the position of its token; 0 where not sampled."""
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
        """Advantages f64[turns]. Raises InvalidRequest with estimator ``none``."""
        if self.served_advantages is None:
            raise InvalidRequest(
                "The run's estimator is 'none', so the batch has no advantages.",
                hint="Compute advantages from the returns, or choose an estimator in the run spec.",
            )
        return self.served_advantages

    def token_advantages(self) -> npt.NDArray[np.float32]:
        """Advantages f32[n] by token: each turn's at its own sampled positions, 0 elsewhere. Raises InvalidRequest for
        one that does not fit."""
        by_token = np.zeros(len(self.segment.token_ids), np.float32)
        for turn, advantage in zip(self.segment.turns, as_float32(self.advantages), strict=True):
            by_token[turn.start : turn.end] = advantage
        return by_token


def as_float32(advantages: F64) -> npt.NDArray[np.float32]:
    """The advantages in float32. Raises InvalidRequest for one that would be infinite."""
    if not np.all(np.abs(advantages) <= np.finfo(np.float32).max):
        raise InvalidRequest(
            f"An advantage of {np.abs(advantages).max():g} does not fit into float32.",
            hint="Rewards are at most 1e12 in magnitude; only an earlier version accepted larger ones.",
        )
    return advantages.astype(np.float32)


class Batch:
    """A pulled batch, or a shard of one.

    ``generation`` and ``lease_s`` belong to its lease, and are sent outside the body. ``manifest`` describes the whole
    batch; ``shard`` states which part of it this is, None for the whole. ``columns`` are read-only views by name;
    ``records`` is the part of the body with the records.
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
        """The assets that were pulled with the batch by name, with the error in place of each that failed."""
        self._recut = False

    def __repr__(self) -> str:
        rows = len(self.columns["row_tokens"])
        shard = "" if self.shard is None else f", shard={self.shard.number} of {len(self.shard.parts)}"
        return f"Batch(id={self.id!r}, run={self.run!r}, version={str(self.version)!r}, rows={rows}{shard})"

    @classmethod
    def parse(cls, body: Buffer, *, generation: int = 0, lease_s: float = 0.0) -> Batch:
        """Parse a body without a copy, and check it against its manifest; ``verify`` checks the rest.

        Raises InvalidRequest if it is not a batch, or disagrees with its manifest.
        """
        head = read_head(body)
        records = memoryview(body).toreadonly()[head.records_start :]
        check_columns(head.manifest, head.shard, head.columns, records)
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
        """All received trajectories, in the order of the records; a shard has those of its rows.

        Raises UnreadableRecord.
        """
        return [decode(record) for record in self._record_views()]

    def asset_names(self) -> list[str]:
        """The names of the assets to which the trajectories refer, once each."""
        heads = map(decode_head, self._record_views())
        return list(dict.fromkeys(asset.name for head in heads for asset in head.assets))

    def asset(self, name: str) -> memoryview:
        """The bytes of an asset that was pulled with the batch.

        Raises UnknownAsset or CorruptAsset if the pull failed to get it, InvalidRequest if it was not requested.
        """
        asset = self.assets.get(name)
        if isinstance(asset, HeadraceError):
            raise asset
        if asset is None:
            raise InvalidRequest(
                f"The asset {name[:80]!r} was not pulled with batch {self.id}.",
                hint='Pull with fields=["assets"], or get this one with client.asset.',
            )
        return asset

    @cached_property
    def rows(self) -> list[Row]:
        """All rows in the order of the columns."""
        columns = self.columns
        numbers = columns.get("row_number", np.arange(len(columns["row_tokens"]))).tolist()
        starts = columns["row_turn_offsets"].tolist()
        served = columns.get("advantages")
        bins = columns["row_bin"].tolist()
        rows = []
        for index, (t, s, g) in enumerate(zip(*(columns[name].tolist() for name in _ROW_PLACE), strict=True)):
            trajectory = self.trajectories[self._record_of[t]]
            segments = trajectory.segments
            span = slice(starts[index], starts[index + 1])
            if s >= len(segments) or len(segments[s].turns) != span.stop - span.start:
                raise disagreement(self.manifest, f"row {index} does not match segment {s} of trajectory {t}")
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
        """The rows by bin, in the order of the columns. The rows of a bin are computed as one sequence.

        Without ``bin_tokens`` in the run spec each row is its own bin.
        """
        by_bin: dict[int, list[Row]] = {}
        for row in self.rows:
            by_bin.setdefault(row.bin, []).append(row)
        return [by_bin[bin] for bin in sorted(by_bin)]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """The start and end of each record in ``records``."""
        return list(itertools.pairwise(self.columns["record_offsets"].tolist()))

    @cached_property
    def _record_of(self) -> dict[int, int]:
        """The position of a record here, by the number of its trajectory in the whole batch."""
        numbers = self.columns.get("record_number", np.arange(len(self._spans)))
        return {t: record for record, t in enumerate(numbers.tolist())}

    def agent_episodes(self) -> AgentEpisodes:
        """The flat arrays that estimators take; ``row_turns`` maps them to the columns.

        Raises InvalidRequest for a shard, which lacks the rows that it is compared with.
        """
        self._require_whole("Its agent episodes")
        return collect_agent_episodes(self._group_inputs())

    def moments(self) -> MomentSet:
        """The moments of the received rows, computed here.

        Raises InvalidRequest for a shard; its own moments are in ``shard.part``.
        """
        agent_episodes = self.agent_episodes()
        experience = agent_episodes.experience
        returns = returns_to_go(experience.rewards, experience.offsets, self.manifest.estimator.gamma)
        return moment_set(agent_episodes, returns, None)

    def recut(self, keep: npt.ArrayLike) -> Batch:
        """The batch of the kept rows: counts, moments, baselines and advantages without the others.

        ``keep`` is bool[rows]. Returns still include all turns of an episode, also those of dropped rows; episodes and
        groups without a kept row are removed. Id and lease are those of this batch: ack either of them. Raises
        InvalidRequest for a mask of another shape or dtype, and for a shard.
        """
        self._require_whole("A new cut")
        mask = np.asarray(keep)
        if mask.dtype != np.bool_ or mask.shape != (len(self.columns["row_tokens"]),):
            raise InvalidRequest(
                f"keep is {mask.dtype}{list(mask.shape)}, not bool[{len(self.columns['row_tokens'])}].",
                hint="Give one flag for each row, in the order of batch.rows.",
            )
        dropped = set(zip(*(self.columns[name][~mask].tolist() for name in _ROW_PLACE[:2]), strict=True))
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
        """Validate every record, and recompute manifest and columns.

        The advantages of a shard are not recomputed, since they depend on rows in other shards. Raises
        InvalidTrajectory for an invalid record, InvalidRequest if the batch disagrees with its records, and
        EstimatorFailed if its estimator is unknown here or fails.
        """
        for trajectory in self.trajectories:
            validate(trajectory)
        with np.errstate(all="ignore"):  # a damaged number may overflow; then it differs, and is refused
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
        for path, ours, theirs in differences(msgspec.to_builtins(computed.manifest), msgspec.to_builtins(stated)):
            raise disagreement(self.manifest, f"{path} is {theirs!r}, but {ours!r} by its records")

    def _verify_shard(self) -> None:
        heads = [(decode_head(record), len(record)) for record in self._record_views()]
        groups = [GroupInput(head.group, head.task, 1, [(head, size)]) for head, size in heads]
        stated = self.manifest
        computed = compute(
            batch=stated.batch, run=stated.run, estimator=stated.estimator, version=stated.version, groups=groups
        ).columns
        numbers = self.columns["record_number"][computed["row_trajectory"]].tolist()
        row_at = {place: row for row, place in enumerate(zip(numbers, computed["row_segment"].tolist(), strict=True))}
        places = zip(*(self.columns[name].tolist() for name in _ROW_PLACE[:2]), strict=True)
        rows = [row_at.get(place, -1) for place in places]
        if -1 in rows:
            raise disagreement(self.manifest, f"row {rows.index(-1)} of the shard is not in its records")
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
        if received is None or not agree(received, computed, tolerance):
            raise disagreement(self.manifest, f"column {name!r} disagrees with its records")

    def _require_whole(self, subject: str) -> None:
        if self.shard is not None:
            raise InvalidRequest(
                f"This is shard {self.shard.number} of {len(self.shard.parts)} of batch {self.id}. {subject} can only "
                "be computed from the whole batch.",
                hint="Pull it without shards in one rank, and send each rank its part.",
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
        """The inputs without the dropped rows (trajectory, segment), and the spans of their records."""
        rows = set(zip(*(self.columns[name].tolist() for name in _ROW_PLACE[:2]), strict=True))
        had_rows = {t for t, _ in rows}
        rows_kept = rows - dropped
        has_rows = {t for t, _ in rows_kept}
        inputs: list[GroupInput] = []
        spans: list[tuple[int, int]] = []
        numbers = iter(range(len(self._spans)))
        for group in self.manifest.groups:
            members = []
            for t in itertools.islice(numbers, group.actual):
                if t in had_rows and t not in has_rows:
                    continue
                start, end = self._spans[t]
                members.append((_only(decode_head(self.records[start:end]), t, rows_kept), end - start))
                spans.append((start, end))
            if members:
                inputs.append(GroupInput(group.id, group.task, group.expected, members))
        return inputs, spans

    def _record_views(self) -> list[memoryview]:
        return [self.records[start:end] for start, end in self._spans]


def _only(head: TrajectoryHead, number: int, rows: set[tuple[int, int]]) -> TrajectoryHead:
    """The head with ``train`` set only for these rows."""
    segments = [
        msgspec.structs.replace(segment, train=segment.train and (not segment.turns or (number, position) in rows))
        for position, segment in enumerate(head.segments)
    ]
    return msgspec.structs.replace(head, segments=segments)
