"""What a pull comes to."""

from __future__ import annotations

import msgspec

from headrace.batch.manifest import BatchSelection
from headrace.trajectory import Version
from headrace.wire import messages


class Redeliver(msgspec.Struct, frozen=True):
    """Serve this frozen batch; the lease is made."""

    batch: str
    generation: int
    lease_s: float
    shard: int = 0
    shards: int = 1


class Form(msgspec.Struct, frozen=True):
    """A batch can be formed of these groups, in this order, at this version of the run. Nothing is changed until
    ``form`` is called: the shell reads the members' records and computes the head first. What happened meanwhile may
    make it call for another plan. ``groups`` are (group, ids of the stored trajectories, in member order, failed ones
    left out)."""

    batch: str
    version: Version
    groups: list[tuple[str, list[str]]]
    selection: BatchSelection


Plan = Redeliver | Form | messages.EmptyReply
