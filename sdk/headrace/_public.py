"""The public names of ``headrace``, imported together at the first use of one of them."""

from headrace.assets import Image
from headrace.batch.batch import Batch, Row
from headrace.batch.manifest import Manifest
from headrace.client.async_client import AsyncClient
from headrace.client.operations import Resumed
from headrace.client.sync_client import Client
from headrace.environment import (
    Action,
    Call,
    Environment,
    MultiAgentEnvironment,
    Observation,
    Step,
    make,
    register,
    registered,
)
from headrace.errors import EpisodeFailure, HeadraceError
from headrace.logprobs import score
from headrace.moments import Moments
from headrace.offline import open
from headrace.runspec import (
    AgentSpec,
    EnvironmentSpec,
    EstimatorSpec,
    LimitSpec,
    PolicySpec,
    RetrySpec,
    RunSpec,
    SamplingSpec,
    ScorerSpec,
    TaskSpec,
)
from headrace.trajectory import ContentPart, Failure, Segment, Task, ToolCall, Trajectory, Turn, Version
from headrace.validation import validate

__all__ = [
    "Action",
    "AgentSpec",
    "AsyncClient",
    "Batch",
    "Call",
    "Client",
    "ContentPart",
    "Environment",
    "EnvironmentSpec",
    "EpisodeFailure",
    "EstimatorSpec",
    "Failure",
    "HeadraceError",
    "Image",
    "LimitSpec",
    "Manifest",
    "Moments",
    "MultiAgentEnvironment",
    "Observation",
    "PolicySpec",
    "Resumed",
    "RetrySpec",
    "Row",
    "RunSpec",
    "SamplingSpec",
    "ScorerSpec",
    "Segment",
    "Step",
    "Task",
    "TaskSpec",
    "ToolCall",
    "Trajectory",
    "Turn",
    "Version",
    "make",
    "open",
    "register",
    "registered",
    "score",
    "validate",
]
