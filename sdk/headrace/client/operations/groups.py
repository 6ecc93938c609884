"""Operations on groups: submission and priorities."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from headrace.client.operations.retries import RetryingOperations
from headrace.client.requests import Operation
from headrace.errors import GroupExists
from headrace.trajectory import Task
from headrace.wire import messages

TaskLike = Task | BaseModel | Mapping[str, Any]
"""A task: a ``Task``, a ``TaskSpec``, or a mapping with the same fields."""


def plain_task(task: TaskLike) -> dict[str, Any]:
    """A task as plain JSON data."""
    if isinstance(task, BaseModel):
        return task.model_dump(mode="json", exclude_unset=True)
    if isinstance(task, Mapping):
        return dict(task)
    fields: dict[str, Any] = msgspec.to_builtins(task)
    return fields


class GroupOperations(RetryingOperations):
    def submit_groups(self, run: str, groups: Sequence[messages.GroupRequest | TaskLike]) -> Operation[list[str]]:
        """Submit groups of the learner's choice. Returns their ids, for ``pull(groups=...)``."""
        body = messages.SubmitGroupsRequest(groups=[_with_id(group) for group in groups])
        try:
            return (yield from self.post(messages.SubmitGroupsReply, "runs", run, "groups", body=body)).groups
        except GroupExists as error:
            if error.extra.get("repeated"):
                return [group.id for group in body.groups]
            raise

    def set_priorities(self, run: str, priorities: Mapping[str, float]) -> Operation[messages.PrioritiesReply]:
        """Set the priorities of groups by id, 1e-6 to 1e6, for a prioritized draw.

        The reply names groups that are no longer in flight. Raises Conflict if the run's order has no priorities.
        """
        body = messages.PrioritiesRequest(priorities={id: float(priority) for id, priority in priorities.items()})
        return self.post(messages.PrioritiesReply, "runs", run, "priorities", body=body)


def _with_id(group: messages.GroupRequest | TaskLike) -> messages.GroupRequest:
    """The group with an id, by which the service recognizes a repeated submission."""
    if not isinstance(group, messages.GroupRequest):
        group = messages.GroupRequest(task=plain_task(group))
    return group if group.id else msgspec.structs.replace(group, id=uuid.uuid4().hex)
