"""What a pull comes to."""

from __future__ import annotations

import msgspec

from headrace import wire
from headrace.manifest import SelectionUsed


class Redeliver(msgspec.Struct, frozen=True):
    """Serve this frozen batch; the lease is made."""

    batch: str
    generation: int
    lease_s: float
    shard: int = 0
    shards: int = 1


class Form(msgspec.Struct, frozen=True):
    """A batch can be formed of these groups, in this order. Nothing is changed until ``form`` is called; the shell
    reads the members' records, computes the head, and calls it before anything else touches the core.
    ``trajectories`` are (group, ids of the stored trajectories, in member order, failed ones left out)."""

    batch: str
    groups: list[tuple[str, list[str]]]
    selection: SelectionUsed


Plan = Redeliver | Form | wire.EmptyReply
