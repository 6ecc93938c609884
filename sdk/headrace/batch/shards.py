"""Shards: the parts of a batch for the ranks of a data-parallel learner.

* Shards are disjoint, and their union is the batch. Rows of one bin are in one shard.
* Shards are balanced by the tokens of their rows.
* The same batch and number of shards always give the same shards.
* Counts and moments of all shards merge to the manifest; a shard that disagrees is refused.
* A shard may be empty.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.batch.body import PER_ROW, PER_TURN, Columns, ParsedHead, offsets_of, pack_head
from headrace.batch.manifest import Manifest, MomentSet, Shard, ShardPart
from headrace.errors import InvalidRequest
from headrace.estimators import I64
from headrace.moments import Moments, merge_all

_COUNTED = ("rows", "turns", "sampled_tokens", "tokens", "bins")


class ShardBody(NamedTuple):
    """The body of a shard: ``head`` up to the records, and the numbers i64[n] of the records to append."""

    head: bytes
    records: I64


def assign_bins(bin_tokens: npt.ArrayLike, shards: int) -> I64:
    """The shard of each bin, i64[bins]. Each bin, the fullest first, goes to the shard with the fewest tokens."""
    tokens = np.asarray(bin_tokens, np.int64)
    lightest = [(0, number) for number in range(shards)]
    shard_of = np.zeros(len(tokens), np.int64)
    for bin in np.argsort(-tokens, kind="stable").tolist():
        load, number = lightest[0]
        heapq.heapreplace(lightest, (load + int(tokens[bin]), number))
        shard_of[bin] = number
    return shard_of


class ShardedBatch:
    """A batch in ``shards`` shards. ``head`` is that of the whole batch. Raises InvalidRequest for fewer than one."""

    def __init__(self, head: ParsedHead, shards: int) -> None:
        if shards < 1:
            raise InvalidRequest(f"A batch cannot have {shards} shards.", hint="Ask for 1 or more.")
        self._manifest = head.manifest
        self._columns = head.columns
        bins = head.columns["row_bin"]
        loads = np.zeros(head.manifest.counts.bins, np.int64)
        np.add.at(loads, bins, head.columns["row_tokens"])
        of_row = assign_bins(loads, shards)[bins]
        of_turn = np.repeat(of_row, np.diff(head.columns["row_turn_offsets"]))
        self._rows = [np.flatnonzero(of_row == number) for number in range(shards)]
        self._turns = [np.flatnonzero(of_turn == number) for number in range(shards)]
        self._own = [self._columns_of(number) for number in range(shards)]
        self._parts = [shard_part(head.manifest, columns) for columns in self._own]

    def shard(self, number: int) -> ShardBody:
        """The body of one shard."""
        columns = self._own[number]
        head = pack_head(self._manifest, columns, Shard(number=number, parts=self._parts))
        return ShardBody(head, columns["record_number"])

    def _columns_of(self, number: int) -> dict[str, npt.NDArray[Any]]:
        columns, rows, turns = self._columns, self._rows[number], self._turns[number]
        records = np.unique(columns["row_trajectory"][rows])
        return {
            **{name: columns[name][turns] for name in PER_TURN if name in columns},
            "row_turn_offsets": offsets_of(np.diff(columns["row_turn_offsets"])[rows]),
            **{name: columns[name][rows] for name in PER_ROW},
            "record_offsets": offsets_of(np.diff(columns["record_offsets"])[records]),
            "row_number": rows,
            "record_number": records,
        }


def shard_part(manifest: Manifest, columns: Columns) -> ShardPart:
    """Counts and moments of these columns."""
    names = [group.task.environment for group in manifest.groups]
    rows_by_environment: dict[str, list[int]] = {}
    for row, group in enumerate(columns["row_group"].tolist()):
        rows_by_environment.setdefault(names[group], []).append(row)
    everything = np.ones(len(columns["row_group"]), np.bool_)
    environments = {}
    for name, rows in rows_by_environment.items():
        chosen = ~everything
        chosen[rows] = True
        environments[name] = _moments(columns, chosen)
    return ShardPart(
        rows=len(columns["row_tokens"]),
        trajectories=len(columns["record_number"]),
        turns=len(columns["returns"]),
        sampled_tokens=int(columns["turn_tokens"].sum()),
        tokens=int(columns["row_tokens"].sum()),
        bins=len(np.unique(columns["row_bin"])),
        moments=_moments(columns, everything),
        environments=environments,
    )


def _moments(columns: Columns, rows: npt.NDArray[np.bool_]) -> MomentSet:
    turns = np.repeat(rows, np.diff(columns["row_turn_offsets"]))
    returns = columns["returns"][turns]
    return MomentSet(
        returns_by_turn=Moments.of(returns),
        returns_by_token=Moments.of(returns, columns["turn_tokens"][turns]),
        rewards=Moments.of(columns["row_reward"][rows & (columns["row_leads"] == 1)]),
    )


def find_disagreement(manifest: Manifest, shard: Shard, columns: Columns) -> str:
    """The first disagreement of a shard with its columns or the manifest; empty if there is none."""
    for name in _COUNTED:
        total, stated = sum(getattr(part, name) for part in shard.parts), getattr(manifest.counts, name)
        if total != stated:
            return f"its shards have {total} {name.replace('_', ' ')}, the batch {stated}"
    own = shard_part(manifest, columns)
    for name in (*_COUNTED, "trajectories"):
        if getattr(own, name) != getattr(shard.part, name):
            return f"shard {shard.number} has {getattr(own, name)} {name}, but states {getattr(shard.part, name)}"
    pairs = [
        ("the moments of shard {}", own.moments, shard.part.moments),
        ("the merged moments of the shards", _merged(part.moments for part in shard.parts), manifest.moments),
    ]
    nothing = MomentSet(returns_by_turn=Moments(), returns_by_token=Moments(), rewards=Moments())
    for environment, stated_moments in manifest.environments.items():
        parts = [part.environments.get(environment, nothing) for part in shard.parts]
        pairs.append((f"the merged moments of {environment}", _merged(parts), stated_moments))
        here = own.environments.get(environment, nothing)
        pairs.append((f"the moments of {environment} in shard {{}}", here, parts[shard.number]))
    for subject, computed, stated_moments in pairs:
        for name in MomentSet.__struct_fields__:
            if not getattr(computed, name).agrees(getattr(stated_moments, name)):
                return f"{subject.format(shard.number)} differ from those stated ({name})"
    return ""


def _merged(parts: Any) -> MomentSet:
    sets = list(parts)
    return MomentSet(**{name: merge_all(getattr(part, name) for part in sets) for name in MomentSet.__struct_fields__})
