"""Messages about versions of the policy and their weights."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from headrace.bounds import MAX_LABEL
from headrace.wire.messages.fields import CallKey


class Weights(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The place of a version's weights: a path that the policy servers can read.

    ``full``: a folder of safetensors as transformers writes it. ``adapter``: a folder of a LoRA adapter as PEFT writes
    it. ``digest``: that of its files (``headrace.weight_files.weight_digest``), which servers compare before they use
    them; empty if unknown.
    """

    path: str
    kind: Literal["full", "adapter"] = "full"
    digest: Annotated[str, msgspec.Meta(max_length=MAX_LABEL)] = ""

    def same_place(self, other: Weights | None) -> bool:
        """Return True if both name the same place, with the same files as far as the digests tell."""
        if other is None or (self.path, self.kind) != (other.path, other.kind):
            return False
        return self.digest == other.digest or not (self.digest and other.digest)


class VersionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Announces a version: a later ``n`` of the lineage; gaps are skipped versions.

    ``weights``: the place of its weights, which the service loads into the run's policy servers; None: the learner has
    loaded them itself.
    """

    version: str
    weights: Weights | None = None


class RewindRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Goes back to a checkpoint: opens a new lineage that forks from ``version``. A request with the ``key`` of an
    earlier one opens nothing, and gets its reply."""

    version: str
    key: CallKey = ""


class VersionReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``version``: the current one; after a rewind ``(new lineage, n of the fork point)``. ``same_weights_as``: an
    earlier version of the lineage with the same bytes; empty if there is none."""

    epoch: int
    version: str
    same_weights_as: str = ""


class HoldReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The time until weights may be replaced.

    ``hold_s`` is 0 if they may be replaced now; else it is the seconds until the named evaluations are over.
    """

    epoch: int
    hold_s: float
    evaluations: list[str] = []
