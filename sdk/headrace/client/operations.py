"""The operations of both clients, as generators that are independent of sockets.

* Idempotent calls are repeated until there is a response.
* An outage longer than ``retry_for_s`` raises its error, ``Unavailable`` as a rule.
* A call that is not idempotent is not repeated if it may have been carried out.
* A call that was certainly not carried out is repeated, idempotent or not.
* A full disk is treated like an outage: the refused call is repeated until the disk accepts data again.
* After a proxy's error page a pull is repeated with the same request id and a shorter wait.
* The pull after one that gave up continues it.

The retry policy is exponential backoff with jitter. Each response ends an outage, so a pull continues for as long as
the service responds now and then, across restarts of the orchestrator.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel

from headrace.assets import check_asset
from headrace.batch.batch import Batch
from headrace.client.leases import BatchLeases
from headrace.client.requests import (
    ApiCall,
    ApiResponse,
    Operation,
    Sleep,
    check_response,
    json_reader,
    request,
    unexpected_body,
)
from headrace.client.responses import checked_asset, read_asset, read_assets, read_nothing, read_trajectory
from headrace.client.wait_reports import WaitCallback, reasons_text, report_wait, timeout_error
from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    Conflict,
    GroupEnded,
    GroupExists,
    HeadraceError,
    InvalidRequest,
    RunExists,
    RunFinished,
    ServiceError,
    StoreError,
    Unavailable,
    UnknownBatch,
    VersionConflict,
)
from headrace.http.problems import GATEWAY_STATUSES
from headrace.runspec import RunSpec, parse_run_spec
from headrace.trajectory import Task, Trajectory, Version
from headrace.wire import messages

T = TypeVar("T")

log = logging.getLogger("headrace.client.sync_client")

FIRST_DELAY_S = 0.05
"""Delay before the first retry. A restarted listener is back sooner."""

MAX_DELAY_S = 5.0
"""Longest delay between retries: a learner on expensive hardware should not sleep through a recovery."""

MIN_POLL_S = 1.0
"""Shortest long poll, whatever a proxy does."""

EARLY_POLL_DELAY_S = 0.25
"""Delay after a poll that returned early without a result, so that a loop over it does not spin."""

PAGE = 200
"""Trajectories on one page of a listing."""

PullField = Literal["assets"]
"""Optional parts of a pull: ``assets`` are the images and large arrays that the trajectories refer to."""

VersionLike = Version | str | int
"""A version: ``Version(0, 12)``, ``"0.12"``, or 12 of the current lineage."""

WeightsLike = messages.Weights | str | os.PathLike[str]
"""The place of weights: ``Weights``, or the path of a folder of full weights."""

TaskLike = Task | BaseModel | Mapping[str, Any]
"""A task: a ``Task``, a ``TaskSpec``, or a mapping with the same fields."""


@dataclass(frozen=True, kw_only=True)
class PullQuery:
    """The arguments of a pull."""

    run: str
    groups: tuple[str, ...] | None = None
    environments: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    fields: tuple[PullField, ...] = ()
    shard: int = 0
    shards: int = 1
    batch: str = ""


class Resumed(NamedTuple):
    """The batches of earlier processes of the learner.

    ``batches`` were leased and never acked, oldest first: the same bytes, or this rank's shards of them. ``lost``: the
    reason why a batch is not served again, by its id.
    """

    batches: list[Batch]
    lost: dict[str, str]


@dataclass(kw_only=True)
class Operations:
    """The operations, and the state that a client keeps between them. ``clock`` is monotonic, in seconds."""

    learner: str = "learner"
    retry_for_s: float = 60.0
    poll_s: float = 20.0
    on_wait: WaitCallback | None = None
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    session: str = ""
    epoch: int = 0

    def __post_init__(self) -> None:
        self.leases = BatchLeases(self.clock)
        self._lock = threading.Lock()
        self._shared = bool(self.session)
        self.session = self.session or uuid.uuid4().hex
        self._unserved: dict[PullQuery, str] = {}
        self._pulls: Counter[str] = Counter()

    # Retries ---------------------------------------------------------------------------------------------

    def call(self, call: ApiCall[T], *, retry_for_s: float | None = None) -> Operation[T]:
        """Send a request until there is a response.

        A ``Conflict`` has ``extra["repeated"] = True`` if it may come from an earlier try whose response was lost.
        """
        give_up_at = self.clock() + (self.retry_for_s if retry_for_s is None else retry_for_s)
        delay = FIRST_DELAY_S
        unsure = False
        while True:
            response = yield call.request
            try:
                assert response is not None
                good = check_response(call.request, response, newest_epoch=self.epoch)
                self.epoch = max(self.epoch, good.epoch or 0)
                return call.read(good)
            except (Unavailable, StoreError) as error:
                unsure = unsure or isinstance(error, StoreError) or error.extra.get("outcome") == "unknown"
                pause = delay * (0.5 + self.jitter() / 2)
                if (unsure and not call.repeatable) or self.clock() + pause > give_up_at:
                    raise
                log.info("%s Trying again in %.2f s.", error.detail, pause)
                call = self._fit_wait(call, error)
            except Conflict as error:
                error.extra["repeated"] = unsure
                raise
            yield Sleep(pause)
            delay = min(2 * delay, MAX_DELAY_S)

    def _fit_wait(self, call: ApiCall[T], error: ServiceError) -> ApiCall[T]:
        wait_s = call.request.wait_s
        if error.extra.get("http_status") not in GATEWAY_STATUSES or wait_s <= MIN_POLL_S:
            return call
        self.poll_s = max(MIN_POLL_S, min(self.poll_s, wait_s / 2))
        return call.waiting(self.poll_s)

    # Runs ----------------------------------------------------------------------------------------------------

    def create_run(self, spec: RunSpec | Mapping[str, Any], *, exist_ok: bool = False) -> Operation[messages.RunStatus]:
        """Create a run. With ``exist_ok`` it may exist with the same spec. Raises RunExists, InvalidRunSpec."""
        parsed = spec if isinstance(spec, RunSpec) else parse_run_spec(spec)
        body = parsed.model_dump(mode="json", exclude_unset=True)
        try:
            return (yield from self.call(ApiCall(request=request("POST", "runs", body=body), read=_run_status)))
        except RunExists as error:
            if not (exist_ok or error.extra.get("repeated")):
                raise
            existing = yield from self.run(parsed.name)
            other = parse_run_spec(existing.spec)
            if other != parsed:
                fields = [name for name in type(parsed).model_fields if getattr(other, name) != getattr(parsed, name)]
                raise RunExists(
                    f"Run {parsed.name!r} exists with another spec: {', '.join(fields)} differ.",
                    hint="The spec of a run never changes: choose another name.",
                ) from error
            return existing

    def runs(self) -> Operation[list[messages.RunStatus]]:
        """The status of all runs."""
        return (
            yield from self.call(ApiCall(request=request("GET", "runs"), read=json_reader(list[messages.RunStatus])))
        )

    def run(self, run: str) -> Operation[messages.RunStatus]:
        """The status of a run. Raises UnknownRun."""
        return (yield from self.call(ApiCall(request=request("GET", "runs", run), read=_run_status)))

    def close_run(self, run: str) -> Operation[None]:
        """Close a run: admit no more groups, and cancel the episodes that are queued or at workers."""
        yield from self.call(ApiCall(request=request("POST", "runs", run, "close"), read=read_nothing))

    def status(self) -> Operation[messages.ServiceStatus]:
        """The status of the service, its runs and its workers."""
        return (
            yield from self.call(ApiCall(request=request("GET", "status"), read=json_reader(messages.ServiceStatus)))
        )

    def drain_worker(self, worker: str) -> Operation[None]:
        """Drain a worker: it gets no new episodes, and exits when its current ones are over."""
        yield from self.call(ApiCall(request=request("POST", "workers", worker, "drain"), read=read_nothing))

    # Batches -------------------------------------------------------------------------------------------------

    def pull(self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Operation[Batch]:
        self._require_session(query)
        name = self._request_id(query)
        over = False
        try:
            batch = yield from self._poll_batch(query, name, timeout_s, on_wait or self.on_wait)
            over = True
            return batch
        except BatchSuperseded:
            over = True  # another rank got the batch, which is over now: the next pull gets the next batch
            raise
        finally:
            if not over:
                # The service may have leased a batch to this request id: the next pull uses it again.
                with self._lock:
                    self._unserved[query] = name

    def _request_id(self, query: PullQuery) -> str:
        """The request id of a pull. It is the same for the k-th pull of all ranks, so that they share its batch."""
        with self._lock:
            name = self._unserved.pop(query, None)
            if name is None and query.shards > 1:
                name = f"pull-{self._pulls[query.run]}"
                self._pulls[query.run] += 1
            return name or uuid.uuid4().hex

    def _require_session(self, query: PullQuery) -> None:
        if not 0 <= query.shard < query.shards:
            raise InvalidRequest(
                f"Shard {query.shard} of {query.shards} does not exist.", hint="Shards are numbered from 0."
            )
        if query.shards > 1 and not self._shared:
            raise InvalidRequest(
                f"Rank {query.shard} of {query.shards} needs a session that all ranks share.",
                hint="Give all ranks the same new name at each start, as in Client(session=...): broadcast a random "
                "name from rank 0, or use the launcher's run id with its restart count.",
            )
        if not set(query.fields) <= {"assets"}:
            raise InvalidRequest(
                f"A pull has no fields {sorted(set(query.fields) - {'assets'})}.", hint='The only field is "assets".'
            )

    def _poll_batch(
        self, query: PullQuery, name: str, timeout_s: float | None, on_wait: WaitCallback | None
    ) -> Operation[Batch]:
        run = query.run
        deadline = None if timeout_s is None else self.clock() + timeout_s
        while True:
            asked = self.clock()
            left = None if deadline is None else max(0.0, deadline - asked)
            wait_s = self.poll_s if left is None else min(self.poll_s, left)
            retry_for_s = self.retry_for_s if left is None else min(self.retry_for_s, left)
            call = self._pull_call(query, name, wait_s)
            reply = yield from self.call(call, retry_for_s=retry_for_s)
            if isinstance(reply, Batch):
                if "assets" in query.fields:
                    reply.assets.update((yield from self.assets(reply.asset_names())))
                return reply
            text, extra = reasons_text(reply.reasons), {"run": run, "reasons": msgspec.to_builtins(reply.reasons)}
            if any(reason.code == "group-ended" for reason in reply.reasons):
                raise GroupEnded(f"The awaited groups of run {run!r} will not be served. {text}", **extra)
            if reply.finished:
                raise RunFinished(f"Run {run!r} is finished. {text}", **extra)
            if deadline is not None and self.clock() >= deadline:
                raise timeout_error(run, timeout_s or 0.0, reply.reasons)
            report_wait(on_wait, run, reply.reasons)
            if self.clock() - asked < min(wait_s, MIN_POLL_S) / 2:
                yield Sleep(min(EARLY_POLL_DELAY_S, wait_s))

    def _pull_call(self, query: PullQuery, name: str, wait_s: float) -> ApiCall[Batch | messages.EmptyReply]:
        def build(wait_s: float) -> Any:
            body = messages.PullRequest(
                learner=self.learner,
                session=self.session,
                request=name,
                wait_s=wait_s,
                groups=None if query.groups is None else list(query.groups),
                environments=list(query.environments),
                tags=list(query.tags),
                shard=query.shard,
                shards=query.shards,
                batch=query.batch,
            )
            return request("POST", "runs", query.run, "pull", body=body, wait_s=wait_s)

        def read(response: ApiResponse) -> Batch | messages.EmptyReply:
            return self._read_batch(query.run, response)

        return ApiCall(request=build(wait_s), read=read, rebuild=build)

    def _read_batch(self, run: str, response: ApiResponse) -> Batch | messages.EmptyReply:
        if response.media_type == "application/json":
            return _empty_reply(response)
        if response.media_type != messages.BATCH_MEDIA_TYPE:
            raise unexpected_body(response, "a batch")
        try:
            generation = int(response.headers[messages.HEADER_GENERATION.lower()])
            lease_s = float(response.headers[messages.HEADER_LEASE_S.lower()])
        except (KeyError, ValueError) as error:
            raise unexpected_body(response, f"a batch with its lease in headers ({error})") from error
        batch = Batch.parse(response.body, generation=generation, lease_s=lease_s)
        self.leases.hold(run, batch.id, lease_s)
        return batch

    def resume(self, query: PullQuery) -> Operation[Resumed]:
        self._require_session(query)
        body = messages.ResumeRequest(learner=self.learner, session=self.session, shards=query.shards)
        call = ApiCall(
            request=request("POST", "runs", query.run, "resume", body=body), read=json_reader(messages.ResumeReply)
        )
        reply = yield from self.call(call)
        batches, lost = [], dict(reply.lost)
        for id in reply.batches:
            try:
                found = yield from self._poll_batch(replace(query, batch=id), f"resume-{id}", None, None)
            except BatchSuperseded as error:
                lost[id] = error.detail
            else:
                batches.append(found)
        return Resumed(batches, lost)

    def ack(
        self, batch: Batch, version: VersionLike | None = None, *, weights: WeightsLike | None = None
    ) -> Operation[messages.AckReply]:
        """Acknowledge a batch that was trained on.

        ``version``: the version that the step made; an int counts in the batch's lineage. ``weights``: the place of its
        weights, which the service loads into the run's policy servers; None: the learner has loaded them itself.
        Raises BatchSuperseded if the lease was lost.
        """
        run, text = batch.run, ""
        if version is not None:
            text = str(Version(batch.version.lineage, version) if isinstance(version, int) else version)
        body = messages.AckRequest(
            learner=self.learner,
            session=self.session,
            generation=batch.generation,
            version=text,
            weights=_weights(weights),
        )
        call = ApiCall(
            request=request("POST", "runs", run, "batches", batch.id, "ack", body=body),
            read=json_reader(messages.AckReply),
        )
        try:
            reply = yield from self.call(call)
        except (BatchAlreadyAcked, BatchSuperseded, UnknownBatch):
            # Also after a try whose response was lost: a repeated ack gets the response of the first one.
            self.leases.drop(run, batch.id)
            raise
        self.leases.drop(run, batch.id)
        return reply

    def nack(self, batch: Batch, reason: str) -> Operation[None]:
        """Give a batch back untrained. It is served again while it is fresh enough."""
        yield from self._nack(batch, reason, None)

    def _nack(self, batch: Batch, reason: str, retry_for_s: float | None) -> Operation[None]:
        body = messages.NackRequest(
            learner=self.learner, session=self.session, generation=batch.generation, reason=reason
        )
        call = ApiCall(
            request=request("POST", "runs", batch.run, "batches", batch.id, "nack", body=body), read=read_nothing
        )
        try:
            yield from self.call(call, retry_for_s=retry_for_s)
        except (BatchSuperseded, UnknownBatch) as error:
            self.leases.drop(batch.run, batch.id)
            if not error.extra.get("repeated"):
                raise
        self.leases.drop(batch.run, batch.id)

    def give_back(self, batch: Batch, reason: str) -> Operation[None]:
        """Give a batch back with one try. If that fails, it is served again when its lease expires."""
        try:
            yield from self._nack(batch, reason, 0.0)
        except BatchSuperseded:
            log.debug("Batch %s was already given back, as by another rank.", batch.id)
        except HeadraceError as error:
            self.leases.drop(batch.run, batch.id)
            log.warning("Batch %s could not be given back: %s", batch.id, error)

    def require_room(self, run: str, prefetch: int) -> Operation[None]:
        """Raise InvalidRequest if the run's staleness does not allow ``prefetch`` batches to be held beside one."""
        if prefetch < 1:
            raise InvalidRequest(f"prefetch={prefetch} fetches nothing ahead.", hint="Give 1 or more, or omit it.")
        bound = (yield from self.run(run)).spec["max_staleness"]
        if prefetch > bound:
            raise InvalidRequest(
                f"prefetch={prefetch} holds {prefetch + 1} batches, which needs max_staleness {prefetch} or more; "
                f"run {run!r} has {bound}.",
                hint="Allow the run more staleness, or prefetch less.",
                max_staleness=bound,
            )

    # Versions ------------------------------------------------------------------------------------------------

    def announce(
        self, run: str, version: VersionLike, *, weights: WeightsLike | None = None
    ) -> Operation[messages.VersionReply]:
        """Announce a version. An int counts in the run's current lineage.

        ``weights``: the place of its weights, which the service loads into the run's policy servers; None: the learner
        has loaded them itself. Raises VersionConflict.
        """
        if isinstance(version, int):
            now = yield from self.run(run)
            version = Version(Version.parse(now.version).lineage, version)
        body = messages.VersionRequest(version=str(version), weights=_weights(weights))
        try:
            return (yield from self.call(_version_call(run, "version", body)))
        except VersionConflict as error:
            now = yield from self.run(run)
            if error.extra.get("repeated") and now.version == str(version):
                return messages.VersionReply(epoch=self.epoch, version=now.version)
            raise

    def rewind(self, run: str, version: VersionLike) -> Operation[messages.VersionReply]:
        """Go back to a checkpoint, named in full as in ``"0.12"``. This opens a new lineage, which the reply names."""
        if isinstance(version, int):
            raise InvalidRequest(
                f"Rewind to {version} does not name a lineage.", hint="Name the checkpoint in full, as in '0.12'."
            )
        call = _version_call(run, "rewind", messages.RewindRequest(version=str(version)), repeatable=False)
        return (yield from self.call(call))

    def set_priorities(self, run: str, priorities: Mapping[str, float]) -> Operation[messages.PrioritiesReply]:
        """Set the priorities of groups by id, 1e-6 to 1e6, for a prioritized draw.

        The reply names groups that are no longer in flight. Raises Conflict if the run's order has no priorities.
        """
        body = messages.PrioritiesRequest(priorities={id: float(priority) for id, priority in priorities.items()})
        call = ApiCall(
            request=request("POST", "runs", run, "priorities", body=body), read=json_reader(messages.PrioritiesReply)
        )
        return (yield from self.call(call))

    def doing(self, run: str, doing: messages.Doing) -> Operation[None]:
        """Report the learner's activity, and renew all its batch leases in the run."""
        self.leases.set_activity(run, doing)
        yield from self.call(self._doing_call(run, doing))
        self.leases.mark_renewed(run)

    def renew(self, run: str) -> Operation[None]:
        """Renew all leases held in the run, with one try: the next renewal is the retry."""
        self.leases.mark_renewed(run)
        yield from self.call(self._doing_call(run, self.leases.activity(run)), retry_for_s=0.0)

    def _doing_call(self, run: str, doing: messages.Doing) -> ApiCall[None]:
        body = messages.DoingRequest(learner=self.learner, session=self.session, doing=doing)
        return ApiCall(request=request("POST", "runs", run, "doing", body=body), read=read_nothing)

    def hold(self, run: str, wait_s: float = 0.0) -> Operation[messages.HoldReply]:
        """Ask if weights may be replaced now; wait up to ``wait_s`` for evaluations that need the old ones."""
        return (yield from self.call(_poll("runs", run, "hold", kind=messages.HoldReply).waiting(wait_s)))

    # Policy servers ------------------------------------------------------------------------------------------

    def servers(
        self, run: str, *, revision: int | None = None, wait_s: float = 0.0
    ) -> Operation[messages.PolicyServersReply]:
        """The run's policy servers and their states.

        With the ``revision`` of an earlier reply it waits up to ``wait_s`` for a change.
        """
        query = {} if revision is None else {"revision": revision}
        poll = _poll("runs", run, "servers", kind=messages.PolicyServersReply, **query)
        return (yield from self.call(poll.waiting(wait_s)))

    def add_server(self, run: str, address: str) -> Operation[None]:
        """Add a policy server to the run, or end its drain."""
        yield from self.call(_server_call("POST", run, address))

    def drain_server(self, run: str, address: str) -> Operation[None]:
        """Drain a policy server: it finishes its requests and takes no new ones. Raises UnknownServer."""
        yield from self.call(_server_call("POST", run, address, "drain"))

    def remove_server(self, run: str, address: str) -> Operation[None]:
        """Remove a policy server from the run. Raises UnknownServer."""
        yield from self.call(_server_call("DELETE", run, address))

    # Groups and evaluations ----------------------------------------------------------------------------------

    def submit_groups(self, run: str, groups: Sequence[messages.GroupRequest | TaskLike]) -> Operation[list[str]]:
        """Submit groups of the learner's choice. Returns their ids, for ``pull(groups=...)``."""
        named = [_group_request(group) for group in groups]
        ids = [group.id for group in named]
        call = ApiCall(
            request=request("POST", "runs", run, "groups", body=messages.SubmitGroupsRequest(groups=named)),
            read=json_reader(messages.SubmitGroupsReply),
        )
        try:
            return (yield from self.call(call)).groups
        except GroupExists as error:
            if error.extra.get("repeated"):
                return ids
            raise

    def evaluation(self, run: str, evaluation: str, wait_s: float = 0.0) -> Operation[messages.EvaluationReply]:
        """The state of an evaluation; waits up to ``wait_s`` for its end. Raises UnknownEvaluation."""
        poll = _poll("runs", run, "evaluations", evaluation, kind=messages.EvaluationReply)
        return (yield from self.call(poll.waiting(wait_s)))

    def evaluate(
        self,
        run: str,
        tasks: Sequence[TaskLike],
        *,
        episodes_per_task: int = 1,
        version: str = "",
        temperature: float | None = None,
        deadline_s: float = 600.0,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Operation[messages.EvaluationReply]:
        """Run episodes outside of training, pinned to a version (default: the current one).

        ``temperature`` 0 is greedy; None is the run's. The service cancels unfinished episodes after ``deadline_s``.
        With ``wait`` this returns when the evaluation is finished, or after ``timeout_s``: then check ``finished``.
        """
        body = messages.EvaluationRequest(
            tasks=[plain_task(task) for task in tasks],
            episodes_per_task=episodes_per_task,
            version=version,
            temperature=temperature,
            deadline_s=deadline_s,
        )
        started = ApiCall(
            request=request("POST", "runs", run, "evaluations", body=body),
            read=json_reader(messages.EvaluationReply),
            repeatable=False,
        )
        deadline = None if timeout_s is None else self.clock() + timeout_s
        reply = yield from self.call(started)
        while wait and not reply.finished:
            asked = self.clock()
            if deadline is not None and asked >= deadline:
                break
            wait_s = self.poll_s if deadline is None else min(self.poll_s, deadline - asked)
            reply = yield from self.evaluation(run, reply.evaluation, wait_s)
            if not reply.finished and self.clock() - asked < min(wait_s, MIN_POLL_S) / 2:
                yield Sleep(min(EARLY_POLL_DELAY_S, wait_s))
        return reply

    # Trajectories --------------------------------------------------------------------------------------------

    def page(self, run: str, filters: Mapping[str, Any], limit: int, before: str) -> Operation[messages.TrajectoryList]:
        query = {**filters, "limit": limit, "before": before or None}
        call = ApiCall(
            request=request("GET", "runs", run, "trajectories", query=query), read=json_reader(messages.TrajectoryList)
        )
        return (yield from self.call(call))

    def trajectory(self, trajectory: str) -> Operation[Trajectory]:
        """A stored trajectory. Raises UnknownTrajectory."""
        call = ApiCall(request=request("GET", "trajectories", trajectory), read=read_trajectory)
        return (yield from self.call(call))

    def asset(self, name: str) -> Operation[memoryview]:
        """The bytes of an image or a large array, checked against its name. Raises UnknownAsset, CorruptAsset."""
        found = yield from self.call(ApiCall(request=request("GET", "assets", name), read=read_asset))
        check_asset(name, found)
        return found

    def assets(self, names: Sequence[str]) -> Operation[dict[str, memoryview | HeadraceError]]:
        """Fetch assets by name, with the error in place of each that failed."""
        found: dict[str, memoryview | HeadraceError] = {}
        left = list(dict.fromkeys(names))
        while left:
            asked = left[: messages.MAX_ASSET_NAMES]
            body = messages.AssetsRequest(names=asked)
            items = yield from self.call(ApiCall(request=request("POST", "assets", body=body), read=read_assets))
            for name, item in zip(asked, items, strict=False):
                found[name] = checked_asset(name, item)
            left = left[len(items) :]
        return found

    def advantages(self, trajectory: str) -> Operation[messages.TrajectoryAdvantages]:
        """The advantages of a trajectory's turns in the batch that it was last frozen into.

        Raises UnknownTrajectory, and UnknownBatch while it is not in a batch.
        """
        call = ApiCall(request=request("GET", "trajectories", trajectory, "advantages"), read=_advantages)
        return (yield from self.call(call))


_run_status = json_reader(messages.RunStatus)
_empty_reply = json_reader(messages.EmptyReply)
_advantages = json_reader(messages.TrajectoryAdvantages)


def _weights(given: WeightsLike | None) -> messages.Weights | None:
    """The weights with an absolute path: a relative one is relative to this process, not to the policy servers."""
    return messages.Weights(path=os.path.abspath(given)) if isinstance(given, str | os.PathLike) else given


def _version_call(
    run: str, what: str, body: msgspec.Struct, *, repeatable: bool = True
) -> ApiCall[messages.VersionReply]:
    return ApiCall(
        request=request("POST", "runs", run, what, body=body),
        read=json_reader(messages.VersionReply),
        repeatable=repeatable,
    )


def _server_call(method: str, run: str, address: str, *parts: str) -> ApiCall[None]:
    body = messages.PolicyServerRequest(address=address)
    return ApiCall(request=request(method, "runs", run, "servers", *parts, body=body), read=read_nothing)


def _poll(*parts: str, kind: type[T], **query: Any) -> ApiCall[T]:
    def build(wait_s: float) -> Any:
        return request("GET", *parts, query={**query, "wait_s": f"{wait_s:g}"}, wait_s=wait_s)

    return ApiCall(request=build(0.0), read=json_reader(kind), rebuild=build)


def plain_task(task: TaskLike) -> dict[str, Any]:
    """A task as plain JSON data."""
    if isinstance(task, BaseModel):
        return task.model_dump(mode="json", exclude_unset=True)
    if isinstance(task, Mapping):
        return dict(task)
    found: dict[str, Any] = msgspec.to_builtins(task)
    return found


def _group_request(group: messages.GroupRequest | TaskLike) -> messages.GroupRequest:
    """The group with an id, by which the service recognizes a repeated submission."""
    if not isinstance(group, messages.GroupRequest):
        group = messages.GroupRequest(task=plain_task(group))
    return group if group.id else msgspec.structs.replace(group, id=uuid.uuid4().hex)
