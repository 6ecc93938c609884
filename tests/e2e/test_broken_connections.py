"""Connections that break after a call was carried out: every call that changes something takes effect once.

A proxy forwards each request to a real service, and closes the connection in place of the first response.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from headrace.client.async_client import AsyncClient
from tests.compatibility.summary import control_events
from tests.orchestrator.serving import Api, orchestrator

SERVER = "http://127.0.0.1:1"
TASK = {"environment": "test:Echo", "seed": 1}


class BreakingProxy:
    """Counts the requests that change something by path, and drops the response to the first of each."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.calls: Counter[str] = Counter()
        self.session = aiohttp.ClientSession(headers={"Accept-Encoding": "identity"})

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        kept = {"Content-Type": request.headers["Content-Type"]} if body else {}
        async with self.session.request(
            request.method, self.upstream + request.path_qs, data=body or None, headers=kept
        ) as answer:
            returned = {k: v for k, v in answer.headers.items() if k.lower().startswith(("headrace-", "content-type"))}
            response = web.Response(status=answer.status, body=await answer.read(), headers=returned)
        name = f"{request.method} {request.path.removeprefix('/v1/')}"
        if request.method != "GET":
            self.calls[name] += 1
            if self.calls[name] == 1:
                assert request.transport is not None
                request.transport.close()
        return response


@asynccontextmanager
async def breaking(api: Api) -> AsyncIterator[tuple[str, BreakingProxy]]:
    proxy = BreakingProxy(str(api.session._base_url).rstrip("/"))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", proxy
    finally:
        await runner.cleanup()
        await proxy.session.close()


async def test_every_call_that_changes_something_takes_effect_once_over_connections_that_break(data_dir: Path) -> None:
    spec: dict[str, Any] = {
        "name": "run",
        "environments": [{"id": "test:Echo"}],
        "group_size": 2,
        "batch_size": 4,
        "policy": {"endpoints": ["http://127.0.0.1:2"]},
        "selection": {"order": "prioritized"},
    }
    async with orchestrator(data_dir) as api, breaking(api) as (url, proxy):
        async with AsyncClient(url, retry_for_s=20) as client:
            await client.create_run(spec)
            attempts = await api.lease(free=1)
            for number in (1, 2):
                assert (await client.announce("run", number)).version == f"0.{number}"
            assert (await client.rewind("run", "0.1")).version == "1.1"
            evaluation = await client.evaluate("run", [TASK], wait=False)
            (group,) = await client.submit_groups("run", [TASK])
            await client.set_priorities("run", {group: 2.0})
            await client.add_server("run", SERVER)
            await client.drain_server("run", SERVER)
            await client.remove_server("run", SERVER)
            await client.drain_worker("worker-1")
            await client.close_run("run")
            assert attempts
            status = await client.run("run")
        assert status.version == "1.1"
        assert len((await api.ask("GET", f"/v1/runs/run/evaluations/{evaluation.evaluation}"))["evaluation"]) == 32
    events = Counter(event["type"] for event in control_events(data_dir))
    assert events["EvaluationStarted"] == 1
    assert events["VersionAnnounced"] == 3
    assert events["WorkerDraining"] == 1
    assert events["ServerRemoved"] == events["ServerAdded"] == events["ServerDrained"] == 1
    assert events["RunCreated"] == events["RunClosed"] == 1
    assert len(proxy.calls) == 11
    assert min(proxy.calls.values()) >= 2, "each was sent again"
