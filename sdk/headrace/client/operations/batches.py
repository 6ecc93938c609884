"""Operations on batches and their leases.

* After a proxy's error page a pull is repeated with the same request id and a shorter wait.
* The pull after one that gave up continues it.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec

from headrace.batch.batch import Batch
from headrace.bounds import MAX_REFERENCE
from headrace.client.leases import BatchLeases
from headrace.client.operations.runs import RunOperations
from headrace.client.operations.trajectories import TrajectoryOperations
from headrace.client.operations.versions import VersionLike, WeightsLike, described_weights, warn_of_same_weights
from headrace.client.requests import ApiCall, ApiRequest, ApiResponse, Operation, json_reader, request, unexpected_body
from headrace.client.responses import read_nothing
from headrace.client.wait_reports import WaitCallback, reasons_text, report_wait, timeout_error
from headrace.common.arguments import sorted_names
from headrace.errors import (
    BatchAlreadyAcked,
    BatchSuperseded,
    GroupEnded,
    HeadraceError,
    InvalidRequest,
    RunFinished,
    UnknownBatch,
    UnknownRun,
)
from headrace.trajectory import Version
from headrace.wire import messages

log = logging.getLogger("headrace.client.sync_client")

GOODBYE_S = 2.0
"""Longest wait for the response to a goodbye: closing a client does not wait for a service that hangs."""

PullField = Literal["assets"]
"""Optional parts of a pull: ``assets`` are the images and large arrays that the trajectories refer to."""


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


def pull_query(
    run: str,
    environments: Collection[str],
    tags: Collection[str],
    fields: Collection[PullField],
    shard: int,
    shards: int,
    groups: Sequence[str] | None = None,
) -> PullQuery:
    """The query for the arguments of a pull. Raises InvalidRequest for a string in place of a list of names."""
    return PullQuery(
        run=run,
        groups=None if groups is None else tuple(groups),
        environments=sorted_names("environments", environments),
        tags=sorted_names("tags", tags),
        fields=tuple(fields),
        shard=shard,
        shards=shards,
    )


def _ended_group(reason: messages.Reason) -> str:
    """The awaited group that a reason says has ended; empty for other reasons."""
    return str(reason.facts["group"]) if reason.code == "group-ended" else ""


def _groups_ended(query: PullQuery, ended: dict[str, str], text: str, extra: dict[str, Any]) -> GroupEnded:
    left = [group for group in query.groups or () if group not in ended]
    return GroupEnded(
        f"Awaited groups of run {query.run!r} will not be served. {text}",
        hint='Pull the others: groups=error.extra["left"].' if left else "",
        ended=ended,
        left=left,
        **extra,
    )


class Resumed(NamedTuple):
    """The batches of earlier processes of the learner.

    ``batches`` were leased and never acked, oldest first: the same bytes, or this rank's shards of them. ``lost``: the
    reason why a batch is not served again, by its id.
    """

    batches: list[Batch]
    lost: dict[str, str]


@dataclass(kw_only=True)
class BatchOperations(RunOperations, TrajectoryOperations):
    """``session`` names one start of the learner; by default it is a new one, which other ranks do not share.
    ``heartbeat_s``: interval of the reports of the client, 0 without."""

    learner: str = "learner"
    session: str = ""
    heartbeat_s: float = 0.0
    on_wait: WaitCallback | None = None

    def __post_init__(self) -> None:
        self.leases = BatchLeases(self.clock)
        self._lock = threading.Lock()
        self._shared = bool(self.session)
        self.session = self.session or uuid.uuid4().hex
        self._unserved: dict[PullQuery, str] = {}
        self._pulls: Counter[str] = Counter()

    def pull(self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Operation[Batch]:
        if query.shard == 0:  # it speaks for all ranks
            self.leases.attend(query.run)
        return self._pull(query, timeout_s, on_wait)

    def _pull(self, query: PullQuery, timeout_s: float | None, on_wait: WaitCallback | None) -> Operation[Batch]:
        self._check_query(query)
        request_id = self._request_id(query)
        over = False
        try:
            batch = yield from self._poll_batch(query, request_id, timeout_s, on_wait or self.on_wait)
            over = True
            return batch
        except UnknownRun:
            self.leases.leave(query.run)
            raise
        except BatchSuperseded:
            over = True  # another rank got the batch, which is over now: the next pull gets the next batch
            raise
        finally:
            if not over:
                # The service may have leased a batch to this request id: the next pull uses it again.
                with self._lock:
                    self._unserved[query] = request_id

    def _request_id(self, query: PullQuery) -> str:
        """The request id of a pull. It is the same for the k-th pull of all ranks, so that they share its batch."""
        with self._lock:
            request_id = self._unserved.pop(query, None)
            if request_id is None and query.shards > 1:
                request_id = f"pull-{self._pulls[query.run]}"
                self._pulls[query.run] += 1
            return request_id or uuid.uuid4().hex

    def _check_query(self, query: PullQuery) -> None:
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
        self, query: PullQuery, request_id: str, timeout_s: float | None, on_wait: WaitCallback | None
    ) -> Operation[Batch]:
        run = query.run
        deadline = None if timeout_s is None else self.clock() + timeout_s
        while True:
            sent_at = self.clock()
            remaining_s = None if deadline is None else max(0.0, deadline - sent_at)
            wait_s = self.poll_s if remaining_s is None else min(self.poll_s, remaining_s)
            retry_for_s = self.retry_for_s if remaining_s is None else min(self.retry_for_s, remaining_s)
            reply = yield from self.call(self._pull_call(query, request_id, wait_s), retry_for_s=retry_for_s)
            if isinstance(reply, Batch):
                if "assets" in query.fields:
                    reply.assets.update((yield from self.assets(reply.asset_names())))
                return reply
            text, extra = reasons_text(reply.reasons), {"run": run, "reasons": msgspec.to_builtins(reply.reasons)}
            if ended := {_ended_group(reason): reason.message for reason in reply.reasons if _ended_group(reason)}:
                raise _groups_ended(query, ended, text, extra)
            if reply.finished:
                raise RunFinished(f"Run {run!r} is finished. {text}", **extra)
            if deadline is not None and self.clock() >= deadline:
                raise timeout_error(run, timeout_s or 0.0, reply.reasons)
            report_wait(on_wait, run, reply.reasons)
            yield from self.delay_next_poll(sent_at, wait_s)

    def _pull_call(self, query: PullQuery, request_id: str, wait_s: float) -> ApiCall[Batch | messages.EmptyReply]:
        def build(wait_s: float) -> ApiRequest:
            body = messages.PullRequest(
                learner=self.learner,
                session=self.session,
                request=request_id,
                wait_s=wait_s,
                groups=None if query.groups is None else list(query.groups),
                environments=list(query.environments),
                tags=list(query.tags),
                shard=query.shard,
                shards=query.shards,
                batch=query.batch,
                heartbeat_s=self.heartbeat_s,
            )
            return request("POST", "runs", query.run, "pull", body=body, wait_s=wait_s)

        def read(response: ApiResponse) -> Batch | messages.EmptyReply:
            return self._read_batch(query.run, response)

        return ApiCall(request=build(wait_s), read=read, rebuild=build)

    def _read_batch(self, run: str, response: ApiResponse) -> Batch | messages.EmptyReply:
        if response.media_type == "application/json":
            return json_reader(messages.EmptyReply)(response)
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
        self._check_query(query)
        body = messages.ResumeRequest(learner=self.learner, session=self.session, shards=query.shards)
        reply = yield from self.post(messages.ResumeReply, "runs", query.run, "resume", body=body)
        batches, lost = [], dict(reply.lost)
        for id in reply.batches:
            try:
                batches.append((yield from self._poll_batch(replace(query, batch=id), f"resume-{id}", None, None)))
            except BatchSuperseded as error:
                lost[id] = error.detail
        return Resumed(batches, lost)

    def ack(
        self, batch: Batch, version: VersionLike | None = None, *, weights: WeightsLike | None = None
    ) -> Operation[messages.AckReply]:
        """Acknowledge a batch that was trained on.

        ``version``: the version that the step made; an int counts in the batch's lineage. ``weights``: the place of its
        weights, which the service loads into the run's policy servers; None: the learner has loaded them itself.
        Their digest is sent too, if this process can read the folder. Raises BatchSuperseded if the lease was lost, and
        WeightsDamaged for incomplete files.
        """
        if not isinstance(batch, Batch):
            raise InvalidRequest(f"ack got {batch!r:.80}.", hint="Pass the batch that `pull` or `batches` returned.")
        name = ""
        if version is not None:
            name = str(Version(batch.version.lineage, version) if isinstance(version, int) else version)
        described = yield from described_weights(weights)
        body = messages.AckRequest(
            learner=self.learner,
            session=self.session,
            generation=batch.generation,
            version=name,
            weights=described,
        )
        try:
            reply = yield from self.post(messages.AckReply, "runs", batch.run, "batches", batch.id, "ack", body=body)
        except (BatchAlreadyAcked, BatchSuperseded, UnknownBatch):
            # Also after a try whose response was lost: a repeated ack gets the response of the first one.
            self.leases.drop(batch.run, batch.id)
            raise
        self.leases.drop(batch.run, batch.id)
        warn_of_same_weights(reply.version, reply.same_weights_as)
        return reply

    def nack(self, batch: Batch, reason: str) -> Operation[None]:
        """Give a batch back untrained. It is served again while it is fresh enough."""
        return self._nack(batch, reason, None)

    def _nack(self, batch: Batch, reason: str, retry_for_s: float | None) -> Operation[None]:
        body = messages.NackRequest(
            learner=self.learner, session=self.session, generation=batch.generation, reason=reason[:MAX_REFERENCE]
        )
        path = ("runs", batch.run, "batches", batch.id, "nack")
        try:
            yield from self.command("POST", *path, body=body, retry_for_s=retry_for_s)
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

    def doing(self, run: str, doing: messages.Doing) -> Operation[None]:
        """Report the learner's activity, and renew all its batch leases in the run."""
        self.leases.set_activity(run, doing)
        yield from self._report(run, doing, None)
        self.leases.mark_renewed(run)

    def renew(self, run: str) -> Operation[None]:
        """Renew all leases held in the run, with one try: the next renewal is the retry."""
        self.leases.mark_renewed(run)
        return self._report(run, self.leases.activity(run), 0.0, renewal=True)

    def say_goodbye(self) -> Operation[None]:
        """Report for each run of which this client has pulled that the learner is gone, with one try in all."""
        try:
            for run in self.leases.attended():
                self.leases.leave(run)
                body = messages.DoingRequest(learner=self.learner, session=self.session, doing="gone")
                sent = replace(request("POST", "runs", run, "doing", body=body), read_timeout_s=GOODBYE_S)
                yield from self.call(ApiCall(request=sent, read=read_nothing), retry_for_s=0.0)
        except HeadraceError as error:
            log.info("The service was not told that this learner is gone: %s", error)

    def _report(
        self, run: str, doing: messages.Doing, retry_for_s: float | None, *, renewal: bool = False
    ) -> Operation[None]:
        body = messages.DoingRequest(
            learner=self.learner, session=self.session, doing=doing, heartbeat_s=self.heartbeat_s, renewal=renewal
        )
        return self.command("POST", "runs", run, "doing", body=body, retry_for_s=retry_for_s)
