"""The manifest: what a batch says about itself, computed over exactly the rows that it serves.

* BatchCounts are of the whole batch, whatever part of it a learner holds.
* A shard says what every shard holds, so that one alone can be checked against the manifest.
* γ names its unit, and σ its ddof and ε: nobody has to guess how an advantage was made.
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
"""As many as a float64 can count."""


class BatchEstimator(msgspec.Struct, frozen=True, kw_only=True):
    """How advantages were computed. ``gamma`` is the discount per ``gamma_unit``."""

    name: str
    gamma: float
    gamma_unit: Literal["turn"] = "turn"
    ddof: int
    eps: float
    weighting: Weighting


class BatchSelection(msgspec.Struct, frozen=True, kw_only=True):
    """How the groups were chosen: the order (``awaited``: by name), and what the pull asked for; empty: anything."""

    order: str = "fifo"
    environments: list[str] = []
    tags: list[str] = []

    @property
    def filtered(self) -> bool:
        """Whether the pull asked for some kinds only."""
        return bool(self.environments or self.tags)


DISPATCH_ORDER = BatchSelection()
"""Nothing but the order of dispatch chose."""


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole batch. ``turns`` and tokens are those of rows; ``tokens`` counts prompts and observations too.
    ``bins``: what rows are packed into; as many as rows where they are not packed."""

    rows: Count
    trajectories: Count
    groups: Count
    turns: Count
    sampled_tokens: Count
    tokens: Count
    bins: Count


class MomentSet(msgspec.Struct, frozen=True, kw_only=True):
    """Moments over rows. Returns: each turn once, and each turn by its sampled tokens. Rewards: the undiscounted sum
    of each (trajectory, agent), once however many rows it has."""

    returns_by_turn: Moments
    returns_by_token: Moments
    rewards: Moments


class GroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One group. Its trajectories follow those of the group before it, ``actual`` of them.

    ``single``: an agent is alone in its comparison, so it has no baseline. ``zero_variance``: every comparison has
    two members or more, and all are equal. ``agents``: moments of episode rewards by agent. ``low``: lowest version of
    its rows; ``staleness``: how many versions that is behind.
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
    """What a batch is. ``version`` is the run's when the batch was formed; staleness is relative to it.

    ``version_min`` and ``version_max`` are over all rows (None without rows). ``bin_tokens``: most tokens of a bin; 0:
    rows are not packed. ``trajectories`` are the ids of the records, in their order. ``whitening`` are the moments that
    the estimator divided by, if it whitens the batch.
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
    """What one shard holds. The reward of a (trajectory, agent) counts in the shard of its first row; ``trajectories``
    are the records that came with it, which other shards may hold too."""

    rows: Count
    trajectories: Count
    turns: Count
    sampled_tokens: Count
    tokens: Count
    bins: Count
    moments: MomentSet
    environments: dict[str, MomentSet]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a batch this is: ``number`` of ``parts``, which lists them all."""

    number: Count
    parts: list[ShardPart]

    @property
    def part(self) -> ShardPart:
        """What this shard holds."""
        return self.parts[self.number]

    @property
    def most_rows(self) -> int:
        """Rows of the largest shard: what ``layouts.filled`` fills up to where all ranks need as many."""
        return max(part.rows for part in self.parts)
