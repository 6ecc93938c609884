"""Operations on versions of the policy and their weights."""

from __future__ import annotations

import logging
import os
import uuid

import msgspec

from headrace.client.operations.runs import RunOperations
from headrace.client.requests import FileWork, Operation
from headrace.errors import InvalidRequest, VersionConflict, WeightsDamaged
from headrace.trajectory import Version
from headrace.weight_files import WeightFilesError, weight_digest
from headrace.wire import messages

log = logging.getLogger("headrace.client.sync_client")

VersionLike = Version | str | int
"""A version: ``Version(0, 12)``, ``"0.12"``, or 12 of the current lineage."""

WeightsLike = messages.Weights | str | os.PathLike[str]
"""The place of weights: ``Weights``, or the path of a folder of full weights."""


def described_weights(weights: WeightsLike | None) -> Operation[messages.Weights | None]:
    """The weights with an absolute path, since a relative one is relative to this process, and with their digest, if
    this process can read the folder. Raises WeightsDamaged."""
    if isinstance(weights, str | os.PathLike):
        weights = messages.Weights(path=os.path.abspath(weights))
    if weights is None or weights.digest or not os.path.isdir(weights.path):
        return weights
    place, digests = weights, list[str]()
    yield FileWork(lambda: digests.append(_digest(place)))
    return msgspec.structs.replace(place, digest=digests[0])


def _digest(weights: messages.Weights) -> str:
    try:
        return weight_digest(weights.path, weights.kind)
    except WeightFilesError as error:
        if error.kind == "weights-missing":
            return ""  # the servers say whether they see it
        raise WeightsDamaged(
            f"{error}.", hint="Announce a folder once it is complete, and write each version into its own folder."
        ) from error


def warn_of_same_weights(version: str, earlier: str) -> None:
    """Log that a version has the bytes of an earlier one, if it does."""
    if earlier:
        log.warning(
            "Version %s has the same weight files as version %s. Was the wrong folder announced?", version, earlier
        )


class VersionOperations(RunOperations):
    def announce(
        self, run: str, version: VersionLike, *, weights: WeightsLike | None = None
    ) -> Operation[messages.VersionReply]:
        """Announce a version. An int counts in the run's current lineage.

        ``weights``: the place of its weights, which the service loads into the run's policy servers; None: the learner
        has loaded them itself. Their digest is sent too, if this process can read the folder. Raises VersionConflict,
        and WeightsDamaged for incomplete files.
        """
        if isinstance(version, int):
            current = (yield from self.run(run)).version
            version = Version(Version.parse(current).lineage, version)
        described = yield from described_weights(weights)
        body = messages.VersionRequest(version=str(version), weights=described)
        try:
            reply = yield from self.post(messages.VersionReply, "runs", run, "version", body=body)
            warn_of_same_weights(reply.version, reply.same_weights_as)
            return reply
        except VersionConflict as error:
            current = (yield from self.run(run)).version
            if error.extra.get("repeated") and current == str(version):
                return messages.VersionReply(epoch=self.epoch, version=current)
            raise

    def rewind(self, run: str, version: VersionLike, *, key: str = "") -> Operation[messages.VersionReply]:
        """Go back to a checkpoint, named in full as in ``"0.12"``. This opens a new lineage, which the reply names.

        ``key``: a name of this call; default: a new one. A call with the key of an earlier one, as after a restart,
        opens nothing, and gets the same reply.
        """
        if isinstance(version, int):
            raise InvalidRequest(
                f"Rewind to {version} does not name a lineage.", hint="Name the checkpoint in full, as in '0.12'."
            )
        body = messages.RewindRequest(version=str(version), key=key or uuid.uuid4().hex)
        return (yield from self.post(messages.VersionReply, "runs", run, "rewind", body=body, key=body.key))

    def hold(self, run: str, wait_s: float = 0.0) -> Operation[messages.HoldReply]:
        """Ask if weights may be replaced now; wait up to ``wait_s`` for evaluations that need the old ones."""
        return self.poll(messages.HoldReply, "runs", run, "hold", wait_s=wait_s)
