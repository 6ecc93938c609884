"""What each route does: read the request, ask the service, give its answer back."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.wire import messages
from headrace_orchestrator.api.http import HttpRequest, HttpResponse, require_name
from headrace_orchestrator.buffer.projection.entries import FILTER_COLUMNS
from headrace_orchestrator.service import Service
from headrace_orchestrator.service.callbacks import StoredCallback

HandlerResult = HttpResponse | msgspec.Struct

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DEFAULT_PAGE = 100
MAX_PAGE = 1000
"""Lines of one page of a listing."""


def _done(service: Service) -> HttpResponse:
    return HttpResponse(b'{"epoch":%d}' % service.epoch)


def _json(value: Any) -> HttpResponse:
    return HttpResponse(msgspec.json.encode(value))


# Workers


async def lease(service: Service, call: HttpRequest) -> HandlerResult:
    request = call.read(messages.LeaseRequest)
    return await service.lease(msgspec.structs.replace(request, wait_s=call.grant(request.wait_s)), call.disconnected)


async def heartbeat(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.heartbeat(call.read(messages.HeartbeatRequest))


async def submit(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.submit(_worker(call), call.body)


def submit_nowait(service: Service, call: HttpRequest, on_stored: StoredCallback[messages.SubmitReply]) -> None:
    service.submit_nowait(_worker(call), call.body, on_stored)


def _worker(call: HttpRequest) -> str:
    worker = call.query.get("worker", "")
    if not worker:
        raise InvalidRequest("The query field worker is missing.", hint="Post to .../worker/submit?worker=NAME.")
    require_name("worker", worker)
    return worker


async def claim_assets(service: Service, call: HttpRequest) -> HandlerResult:
    return service.claim_assets(call.read(messages.AssetsRequest))


async def add_asset(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.add_asset(call.params["asset"], call.body)


async def hand_back(service: Service, call: HttpRequest) -> HandlerResult:
    await service.hand_back(call.read(messages.ReturnRequest))
    return _done(service)


async def drain_worker(service: Service, call: HttpRequest) -> HandlerResult:
    require_name("worker", call.params["worker"])
    await service.drain_worker(call.params["worker"])
    return _done(service)


async def workers(service: Service, call: HttpRequest) -> HandlerResult:
    service.require_stored()
    return _json(service.status().workers)


# Runs


async def create_run(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.create_run(call.read(dict[str, Any]))


async def runs(service: Service, call: HttpRequest) -> HandlerResult:
    service.require_stored()
    return _json(service.status().runs)


async def run(service: Service, call: HttpRequest) -> HandlerResult:
    return service.run_status(call.params["run"])


async def close_run(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.close_run(call.params["run"])


async def submit_groups(service: Service, call: HttpRequest) -> HandlerResult:
    request = call.read(messages.SubmitGroupsRequest)
    for number, group in enumerate(request.groups):
        if group.id:
            require_name(f"groups.{number}.id", group.id)
    return await service.submit_groups(call.params["run"], request)


async def groups(service: Service, call: HttpRequest) -> HandlerResult:
    return _json(service.groups(call.params["run"]))


# Learners


async def pull(service: Service, call: HttpRequest) -> HandlerResult:
    request = call.read(messages.PullRequest)
    granted = msgspec.structs.replace(request, wait_s=call.grant(request.wait_s))
    served = await service.pull(call.params["run"], granted, call.disconnected)
    if isinstance(served, messages.EmptyReply):
        return served
    return HttpResponse(
        served.body,
        media_type=messages.BATCH_MEDIA_TYPE,
        headers={messages.HEADER_GENERATION: str(served.generation), messages.HEADER_LEASE_S: f"{served.lease_s:.3f}"},
        length=served.size_bytes,
    )


async def resume(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.resume(call.params["run"], call.read(messages.ResumeRequest))


async def ack(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.ack(call.params["run"], call.params["batch"], call.read(messages.AckRequest))


async def nack(service: Service, call: HttpRequest) -> HandlerResult:
    await service.nack(call.params["run"], call.params["batch"], call.read(messages.NackRequest))
    return _done(service)


async def announce(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.announce(call.params["run"], call.read(messages.VersionRequest))


async def set_priorities(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.set_priorities(call.params["run"], call.read(messages.PrioritiesRequest))


async def rewind(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.rewind(call.params["run"], call.read(messages.RewindRequest))


async def doing(service: Service, call: HttpRequest) -> HandlerResult:
    await service.doing(call.params["run"], call.read(messages.DoingRequest))
    return _done(service)


async def hold(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.hold(call.params["run"], call.wait_s(), call.disconnected)


async def start_evaluation(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.start_evaluation(call.params["run"], call.read(messages.EvaluationRequest))


async def evaluation(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.evaluation(call.params["run"], call.params["evaluation"], call.wait_s(), call.disconnected)


# Policy servers


async def servers(service: Service, call: HttpRequest) -> HandlerResult:
    revision = call.number("revision", -1, int)
    return await service.servers(call.params["run"], revision, call.wait_s(), call.disconnected)


async def add_server(service: Service, call: HttpRequest) -> HandlerResult:
    await service.add_server(call.params["run"], call.read(messages.PolicyServerRequest).address)
    return _done(service)


async def drain_server(service: Service, call: HttpRequest) -> HandlerResult:
    await service.drain_server(call.params["run"], call.read(messages.PolicyServerRequest).address)
    return _done(service)


async def remove_server(service: Service, call: HttpRequest) -> HandlerResult:
    await service.remove_server(call.params["run"], call.read(messages.PolicyServerRequest).address)
    return _done(service)


# Reading


async def trajectories(service: Service, call: HttpRequest) -> HandlerResult:
    limit = call.number("limit", DEFAULT_PAGE, int)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"limit={limit} is outside 1 to {MAX_PAGE}.", hint="Page with before= for more.")
    before = call.number("before", None, int)
    if before is not None and not 0 <= before < 1 << 63:
        raise InvalidRequest(f"before={before} is no place in a listing.", hint="Give the next field of a page.")
    wanted = {name: call.query[name] for name in FILTER_COLUMNS if name in call.query}
    return await service.trajectories(call.params["run"], wanted, limit, before)


async def trajectory(service: Service, call: HttpRequest) -> HandlerResult:
    return HttpResponse(await service.trajectory(call.params["trajectory"]), media_type=messages.RECORDS_MEDIA_TYPE)


async def asset(service: Service, call: HttpRequest) -> HandlerResult:
    return HttpResponse(await service.asset(call.params["asset"]), media_type=messages.ASSET_MEDIA_TYPE)


async def assets(service: Service, call: HttpRequest) -> HandlerResult:
    return HttpResponse(await service.assets(call.read(messages.AssetsRequest)), media_type=messages.ASSETS_MEDIA_TYPE)


async def advantages(service: Service, call: HttpRequest) -> HandlerResult:
    return await service.advantages(call.params["trajectory"])


async def status(service: Service, call: HttpRequest) -> HandlerResult:
    service.require_stored()
    return service.status()


async def health(service: Service, call: HttpRequest) -> HandlerResult:
    return _done(service)


async def readiness(service: Service, call: HttpRequest) -> HandlerResult:
    service.require_ready()
    return _done(service)


async def metrics(service: Service, call: HttpRequest) -> HandlerResult:
    return HttpResponse(service.metrics.exposition(), media_type=METRICS_MEDIA_TYPE)
