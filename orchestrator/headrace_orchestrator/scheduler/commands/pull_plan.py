"""Results of a pull: a leased batch, or a plan to form one."""

from __future__ import annotations

import msgspec

from headrace.batch.manifest import BatchSelection
from headrace.trajectory import Version
from headrace.wire import messages


class Redeliver(msgspec.Struct, frozen=True):
    """Serve this frozen batch; its lease has begun."""

    batch: str
    generation: int
    lease_s: float
    shard: int = 0
    shards: int = 1


class Form(msgspec.Struct, frozen=True):
    """Form a batch of these groups, in this order, at this version of the run. ``groups`` are pairs of a group's id and
    the ids of its stored trajectories, in member order, without failed ones.

    The state has not changed yet: the shell reads the trajectories and computes the head of the batch, then calls
    ``form``. Changes of the state meanwhile may require another plan."""

    batch: str
    version: Version
    groups: list[tuple[str, list[str]]]
    selection: BatchSelection


Plan = Redeliver | Form | messages.EmptyReply
