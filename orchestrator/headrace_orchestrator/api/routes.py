"""The route table, which drives dispatch, auth, OpenAPI and the page of routes."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace import errors
from headrace.bounds import MAX_SPEC_BYTES
from headrace.runspec import RunSpec
from headrace.server.auth import Role
from headrace.wire import messages
from headrace.wire.messages import API
from headrace_orchestrator.api import handlers, openapi, pages
from headrace_orchestrator.api.commands import batch_command, command, run_command
from headrace_orchestrator.api.http import HttpRequest, HttpResponse
from headrace_orchestrator.api.route import Query, Route
from headrace_orchestrator.console import render
from headrace_orchestrator.scheduler.commands import batches, leases, policy_servers, versions
from headrace_orchestrator.scheduler.commands.priorities import set_priorities
from headrace_orchestrator.scheduler.commands.resume import resume
from headrace_orchestrator.scheduler.commands.sessions import doing
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


async def describe(service: Service, request: HttpRequest) -> HttpResponse:
    """Respond with the route table as OpenAPI."""
    return HttpResponse(msgspec.json.encode(openapi.document(ROUTES, HEADRACE_VERSION)))


async def docs(service: Service, request: HttpRequest) -> HttpResponse:
    """Respond with the route table as a page."""
    document = openapi.document(ROUTES, HEADRACE_VERSION)
    return pages.page(render.docs(document, is_signed_in=pages.is_signed_in(request)))


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
        command(
            f"{API}/worker/heartbeat",
            leases.heartbeat,
            "Renew the leases of all attempts of a worker.",
            roles=WORKER,
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
            summary="Ask which assets of later records are stored already; these are kept for a while.",
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
        command(
            f"{API}/worker/return",
            leases.hand_back,
            "Hand back attempts that will not be finished.",
            roles=WORKER,
        ),
        Route(
            method="POST",
            path=f"{API}/workers/{{worker}}/drain",
            summary="Drain a worker: it gets no new attempts.",
            handler=handlers.drain_worker,
            roles=ADMIN,
            query=(Query("key", "A name of this request, by which a repeat is recognized. Default: none."),),
            errors=(errors.InvalidRequest, errors.NotFound),
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
            summary=f"Create a run; its spec has at most {MAX_SPEC_BYTES >> 20} MiB.",
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
            summary="All runs, without their specs.",
            handler=handlers.runs,
            roles=ANY_READER,
            response=list[messages.RunStatus],
        ),
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}",
            summary="One run, with its spec.",
            handler=handlers.run,
            roles=ANY_READER,
            response=messages.RunStatus,
            query=(Query("tasks", "`false`: the spec without its fixed list of tasks.", "boolean"),),
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
            summary="Submit groups that the learner chose.",
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
            errors=(
                *RUN_ERRORS,
                errors.UnknownGroup,
                errors.SessionSuperseded,
                errors.CorruptRecord,
                errors.EstimatorFailed,
                errors.SelectionRuleFailed,
            ),
        ),
        run_command(
            f"{API}/runs/{{run}}/resume",
            resume,
            "List the batches that a restarted learner left unacked; a pull that names one fetches it.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, errors.SessionSuperseded),
        ),
        batch_command(
            f"{API}/runs/{{run}}/batches/{{batch}}/ack",
            batches.ack,
            "Acknowledge a batch that was trained on.",
            roles=LEARNER,
            errors=(*BATCH_ERRORS, errors.ShardsNotFetched, *VERSION_ERRORS),
        ),
        batch_command(
            f"{API}/runs/{{run}}/batches/{{batch}}/nack",
            batches.nack,
            "Give a batch back.",
            roles=LEARNER,
            errors=BATCH_ERRORS,
        ),
        run_command(
            f"{API}/runs/{{run}}/version",
            versions.announce,
            "Announce a version, after its weights are loaded.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, *VERSION_ERRORS),
        ),
        run_command(
            f"{API}/runs/{{run}}/priorities",
            set_priorities,
            "Set the priorities of groups for prioritized draws.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, errors.Conflict),
        ),
        run_command(
            f"{API}/runs/{{run}}/rewind",
            versions.rewind,
            "Go back to a checkpoint: open a new lineage.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, *VERSION_ERRORS),
        ),
        run_command(
            f"{API}/runs/{{run}}/doing",
            doing,
            "Report what the learner is doing; renews its batch leases.",
            roles=LEARNER,
            errors=RUN_ERRORS,
        ),
        Route(
            method="GET",
            path=f"{API}/runs/{{run}}/hold",
            summary="Ask whether weights may be replaced now; waits until they may.",
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
            query=(Query("revision", "The latest revision that the client has. Default: none.", "integer"), WAIT),
            errors=RUN_ERRORS,
        ),
        run_command(
            path,
            policy_servers.add_server,
            "Give a run another policy server, or end the drain of one.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, errors.InvalidRequest, errors.Conflict),
        ),
        run_command(
            f"{path}/drain",
            policy_servers.drain_server,
            "Let a policy server finish what it has; it takes nothing new.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, errors.UnknownServer),
        ),
        run_command(
            path,
            policy_servers.remove_server,
            "Take a policy server from a run.",
            roles=LEARNER,
            errors=(*RUN_ERRORS, errors.UnknownServer),
            method="DELETE",
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
                Query("limit", "Most entries of a page, up to 1000.", "integer"),
                Query("before", "The field next of the previous page."),
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
            summary="The first of the requested assets, several in one response. Body: see AssetHead.",
            handler=handlers.assets,
            roles=LEARNER,
            request=messages.AssetsRequest,
            response=messages.ASSETS_MEDIA_TYPE,
        ),
        Route(
            method="GET",
            path=f"{API}/trajectories/{{trajectory}}/advantages",
            summary="Returns and advantages of a trajectory in its latest batch.",
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
            summary="The route table as OpenAPI 3.1.",
            handler=describe,
            roles=VIEWER,
            response=dict[str, Any],
        ),
        Route(
            method="GET",
            path="/docs",
            summary="The route table as a page.",
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


def _page_routes() -> list[Route]:
    return [
        Route(
            method="GET",
            path="/sign-in",
            summary="The page where a browser signs in with a token.",
            handler=pages.show_sign_in,
            response="text/html",
        ),
        Route(
            method="POST",
            path="/sign-in",
            summary="Sign in with a token of a viewer or an admin; sets a cookie.",
            handler=pages.sign_in,
            request="application/x-www-form-urlencoded",
            response="text/html",
            status=303,
            errors=(errors.Unauthorized, errors.Forbidden),
        ),
        Route(
            method="POST",
            path="/sign-out",
            summary="Sign out; deletes the cookie.",
            handler=pages.sign_out,
            response="text/html",
            status=303,
        ),
        Route(
            method="GET",
            path="/console.js",
            summary="The script of the console.",
            handler=pages.script,
            response="text/javascript",
        ),
        Route(
            method="GET",
            path="/console.css",
            summary="The style of all pages.",
            handler=pages.style,
            response="text/css",
        ),
    ]


ROUTES: tuple[Route, ...] = (
    *_worker_routes(),
    *_run_routes(),
    *_learner_routes(),
    *_server_routes(),
    *_reading_routes(),
    *_page_routes(),
)
