"""The manifest: the description of a batch, computed over exactly the rows that it serves.

* Counts cover the whole batch, also in a shard.
* A shard states the content of every shard, so that one shard can be checked against the manifest.
* The unit of γ, and the ddof and ε of σ, are stated, so that an advantage can be reproduced.
* Moments are float64 ``[n, mean, M2]``: of returns by turn and by token, and of episode rewards; overall, per
  environment, and (rewards) per group and agent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from headrace.estimators import Weighting
from headrace.moments import Moments
from headrace.trajectory import Task, Version

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A count that a float64 can hold exactly."""


class BatchEstimator(msgspec.Struct, frozen=True, kw_only=True):
    """The estimator of a batch. ``gamma`` is the discount per ``gamma_unit``."""

    name: str
    gamma: float
    gamma_unit: Literal["turn"] = "turn"
    ddof: int
    eps: float
    weighting: Weighting


class BatchSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The selection of a batch's groups: the order (``awaited``: by id), and the pull's filter; empty: none."""

    order: str = "fifo"
    environments: list[str] = []
    tags: list[str] = []

    @property
    def filtered(self) -> bool:
        """True if the pull had a filter."""
        return bool(self.environments or self.tags)


DISPATCH_ORDER = BatchSelection()
"""Selection in the order of dispatch, without a filter."""


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the whole batch.

    ``turns`` and tokens are those of rows; ``tokens`` includes prompts and observations. ``bins`` equals ``rows`` if
    rows are not packed.
    """

    rows: Count
    trajectories: Count
    groups: Count
    turns: Count
    sampled_tokens: Count
    tokens: Count
    bins: Count


class MomentSet(msgspec.Struct, frozen=True, kw_only=True):
    """Moments over rows. Returns: each turn once, and each turn by its sampled tokens. Rewards: the undiscounted sum
    of each (trajectory, agent), once, whatever the number of its rows."""

    returns_by_turn: Moments
    returns_by_token: Moments
    rewards: Moments


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A group. Its ``actual`` trajectories follow those of the group before it.

    ``single``: an agent has only one member in its comparison, and so no baseline. ``zero_variance``: every comparison
    has at least two members, all with equal reward. ``agents``: moments of episode rewards by agent. ``low``: lowest
    version of its rows; ``staleness``: the number of versions that it is behind.
    """

    id: str
    task: Task
    expected: Count
    actual: Count
    complete: bool
    single: bool
    zero_variance: bool
    agents: dict[str, Moments]
    low: Version | None
    staleness: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a batch.

    ``version`` is the run's version when the batch was formed; staleness is relative to it. ``version_min`` and
    ``version_max`` cover all rows (None without rows). ``bin_tokens``: most tokens of a bin; 0: rows are not packed.
    ``trajectories`` are the ids of the records, in their order. ``whitening``: the moments with which the estimator
    whitened the batch, if it does.
    """

    schema: int
    batch: str
    run: str
    version: Version
    version_min: Version | None
    version_max: Version | None
    staleness_min: int
    staleness_max: int
    selection: BatchSelection
    bin_tokens: Count
    estimator: BatchEstimator
    whitening: Moments | None
    counts: BatchCounts
    moments: MomentSet
    environments: dict[str, MomentSet]
    groups: list[GroupEntry]
    trajectories: list[str]


class ShardPart(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one shard.

    The reward of a (trajectory, agent) counts in the shard of its first row. ``trajectories`` counts its records, which
    other shards may have too.
    """

    rows: Count
    trajectories: Count
    turns: Count
    sampled_tokens: Count
    tokens: Count
    bins: Count
    moments: MomentSet
    environments: dict[str, MomentSet]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a batch: ``number`` is its index in ``parts``, which lists all shards."""

    number: Count
    parts: list[ShardPart]

    @property
    def part(self) -> ShardPart:
        """The content of this shard."""
        return self.parts[self.number]

    @property
    def most_rows(self) -> int:
        """Rows of the largest shard, for ``layouts.filled`` if all ranks need equally many."""
        return max(part.rows for part in self.parts)
