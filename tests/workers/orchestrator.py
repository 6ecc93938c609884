"""A stand-in for the orchestrator over real HTTP on the loopback interface."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

from headrace.assets import check_asset
from headrace.errors import (
    AssetsMissing,
    HeadraceError,
    InternalError,
    InvalidTrajectory,
    RequestTooLarge,
    Unavailable,
    UnknownRun,
)
from headrace.runspec import RunSpec
from headrace.trajectory import Trajectory
from headrace.validation import validate
from headrace.wire import codec, messages

WITHIN_S = 60.0
"""Longest wait for an action of a worker; a busy machine takes many times as long as an idle one."""

QUEUE_WAIT_S = 0.02
"""Duration of a long poll."""


class Orchestrator:
    """Grants what is put into ``queue``, keeps what is submitted, and counts what is asked."""

    def __init__(self) -> None:
        self.url = ""
        self.epoch = 1
        self.queue: list[messages.Assignment] = []
        self.records: list[Trajectory] = []
        self.leases: list[messages.LeaseRequest] = []
        self.heartbeats: list[messages.HeartbeatRequest] = []
        self.returned: list[messages.AttemptKey] = []
        self.cancels: list[messages.Cancel] = []
        self.submissions: list[int] = []
        self.assets: dict[str, bytes] = {}
        self.sent_assets: list[str] = []
        self.forgets: set[str] = set()
        self.refused_assets: set[str] = set()
        self.spec_requests = 0
        self.spec = RunSpec(name="r")
        self.interval_s = 0.02
        self.drain = False
        self.away = False
        self.takes_records = True
        self.turned_away = 0
        self.verdicts: dict[str, messages.SubmitVerdict] = {}
        self.refused_body: HeadraceError | None = None
        self.poison = ""
        self.page: tuple[int, str, bytes] | None = None
        self.swallows_leases = False
        self.token = ""
        self.changed = asyncio.Condition()

    async def until(self, holds: Any) -> None:
        """Wait until ``holds()``, looked at after each request."""
        async with asyncio.timeout(WITHIN_S), self.changed:
            await self.changed.wait_for(holds)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if self.page is not None:
                self.turned_away += 1
                status, media_type, body = self.page
                return web.Response(status=status, body=body, content_type=media_type)
            if self.away or (request.path.endswith("/submit") and not self.takes_records):
                self.turned_away += 1
                raise Unavailable("away")
            assert request.headers.get("Authorization", "") == (f"Bearer {self.token}" if self.token else "")
            reply = await handler(request)
            return web.Response(body=msgspec.json.encode(reply), content_type="application/json")
        except HeadraceError as error:
            body = msgspec.json.encode(error.problem())
            return web.Response(body=body, status=error.status, content_type="application/problem+json")
        finally:
            async with self.changed:
                self.changed.notify_all()

    async def _lease(self, request: web.Request) -> messages.LeaseReply:
        asked = msgspec.json.decode(await request.read(), type=messages.LeaseRequest)
        self.leases.append(asked)
        if self.swallows_leases:
            self.swallows_leases = False
            await asyncio.Event().wait()
        if not self.queue and asked.wait_s:
            await asyncio.sleep(QUEUE_WAIT_S)
        granted, self.queue = self.queue[: asked.free], self.queue[asked.free :]
        return messages.LeaseReply(epoch=self.epoch, attempts=granted, drain=self.drain)

    async def _heartbeat(self, request: web.Request) -> messages.HeartbeatReply:
        self.heartbeats.append(msgspec.json.decode(await request.read(), type=messages.HeartbeatRequest))
        return messages.HeartbeatReply(epoch=self.epoch, interval_s=self.interval_s, cancels=self.cancels)

    async def _submit(self, request: web.Request) -> messages.SubmitReply:
        assert request.query["worker"]
        body = await request.read()
        records = _records(body)
        self.submissions.append(len(records))
        if self.refused_body is not None and len(records) > 1:
            raise self.refused_body
        if any(head.episode == self.poison and codec.decode(data).status == "finished" for head, data in records):
            raise InternalError("A defect.")
        return messages.SubmitReply(epoch=self.epoch, results=[self._judge(head, data) for head, data in records])

    def _judge(self, head: messages.SubmissionHead, data: bytes) -> messages.SubmitResult:
        record = codec.decode(data)
        validate(record)
        missing = [asset.name for asset in record.assets if asset.name not in self.assets]
        if missing:
            problem = AssetsMissing("Not here.", assets=missing).problem()
            return messages.SubmitResult(episode=head.episode, verdict="assets-missing", problem=problem)
        verdict = self.verdicts.pop(record.episode, "accepted")
        if verdict == "refused":
            problem = InvalidTrajectory("It is not liked.").problem()
            return messages.SubmitResult(episode=head.episode, verdict=verdict, problem=problem)
        self.records.append(record)
        return messages.SubmitResult(episode=head.episode, verdict=verdict)

    async def _claim_assets(self, request: web.Request) -> messages.AssetsReply:
        names = msgspec.json.decode(await request.read(), type=messages.AssetsRequest).names
        missing = [name for name in names if name not in self.assets]
        for name in self.forgets:
            self.assets.pop(name, None)
        self.forgets.clear()
        return messages.AssetsReply(epoch=self.epoch, missing=missing, keep_s=60)

    async def _add_asset(self, request: web.Request) -> messages.AssetsReply:
        name, data = request.match_info["asset"], await request.read()
        if name in self.refused_assets:
            raise RequestTooLarge("Too large.")
        check_asset(name, data)
        self.sent_assets.append(name)
        self.assets[name] = data
        return messages.AssetsReply(epoch=self.epoch, missing=[], keep_s=60)

    async def _return(self, request: web.Request) -> dict[str, int]:
        self.returned += msgspec.json.decode(await request.read(), type=messages.ReturnRequest).attempts
        return {"epoch": self.epoch}

    async def _run(self, request: web.Request) -> messages.RunStatus:
        self.spec_requests += 1
        if request.match_info["run"] != self.spec.name:
            raise UnknownRun("No such run.")
        return messages.RunStatus(
            name=self.spec.name,
            state="active",
            version="0.0",
            spec=self.spec.model_dump(mode="json"),
            groups=messages.GroupCounts(),
            credit=0,
            in_flight=0,
            queued=0,
            leased=0,
            episodes={},
            batches_acked=0,
            batches_open=0,
            learner_doing="",
            learner_doing_s=-1,
            learner_waiting=False,
            reasons=[],
        )


def _records(body: bytes) -> list[tuple[messages.SubmissionHead, bytes]]:
    (length,) = struct.unpack_from("<I", body)
    heads = msgspec.json.decode(body[4 : 4 + length], type=list[messages.SubmissionHead])
    offset = 4 + length + -(4 + length) % 64
    records = []
    for head in heads:
        records.append((head, body[offset : offset + head.size_bytes]))
        offset += head.size_bytes
    assert offset == len(body)
    return records


@asynccontextmanager
async def orchestrating() -> AsyncIterator[Orchestrator]:
    """A stand-in that listens while the block runs."""
    stub = Orchestrator()
    application = web.Application(middlewares=[stub._middleware], client_max_size=64 << 20)
    application.router.add_post("/v1/worker/lease", stub._lease)  # type: ignore[arg-type]
    application.router.add_post("/v1/worker/heartbeat", stub._heartbeat)  # type: ignore[arg-type]
    application.router.add_post("/v1/worker/submit", stub._submit)  # type: ignore[arg-type]
    application.router.add_post("/v1/worker/assets", stub._claim_assets)  # type: ignore[arg-type]
    application.router.add_put("/v1/assets/{asset}", stub._add_asset)  # type: ignore[arg-type]
    application.router.add_post("/v1/worker/return", stub._return)  # type: ignore[arg-type]
    application.router.add_get("/v1/runs/{run}", stub._run)  # type: ignore[arg-type]
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stub.url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        yield stub
    finally:
        await runner.cleanup()
