"""Messages about versions of the policy and their weights."""

from __future__ import annotations

from typing import Literal

import msgspec


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a version's weights: a path that the policy servers can read.

    ``full``: a folder of safetensors as transformers writes it. ``adapter``: a folder of a LoRA adapter as PEFT writes
    it.
    """

    path: str
    kind: Literal["full", "adapter"] = "full"


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Announces a version: a later ``n`` of the lineage; gaps are skipped versions.

    ``weights``: the place of its weights, which the service loads into the run's policy servers; None: the learner has
    loaded them itself.
    """

    version: str
    weights: Weights | None = None


class RewindRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Goes back to a checkpoint: opens a new lineage that forks from ``version``."""

    version: str


class VersionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    epoch: int
    version: str
    """The current version. After a rewind: ``(new lineage, n of the fork point)``."""


class HoldReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The time until weights may be replaced.

    ``hold_s`` is 0 if they may be replaced now; else it is the seconds until the named evaluations are over.
    """

    epoch: int
    hold_s: float
    evaluations: list[str] = []
