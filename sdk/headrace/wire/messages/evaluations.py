"""Messages about evaluations."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.trajectory import Failure, Status, Task
from headrace.wire.messages.fields import CallKey, Duration, RequestTemperature


class EvaluationRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Starts an evaluation: episodes outside of training, pinned to a version. Unfinished ones are cancelled after
    ``deadline_s`` seconds."""

    tasks: list[dict[str, Any]]
    episodes_per_task: int = 1
    version: str = ""
    """Default: the current version."""
    temperature: RequestTemperature | None = None
    """Default: the run's. 0, or ``MIN_TEMPERATURE`` and more."""
    deadline_s: Duration = 600.0
    key: CallKey = ""
    """The id of the evaluation. A request with the key of an earlier one gets that evaluation. Default: a new id."""


class EvaluationEpisode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An episode of an evaluation that is over. ``reward`` is the sum over turns of agents that train."""

    episode: str
    task: Task
    status: Status
    reward: float | None
    turns: int
    failure: Failure | None = None


class EvaluationReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    evaluation: str
    version: str
    wanted: int
    done: int
    finished: bool
    hold_s: float
    """Seconds that a weight sync still has to wait for the evaluation; 0 if it need not wait."""
    episodes: list[EvaluationEpisode] = []
