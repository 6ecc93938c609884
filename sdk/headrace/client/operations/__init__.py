"""The operations of both clients, as generators that are independent of sockets."""

from headrace.client.operations.batches import BatchOperations, PullField, PullQuery, Resumed, pull_query
from headrace.client.operations.evaluations import EvaluationOperations
from headrace.client.operations.groups import GroupOperations, TaskLike, plain_task
from headrace.client.operations.policy_servers import PolicyServerOperations
from headrace.client.operations.trajectories import PAGE, TrajectoryOperations
from headrace.client.operations.versions import VersionOperations

__all__ = ["PAGE", "Operations", "PullField", "PullQuery", "Resumed", "TaskLike", "plain_task", "pull_query"]


class Operations(
    BatchOperations,
    VersionOperations,
    PolicyServerOperations,
    GroupOperations,
    EvaluationOperations,
    TrajectoryOperations,
):
    """All operations, and the state that a client keeps between them."""
