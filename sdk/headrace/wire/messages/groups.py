"""Messages about groups: their submission and their priorities."""

from __future__ import annotations

from typing import Any

import msgspec


class GroupRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group that the learner submits. ``size`` defaults to the run's group size, ``id`` to a new one."""

    task: dict[str, Any]
    size: int | None = None
    id: str = ""


class SubmitGroupsRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    groups: list[GroupRequest]


class SubmitGroupsReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    groups: list[str]


class PrioritiesRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Priorities by group id, 1e-6 to 1e6, for prioritized draws from now on. The initial priority of a group is 1."""

    priorities: dict[str, float]


class PrioritiesReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``set``: the number of priorities set. ``over``: the groups that are no longer in flight."""

    epoch: int
    set: int
    over: list[str] = []
