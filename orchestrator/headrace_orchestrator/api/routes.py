"""All routes, as data: what drives dispatch, auth, OpenAPI and the docs page."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace import errors
from headrace.runspec import RunSpec
from headrace.server.auth import Role
from headrace.wire import messages
from headrace.wire.messages import API
from headrace_orchestrator.api import handlers, openapi, pages
from headrace_orchestrator.api.http import HttpRequest, HttpResponse
from headrace_orchestrator.api.route import Query, Route
from headrace_orchestrator.console import render
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.shell import HEADRACE_VERSION

WORKER = frozenset[Role]({"worker"})
LEARNER = frozenset[Role]({"learner"})
ADMIN = frozenset[Role]({"admin"})
VIEWER = frozenset[Role]({"viewer"})
READERS = frozenset[Role]({"viewer", "learner"})
ANY_READER = frozenset[Role]({"viewer", "learner", "worker"})

WAIT = Query("wait_s", f"Seconds to wait for a change, at most {messages.MAX_WAIT_S:g} unless set otherwise.", "number")

RUN_ERRORS = (errors.UnknownRun,)
BATCH_ERRORS = (errors.UnknownRun, errors.UnknownBatch, errors.BatchAlreadyAcked, errors.BatchSuperseded)
VERSION_ERRORS = (errors.VersionConflict, errors.VersionUnknown)


async def describe(service: Service, call: HttpRequest) -> HttpResponse:
    """This table as OpenAPI."""
    return HttpResponse(msgspec.json.encode(openapi.document(ROUTES, HEADRACE_VERSION)))


async def docs(service: Service, call: HttpRequest) -> HttpResponse:
    """This table as a page."""
    return pages.page(render.docs(openapi.document(ROUTES, HEADRACE_VERSION)))


def _worker_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path=f"{API}/worker/lease",
            summary="Ask for work; waits until there is some.",
            handler=handlers.lease,
            roles=WORKER,
            request=messages.LeaseRequest,
            response=messages.LeaseReply,
        ),
        Route(
            method="POST",
            path=f"{API}/worker/heartbeat",
            summary="Renew the leases of all attempts of a worker.",
            handler=handlers.heartbeat,
            roles=WORKER,
            request=messages.HeartbeatRequest,
            response=messages.HeartbeatReply,
        ),
        Route(
            method="POST",
            path=f"{API}/worker/submit",
            summary="Submit finished episodes; answered when they are on disk. Body: see Submission.",
            handler=handlers.submit,
            direct=handlers.submit_nowait,
            roles=WORKER,
            request=messages.RECORDS_MEDIA_TYPE,
            response=messages.SubmitReply,
            query=(Query("worker", "Name of the worker."),),
            errors=(errors.InvalidRequest, errors.RequestTooLarge, errors.StoreError),
        ),
        Route(
            method="POST",
            path=f"{API}/worker/assets",
            summary="Ask which assets of records to come are there already; those are kept for a while.",
            handler=handlers.claim_assets,
            roles=WORKER,
            request=messages.AssetsRequest,
            response=messages.AssetsReply,
        ),
        Route(
            method="PUT",
            path=f"{API}/assets/{{asset}}",
            summary="Send an asset; answered when it is on disk. Its name is the SHA-256 of its bytes.",
            handler=handlers.add_asset,
            roles=WORKER,
            request=messages.ASSET_MEDIA_TYPE,
            response=messages.AssetsReply,
            errors=(errors.InvalidAsset, errors.RequestTooLarge, errors.StoreError),
        ),
        Route(
            method="POST",
            path=f"{API}/worker/return",
            summary="Hand back attempts that will not be finished.",
            handler=handlers.hand_back,
            roles=WORKER,
            request=messages.ReturnRequest,
        ),
        Route(
            method="POST",
            path=f"{API}/workers/{{worker}}/drain",
            summary="Give a worker nothing new.",
            handler=handlers.drain_worker,
            roles=ADMIN,
            errors=(errors.NotFound,),
        ),
        Route(
            method="GET",
            path=f"{API}/workers",
            summary="All workers.",
            handler=handlers.workers,
            roles=ANY_READER,
            response=list[messages.WorkerStatus],
        ),
    ]


def _run_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path=f"{API}/runs",
            summary="Create a run.",
            handler=handlers.create_run,
            roles=LEARNER,
            request=RunSpec,
            response=messages.RunStatus,
            status=201,
            errors=(errors.InvalidRunSpec, errors.RunExists, errors.UnknownEnvironment),
        ),
        Route(
            method="GET",
            path=f"{API}/runs",
            summary="All runs.",
            handler=handlers.runs,
            roles=ANY_READER,
            response=list[messages.RunStatus],
        ),
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}",
            summary="One run.",
            handler=handlers.run,
            roles=ANY_READER,
            response=messages.RunStatus,
            errors=RUN_ERRORS,
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/close",
            summary="End a run: nothing more is dispatched or served.",
            handler=handlers.close_run,
            roles=LEARNER,
            response=messages.RunStatus,
            errors=RUN_ERRORS,
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/groups",
            summary="Submit groups of the learner's own.",
            handler=handlers.submit_groups,
            roles=LEARNER,
            request=messages.SubmitGroupsRequest,
            response=messages.SubmitGroupsReply,
            status=201,
            errors=(*RUN_ERRORS, errors.GroupExists, errors.UnknownEnvironment),
        ),
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}/groups",
            summary="Groups in flight, the 1,000 oldest at most; the run's status counts all.",
            handler=handlers.groups,
            roles=READERS,
            response=list[dict[str, Any]],
            errors=RUN_ERRORS,
        ),
    ]


def _learner_routes() -> list[Route]:
    return [
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/pull",
            summary="Lease a batch; waits until one is ready. JSON (EmptyReply) where there is none.",
            handler=handlers.pull,
            roles=LEARNER,
            request=messages.PullRequest,
            response=messages.BATCH_MEDIA_TYPE,
            errors=(*RUN_ERRORS, errors.UnknownGroup, errors.SessionSuperseded, errors.CorruptRecord),
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/resume",
            summary="What a learner that was started again left unacked; a pull that names one fetches it.",
            handler=handlers.resume,
            roles=LEARNER,
            request=messages.ResumeRequest,
            response=messages.ResumeReply,
            errors=(*RUN_ERRORS, errors.SessionSuperseded),
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/batches/{{batch}}/ack",
            summary="The batch was trained on.",
            handler=handlers.ack,
            roles=LEARNER,
            request=messages.AckRequest,
            response=messages.AckReply,
            errors=(*BATCH_ERRORS, errors.ShardsNotFetched, *VERSION_ERRORS),
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/batches/{{batch}}/nack",
            summary="Give a batch back.",
            handler=handlers.nack,
            roles=LEARNER,
            request=messages.NackRequest,
            errors=BATCH_ERRORS,
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/version",
            summary="Announce a version, after its weights are loaded.",
            handler=handlers.announce,
            roles=LEARNER,
            request=messages.VersionRequest,
            response=messages.VersionReply,
            errors=(*RUN_ERRORS, *VERSION_ERRORS),
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/priorities",
            summary="Set the priorities of groups; what a prioritized draw goes by.",
            handler=handlers.set_priorities,
            roles=LEARNER,
            request=messages.PrioritiesRequest,
            response=messages.PrioritiesReply,
            errors=(*RUN_ERRORS, errors.Conflict),
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/rewind",
            summary="Go back to a checkpoint: open a new lineage.",
            handler=handlers.rewind,
            roles=LEARNER,
            request=messages.RewindRequest,
            response=messages.VersionReply,
            errors=(*RUN_ERRORS, *VERSION_ERRORS),
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/doing",
            summary="Say what the learner does; renews its batch leases.",
            handler=handlers.doing,
            roles=LEARNER,
            request=messages.DoingRequest,
            errors=RUN_ERRORS,
        ),
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}/hold",
            summary="Whether weights may be replaced now; waits until they may.",
            handler=handlers.hold,
            roles=LEARNER,
            response=messages.HoldReply,
            query=(WAIT,),
            errors=RUN_ERRORS,
        ),
        Route(
            method="POST",
            path=f"{API}/runs/{{run}}/evaluations",
            summary="Start an evaluation, pinned to a version.",
            handler=handlers.start_evaluation,
            roles=LEARNER,
            request=messages.EvaluationRequest,
            response=messages.EvaluationReply,
            status=201,
            errors=(*RUN_ERRORS, errors.VersionUnknown, errors.UnknownEnvironment),
        ),
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}/evaluations/{{evaluation}}",
            summary="An evaluation; waits until it is finished.",
            handler=handlers.evaluation,
            roles=READERS,
            response=messages.EvaluationReply,
            query=(WAIT,),
            errors=(*RUN_ERRORS, errors.UnknownEvaluation),
        ),
    ]


def _server_routes() -> list[Route]:
    path = f"{API}/runs/{{run}}/servers"
    return [
        Route(
            method="GET",
            path=path,
            summary="The policy servers of a run; waits while their revision is the one that is given.",
            handler=handlers.servers,
            roles=ANY_READER,
            response=messages.PolicyServersReply,
            query=(Query("revision", "The revision that is known. Default: none.", "integer"), WAIT),
            errors=RUN_ERRORS,
        ),
        Route(
            method="POST",
            path=path,
            summary="Give a run another policy server, or end the drain of one.",
            handler=handlers.add_server,
            roles=LEARNER,
            request=messages.PolicyServerRequest,
            errors=(*RUN_ERRORS, errors.InvalidRequest, errors.Conflict),
        ),
        Route(
            method="POST",
            path=f"{path}/drain",
            summary="Let a policy server finish what it has; it takes nothing new.",
            handler=handlers.drain_server,
            roles=LEARNER,
            request=messages.PolicyServerRequest,
            errors=(*RUN_ERRORS, errors.UnknownServer),
        ),
        Route(
            method="DELETE",
            path=path,
            summary="Take a policy server from a run.",
            handler=handlers.remove_server,
            roles=LEARNER,
            request=messages.PolicyServerRequest,
            errors=(*RUN_ERRORS, errors.UnknownServer),
        ),
    ]


def _reading_routes() -> list[Route]:
    return [
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}/trajectories",
            summary="Stored trajectories of a run, newest first.",
            handler=handlers.trajectories,
            roles=READERS,
            response=messages.TrajectoryList,
            query=(
                Query("status", "Only this status."),
                Query("environment", "Only this environment id."),
                Query("evaluation", "Only this evaluation."),
                Query("limit", "Lines of a page, at most 1000.", "integer"),
                Query("before", "The next field of the page before."),
            ),
            errors=RUN_ERRORS,
        ),
        Route(
            method="GET",
            path=f"{API}/trajectories/{{trajectory}}",
            summary="One record, as it is stored.",
            handler=handlers.trajectory,
            roles=READERS,
            response=messages.RECORDS_MEDIA_TYPE,
            errors=(errors.UnknownTrajectory, errors.CorruptRecord),
        ),
        Route(
            method="GET",
            path=f"{API}/assets/{{asset}}",
            summary="An image or a large array, by its name.",
            handler=handlers.asset,
            roles=READERS,
            response=messages.ASSET_MEDIA_TYPE,
            errors=(errors.UnknownAsset, errors.CorruptAsset),
        ),
        Route(
            method="POST",
            path=f"{API}/assets",
            summary="Several assets in one answer, the first of those that are asked for. Body: see AssetHead.",
            handler=handlers.assets,
            roles=LEARNER,
            request=messages.AssetsRequest,
            response=messages.ASSETS_MEDIA_TYPE,
        ),
        Route(
            method="GET",
            path=f"{API}/trajectories/{{trajectory}}/advantages",
            summary="Returns and advantages of a trajectory in the batch that it was last frozen into.",
            handler=handlers.advantages,
            roles=READERS,
            response=messages.TrajectoryAdvantages,
            errors=(errors.UnknownTrajectory, errors.UnknownBatch, errors.CorruptRecord),
        ),
        Route(
            method="GET",
            path=f"{API}/status",
            summary="The whole service: runs, workers, store.",
            handler=handlers.status,
            roles=ANY_READER,
            response=messages.ServiceStatus,
        ),
        Route(method="GET", path="/healthz", summary="200 while the process lives.", handler=handlers.health),
        Route(
            method="GET",
            path="/readyz",
            summary="200 when requests are answered; else 503 with phase, done, total and an estimate in seconds.",
            handler=handlers.readiness,
            errors=(errors.Unavailable,),
        ),
        Route(
            method="GET",
            path="/metrics",
            summary="Metrics for Prometheus.",
            handler=handlers.metrics,
            roles=VIEWER,
            response="text/plain",
        ),
        Route(
            method="GET",
            path="/openapi.json",
            summary="This table as OpenAPI 3.1.",
            handler=describe,
            roles=VIEWER,
            response=dict[str, Any],
        ),
        Route(
            method="GET",
            path="/docs",
            summary="This table to read.",
            handler=docs,
            roles=VIEWER,
            response="text/html",
        ),
        Route(
            method="GET",
            path="/",
            summary="The console.",
            handler=pages.console,
            roles=VIEWER,
            response="text/html",
        ),
        Route(
            method="GET",
            path="/events",
            summary="The console's content, sent again when it changes (server-sent events).",
            handler=pages.events,
            roles=VIEWER,
            response="text/event-stream",
        ),
    ]


ROUTES: tuple[Route, ...] = (
    *_worker_routes(),
    *_run_routes(),
    *_learner_routes(),
    *_server_routes(),
    *_reading_routes(),
)
