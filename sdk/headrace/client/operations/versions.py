"""Operations on versions of the policy and their weights."""

from __future__ import annotations

import os

from headrace.client.operations.runs import RunOperations
from headrace.client.requests import Operation
from headrace.errors import InvalidRequest, VersionConflict
from headrace.trajectory import Version
from headrace.wire import messages

VersionLike = Version | str | int
"""A version: ``Version(0, 12)``, ``"0.12"``, or 12 of the current lineage."""

WeightsLike = messages.Weights | str | os.PathLike[str]
"""The place of weights: ``Weights``, or the path of a folder of full weights."""


def absolute_weights(weights: WeightsLike | None) -> messages.Weights | None:
    """The weights with an absolute path: a relative one is relative to this process, not to the policy servers."""
    return messages.Weights(path=os.path.abspath(weights)) if isinstance(weights, str | os.PathLike) else weights


class VersionOperations(RunOperations):
    def announce(
        self, run: str, version: VersionLike, *, weights: WeightsLike | None = None
    ) -> Operation[messages.VersionReply]:
        """Announce a version. An int counts in the run's current lineage.

        ``weights``: the place of its weights, which the service loads into the run's policy servers; None: the learner
        has loaded them itself. Raises VersionConflict.
        """
        if isinstance(version, int):
            current = (yield from self.run(run)).version
            version = Version(Version.parse(current).lineage, version)
        body = messages.VersionRequest(version=str(version), weights=absolute_weights(weights))
        try:
            return (yield from self.post(messages.VersionReply, "runs", run, "version", body=body))
        except VersionConflict as error:
            current = (yield from self.run(run)).version
            if error.extra.get("repeated") and current == str(version):
                return messages.VersionReply(epoch=self.epoch, version=current)
            raise

    def rewind(self, run: str, version: VersionLike) -> Operation[messages.VersionReply]:
        """Go back to a checkpoint, named in full as in ``"0.12"``. This opens a new lineage, which the reply names."""
        if isinstance(version, int):
            raise InvalidRequest(
                f"Rewind to {version} does not name a lineage.", hint="Name the checkpoint in full, as in '0.12'."
            )
        body = messages.RewindRequest(version=str(version))
        return (yield from self.post(messages.VersionReply, "runs", run, "rewind", body=body, repeatable=False))

    def hold(self, run: str, wait_s: float = 0.0) -> Operation[messages.HoldReply]:
        """Ask if weights may be replaced now; wait up to ``wait_s`` for evaluations that need the old ones."""
        return self.poll(messages.HoldReply, "runs", run, "hold", wait_s=wait_s)
