"""Handlers of the routes that do more than one command of the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec

from headrace.errors import InvalidRequest
from headrace.wire import messages
from headrace_orchestrator.api.commands import done
from headrace_orchestrator.api.http import HttpRequest, HttpResponse, require_name
from headrace_orchestrator.buffer.projection.entries import FILTER_COLUMNS
from headrace_orchestrator.scheduler.commands import leases
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.callbacks import StoredCallback

T = TypeVar("T")

HandlerResult = HttpResponse | msgspec.Struct

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LARGE_BODY_BYTES = 256 << 10
"""Size from which on tasks are decoded in a thread."""

DEFAULT_PAGE = 100
MAX_PAGE = 1000
"""Most lines of one page of a listing."""


def _json(value: Any) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(value))


async def _read_large(request: HttpRequest, kind: type[T]) -> T:
    """Decode the body, in a thread if that takes more than a millisecond."""
    return await asyncio.to_thread(request.read, kind) if len(request.body) > LARGE_BODY_BYTES else request.read(kind)


# Workers


async def lease(service: Service, request: HttpRequest) -> HandlerResult:
    body = request.read(messages.LeaseRequest)
    return await service.lease(msgspec.structs.replace(body, wait_s=request.grant(body.wait_s)), request.disconnected)


async def submit(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.require_stored().submissions.submit(_worker(request), request.body)


def submit_nowait(service: Service, request: HttpRequest, on_stored: StoredCallback[messages.SubmitReply]) -> None:
    service.require_stored().submissions.submit_nowait(_worker(request), request.body, on_stored)


def _worker(request: HttpRequest) -> str:
    worker = request.query.get("worker", "")
    if not worker:
        raise InvalidRequest("The query field worker is missing.", hint="Post to .../worker/submit?worker=NAME.")
    require_name("worker", worker)
    return worker


async def claim_assets(service: Service, request: HttpRequest) -> HandlerResult:
    return service.claim_assets(request.read(messages.AssetsRequest))


async def add_asset(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.add_asset(request.params["asset"], request.body)


async def drain_worker(service: Service, request: HttpRequest) -> HandlerResult:
    worker = request.params["worker"]
    require_name("worker", worker)
    key = request.query.get("key", "")
    if key:
        require_name("key", key)
    await service.execute(lambda state, now: leases.drain_worker(state, worker, key, now))
    return done(service)


async def workers(service: Service, request: HttpRequest) -> HandlerResult:
    service.require_stored()
    return _json(service.status().workers)


# Runs


async def create_run(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.create_run(request.body)


async def runs(service: Service, request: HttpRequest) -> HandlerResult:
    service.require_stored()
    return _json(service.status().runs)


async def run(service: Service, request: HttpRequest) -> HandlerResult:
    tasks = request.query.get("tasks", "true")
    if tasks not in ("true", "false"):
        raise InvalidRequest(f"tasks={tasks!r} is neither true nor false.", hint="/docs shows the query fields.")
    return HttpResponse(await service.run_with_spec(request.params["run"], tasks=tasks == "true"))


async def close_run(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.close_run(request.params["run"])


async def submit_groups(service: Service, request: HttpRequest) -> HandlerResult:
    body = await _read_large(request, messages.SubmitGroupsRequest)
    for number, group in enumerate(body.groups):
        if group.id:
            require_name(f"groups.{number}.id", group.id)
    return await service.submit_groups(request.params["run"], body)


async def groups(service: Service, request: HttpRequest) -> HandlerResult:
    return _json(service.groups(request.params["run"]))


# Learners


async def pull(service: Service, request: HttpRequest) -> HandlerResult:
    body = request.read(messages.PullRequest)
    granted = msgspec.structs.replace(body, wait_s=request.grant(body.wait_s))
    served = await service.require_stored().pulls.pull(request.params["run"], granted, request.disconnected)
    if isinstance(served, messages.EmptyReply):
        return served
    return HttpResponse(
        served.body,
        media_type=messages.BATCH_MEDIA_TYPE,
        headers={messages.HEADER_GENERATION: str(served.generation), messages.HEADER_LEASE_S: f"{served.lease_s:.3f}"},
        length=served.size_bytes,
    )


async def hold(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.hold(request.params["run"], request.wait_s(), request.disconnected)


async def start_evaluation(service: Service, request: HttpRequest) -> HandlerResult:
    body = await _read_large(request, messages.EvaluationRequest)
    if body.key:
        require_name("key", body.key)
    return await service.start_evaluation(request.params["run"], body)


async def evaluation(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.evaluation(
        request.params["run"], request.params["evaluation"], request.wait_s(), request.disconnected
    )


# Policy servers


async def servers(service: Service, request: HttpRequest) -> HandlerResult:
    revision = request.number("revision", -1, int)
    return await service.require_stored().policy_servers.servers(
        request.params["run"], revision, request.wait_s(), request.disconnected
    )


# Reading


async def trajectories(service: Service, request: HttpRequest) -> HandlerResult:
    limit = request.number("limit", DEFAULT_PAGE, int)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit={limit} is outside 1 to {MAX_PAGE}.", hint="Page with before= for more.")
    before = request.number("before", None, int)
    if before is not None and not 0 <= before < 1 << 63:
        raise InvalidRequest(f"before={before} is not a place in a listing.", hint="Give the field next of a page.")
    filters = {name: request.query[name] for name in FILTER_COLUMNS if name in request.query}
    return await service.trajectories(request.params["run"], filters, limit, before)


async def trajectory(service: Service, request: HttpRequest) -> HandlerResult:
    return HttpResponse(await service.trajectory(request.params["trajectory"]), media_type=messages.RECORDS_MEDIA_TYPE)


async def asset(service: Service, request: HttpRequest) -> HandlerResult:
    data = await service.require_stored().assets.read(request.params["asset"])
    return HttpResponse(data, media_type=messages.ASSET_MEDIA_TYPE)


async def assets(service: Service, request: HttpRequest) -> HandlerResult:
    return HttpResponse(
        await service.assets(request.read(messages.AssetsRequest)), media_type=messages.ASSETS_MEDIA_TYPE
    )


async def advantages(service: Service, request: HttpRequest) -> HandlerResult:
    return await service.advantages(request.params["trajectory"])


async def status(service: Service, request: HttpRequest) -> HandlerResult:
    service.require_stored()
    return service.status()


async def health(service: Service, request: HttpRequest) -> HandlerResult:
    return done(service)


async def readiness(service: Service, request: HttpRequest) -> HandlerResult:
    service.require_ready()
    return done(service)


async def metrics(service: Service, request: HttpRequest) -> HandlerResult:
    return HttpResponse(service.metrics.exposition(), media_type=METRICS_MEDIA_TYPE)
