"""All error classes of Headrace.

* Every error that crosses a boundary is a ``HeadraceError`` with a stable ``code``.
* A message says what was wrong; ``hint`` says what to do about it.
* Over HTTP an error is a problem body (RFC 9457) of bounded size, and a client raises it again as the same class.
* A failure inside an episode is an ``EpisodeFailure``: it is recorded with its layer and never scored.

The base classes::

    HeadraceError
    ├── RequestError      the caller sent a request that cannot be carried out (4xx)
    ├── ServiceError      the service failed (5xx)
    ├── ServingEnd        a pull ended without a batch
    ├── SetupError        this process cannot start as configured
    └── EpisodeFailure    an episode failed
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

Layer = Literal["policy", "environment", "sandbox", "tool", "simulator", "judge", "infrastructure"]
"""The part of the system in which a failure happened."""

LAYERS: tuple[Layer, ...] = get_args(Layer)

TYPE_PREFIX = "urn:headrace:problem:"
"""Prefix of ``type`` in every problem body of Headrace."""

MAX_PROBLEM_CHARS = 4000
"""Most characters of a text in a problem body."""


class HeadraceError(Exception):
    """Base class of all errors. ``detail`` is the message, ``hint`` says what to do, ``extra`` holds JSON facts."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"
    title: ClassVar[str] = "Headrace error"

    def __init__(self, detail: str, *, hint: str = "", **extra: Any) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.detail} {self.hint}".strip()

    def problem(self) -> dict[str, Any]:
        """The problem body (RFC 9457) of this error. Long texts are cut: they may quote a whole request."""
        body = {
            **self.extra,
            "type": f"{TYPE_PREFIX}{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "hint": self.hint,
        }
        return {name: _cut(value) if isinstance(value, str) else value for name, value in body.items()}


def _cut(text: str) -> str:
    if len(text) <= MAX_PROBLEM_CHARS:
        return text
    return f"{text[:MAX_PROBLEM_CHARS]}... ({len(text) - MAX_PROBLEM_CHARS} more characters)"


def from_problem(body: Mapping[str, Any]) -> HeadraceError:
    """The error described by a problem body; an unknown code gives the base class for its status."""
    known = {"type", "title", "status", "code", "detail", "hint"}
    extra = {str(k): v for k, v in body.items() if k not in known}
    cls = by_code().get(str(body.get("code", "")))
    if cls is None:
        cls = RequestError if int(body.get("status", 500)) < 500 else ServiceError
    return cls(str(body.get("detail", "no detail")), hint=str(body.get("hint", "")), **extra)


def by_code() -> dict[str, type[HeadraceError]]:
    """Every error class by its code; a class without a code of its own does not stand for its parent."""
    classes: dict[str, type[HeadraceError]] = {}
    todo: list[type[HeadraceError]] = [HeadraceError]
    while todo:
        cls = todo.pop()
        if "code" in vars(cls):
            classes[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return classes


class RequestError(HeadraceError):
    """The caller sent a request that cannot be carried out."""

    status = 400
    code = "request-error"
    title = "The request cannot be carried out"


class InvalidRequest(RequestError):
    """The request is malformed."""

    code = "invalid-request"
    title = "The request is not valid"


class Unauthorized(RequestError):
    """The token is missing or unknown."""

    status = 401
    code = "unauthorized"
    title = "A valid bearer token is needed"


class Forbidden(RequestError):
    """The token's role does not allow this route."""

    status = 403
    code = "forbidden"
    title = "The token's role does not allow this"


class ForeignOrigin(Forbidden):
    """A page of another site may have caused the request."""

    code = "foreign-origin"
    title = "The request comes from another origin"


class NotFound(RequestError):
    """The named thing does not exist."""

    status = 404
    code = "not-found"
    title = "Not found"


class UnknownRun(NotFound):
    code = "unknown-run"
    title = "No run of that name"


class UnknownBatch(NotFound):
    code = "unknown-batch"
    title = "No batch of that id"


class UnknownTrajectory(NotFound):
    code = "unknown-trajectory"
    title = "No trajectory of that id"


class UnknownAsset(NotFound):
    code = "unknown-asset"
    title = "No asset of that name"


class UnknownGroup(NotFound):
    code = "unknown-group"
    title = "No group of that id"


class UnknownEvaluation(NotFound):
    code = "unknown-evaluation"
    title = "No evaluation of that id"


class UnknownServer(NotFound):
    code = "unknown-server"
    title = "The run has no policy server of that address"


class UnknownEnvironment(NotFound):
    code = "unknown-environment"
    title = "No environment of that id is registered"


class MethodNotAllowed(RequestError):
    """``extra["allowed"]`` lists the methods that the route accepts."""

    status = 405
    code = "method-not-allowed"
    title = "The route does not accept this method"


class Conflict(RequestError):
    """The request is well formed, but the current state does not allow it."""

    status = 409
    code = "conflict"
    title = "The current state does not allow this"


class RunExists(Conflict):
    code = "run-exists"
    title = "A run of that name already exists"


class GroupExists(Conflict):
    code = "group-exists"
    title = "A group of that id already exists"


class BatchAlreadyAcked(Conflict):
    code = "batch-already-acked"
    title = "The batch was already acked"


class BatchSuperseded(Conflict):
    code = "batch-superseded"
    title = "The batch lease has an old generation or expired"


class ShardsNotFetched(Conflict):
    """``extra["missing"]`` lists the shards that were not fetched."""

    code = "shards-not-fetched"
    title = "Not every shard of the batch was fetched"


class SessionSuperseded(Conflict):
    code = "session-superseded"
    title = "A newer session of the learner took over the batches"


class AttemptSuperseded(Conflict):
    code = "attempt-superseded"
    title = "A newer attempt of the episode exists, or the episode is over"


class AttemptNotYours(Conflict):
    """The attempt belongs to another worker, or the nonce is wrong."""

    code = "attempt-not-yours"
    title = "The attempt belongs to another worker"


class AssetsMissing(Conflict):
    """A record refers to assets that are not stored; ``extra["assets"]`` names them. Send both again."""

    code = "assets-missing"
    title = "Assets of the record are not stored"


class VersionUnknown(Conflict):
    code = "version-unknown"
    title = "The version was never announced"


class VersionConflict(Conflict):
    code = "version-conflict"
    title = "The version does not follow the last announced one"


class RequestTooLarge(RequestError):
    """The body exceeds the server's limit; ``extra`` has ``limit_bytes`` and ``setting``."""

    status = 413
    code = "request-too-large"
    title = "The request body is too large"


class UnsupportedMediaType(RequestError):
    """The body has a type that the service does not read."""

    status = 415
    code = "unsupported-media-type"
    title = "The type of the body is not supported"


class RequestHeadTooLarge(RequestError):
    """The request line with all headers, or the trailers, are larger than the service reads."""

    status = 431
    code = "request-head-too-large"
    title = "The request's headers are too large"


class InvalidRunSpec(RequestError):
    status = 422
    code = "invalid-run-spec"
    title = "The run spec is not valid"


class InvalidAsset(RequestError):
    """Bytes that are not the image or the array that they should be, or not those of their name."""

    status = 422
    code = "invalid-asset"
    title = "The asset is not valid"


class InvalidWeights(RequestError):
    """Weights that no policy server could load.

    A pull reports it as a reason: the announcement itself is accepted, since the files may be repaired.
    """

    status = 422
    code = "invalid-weights"
    title = "No policy server could load these weights"


class WeightsMissing(InvalidWeights):
    code = "weights-missing"
    title = "The weights do not exist"


class WeightsDamaged(InvalidWeights):
    """A weight file is truncated, or is not safetensors."""

    code = "weights-damaged"
    title = "The weight files are damaged"


class WeightsChanged(InvalidWeights):
    """A server keeps its weights instead of loading files whose digest is not the announced one."""

    code = "weights-changed"
    title = "The weight files are not those that were announced"


class WeightsDoNotFit(InvalidWeights):
    """The message lists the tensors."""

    code = "weights-do-not-fit"
    title = "Tensors or shapes of the weights differ from the served model's"


class AdapterDoesNotFit(InvalidWeights):
    """An engine would ignore the tensors, and sample from the base model. The message lists them."""

    code = "adapter-does-not-fit"
    title = "Tensors or shapes of the adapter fit no module of the served model"


class InvalidTrajectory(RequestError):
    """A record breaks an invariant of the trajectory schema."""

    status = 422
    code = "invalid-trajectory"
    title = "The trajectory is not valid"


class UnreadableRecord(InvalidTrajectory):
    code = "unreadable-record"
    title = "The bytes are not a record of this schema"


class WrongDtype(InvalidTrajectory):
    code = "wrong-dtype"
    title = "An array has the wrong dtype"


class WrongShape(InvalidTrajectory):
    code = "wrong-shape"
    title = "An array has the wrong shape"


class TokenOutOfRange(InvalidTrajectory):
    code = "token-out-of-range"
    title = "A token id is outside the vocabulary"


class NonFiniteValue(InvalidTrajectory):
    """A NaN, an infinity, or a logprob above 0."""

    code = "non-finite-value"
    title = "A reward or logprob is not a finite number in range"


class NotAppendOnly(InvalidTrajectory):
    code = "not-append-only"
    title = "A turn does not extend the tokens before it"


class SpansDoNotCover(InvalidTrajectory):
    code = "spans-do-not-cover"
    title = "Turns overlap, are out of order, or miss sampled positions"


class VersionRunsDoNotCover(InvalidTrajectory):
    code = "version-runs-do-not-cover"
    title = "Version runs do not cover the segment"


class PlaceholdersDoNotMatch(InvalidTrajectory):
    code = "placeholders-do-not-match"
    title = "Images and their placeholder tokens do not match"


class FailureHasReward(InvalidTrajectory):
    code = "failure-has-reward"
    title = "The status and the failure disagree"


class ServiceError(HeadraceError):
    """The service failed, temporarily or for good."""

    status = 500
    code = "service-error"
    title = "The service failed"


class Unavailable(ServiceError):
    """The service is starting, draining or unreachable; the same request may succeed later."""

    status = 503
    code = "unavailable"
    title = "The service is not available"


class StoreError(ServiceError):
    """The disk cannot be written; nothing was acknowledged."""

    status = 507
    code = "store-error"
    title = "The store cannot write"


class CorruptRecord(ServiceError):
    """A stored record fails its checksum; the message names it."""

    code = "corrupt-record"
    title = "A stored record is damaged"


class EstimatorFailed(ServiceError):
    """An estimator of another package raised, or returned values that cannot be used; ``extra["estimator"]`` names
    it."""

    code = "estimator-failed"
    title = "The estimator of the run failed"


class SelectionRuleFailed(ServiceError):
    """A selection rule of another package is not installed, raised, or gave groups or weights that cannot be used;
    ``extra["rule"]`` names it."""

    code = "selection-rule-failed"
    title = "The selection rule of the run failed"


class CorruptAsset(ServiceError):
    """The bytes of a stored asset do not match its name."""

    code = "corrupt-asset"
    title = "A stored asset is damaged"


class InternalError(ServiceError):
    code = "internal-error"
    title = "Internal error"


class ServingEnd(HeadraceError):
    """A pull ended without a batch."""

    status = 409
    code = "serving-end"
    title = "The pull ended without a batch"


class NothingToServe(ServingEnd):
    """The caller's timeout passed before a batch was ready; ``extra["reasons"]`` says why."""

    code = "nothing-to-serve"
    title = "No batch was ready in time"


class GroupEnded(ServingEnd):
    """Awaited groups were retired and will not be served: ``extra["ended"]`` has the reason of each, by its id.
    ``extra["left"]`` lists the others, which may be pulled without them."""

    code = "group-ended"
    title = "An awaited group will not be served"


class GroupIncomplete(ServingEnd):
    """Awaited groups have fewer episodes than requested; ``extra["failures"]`` has the reason of each, by its index."""

    code = "group-incomplete"
    title = "An awaited group has too few episodes"


class RunFinished(ServingEnd):
    """No batch will come: the tasks are exhausted, or the run was closed."""

    code = "run-finished"
    title = "The run is finished"


class SetupError(HeadraceError):
    """A process cannot start as configured."""

    code = "setup-error"
    title = "Cannot start"


class PortInUse(SetupError):
    code = "port-in-use"
    title = "The port is in use"


class DataDirectoryInUse(SetupError):
    code = "data-directory-in-use"
    title = "Another orchestrator owns the data directory"


class UnknownLogFormat(SetupError):
    code = "unknown-log-format"
    title = "This version cannot read the format of the log"


class MissingExtra(SetupError):
    code = "missing-extra"
    title = "An optional part is not installed"


class EpisodeFailure(HeadraceError):
    """A failure inside an episode; one subclass per layer. Stored as ``Failure(layer, kind, message, retryable)``."""

    code = "episode-failure"
    title = "The episode failed"
    layer: ClassVar[Layer] = "infrastructure"

    def __init__(self, detail: str, *, kind: str, retryable: bool, hint: str = "", **extra: Any) -> None:
        super().__init__(detail, hint=hint, **extra)
        self.kind = kind
        self.retryable = retryable

    def problem(self) -> dict[str, Any]:
        return {**super().problem(), "kind": self.kind, "retryable": self.retryable}


class PolicyFailure(EpisodeFailure):
    code = "policy-failure"
    layer = "policy"


class EnvironmentFailure(EpisodeFailure):
    code = "environment-failure"
    layer = "environment"


class SandboxFailure(EpisodeFailure):
    code = "sandbox-failure"
    layer = "sandbox"


class ToolFailure(EpisodeFailure):
    code = "tool-failure"
    layer = "tool"


class SimulatorFailure(EpisodeFailure):
    code = "simulator-failure"
    layer = "simulator"


class JudgeFailure(EpisodeFailure):
    code = "judge-failure"
    layer = "judge"


class InfrastructureFailure(EpisodeFailure):
    code = "infrastructure-failure"
    layer = "infrastructure"
