"""G04: a proxy that times out on a long poll which the service answers a moment later, that buffers, or that limits
bodies. Real service, real clients, real worker; every duration is a tenth of that in the reported case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from headrace.client.async_client import AsyncClient
from headrace.errors import RequestTooLarge, Unavailable
from headrace.wire import codec, messages
from headrace_workers.worker.connection import EpochFence, OrchestratorConnection
from headrace_workers.worker.spool import Spool, SpoolEntry
from headrace_workers.worker.submitter import Submitter
from tests.orchestrator.serving import Api, orchestrator, record_for, submission

# aiohttp's advice to clients that do other work meanwhile; here there is none.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

SILENCE_S = 0.5
PAGE = "<html><head><title>504 Gateway Time-out</title></head></html>"


class Proxy:
    """Answers 504 with a page after ``SILENCE_S``, while the upstream request continues; forwards whole responses."""

    def __init__(self, upstream: str, max_body_bytes: int) -> None:
        self.upstream = upstream
        self.max_body_bytes = max_body_bytes
        self.timeouts = 0
        self.left_running: set[asyncio.Task[Any]] = set()
        self.session = aiohttp.ClientSession()

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        if len(body) > self.max_body_bytes:
            return web.Response(status=413, text="<html>413 Request Entity Too Large</html>", content_type="text/html")
        forwarding = asyncio.create_task(self.send(request.method, request.path_qs, body, request.headers))
        try:
            async with asyncio.timeout(SILENCE_S):
                return await asyncio.shield(forwarding)
        except TimeoutError:
            self.timeouts += 1
            self.left_running.add(forwarding)
            return web.Response(status=504, text=PAGE, content_type="text/html", headers={"Connection": "close"})

    async def send(self, method: str, path: str, body: bytes, headers: Any) -> web.Response:
        forwarded = {name: value for name, value in headers.items() if name in ("Content-Type", "Accept-Encoding")}
        async with self.session.request(method, self.upstream + path, data=body or None, headers=forwarded) as answer:
            returned = {k: v for k, v in answer.headers.items() if k.lower().startswith(("headrace-", "content-type"))}
            return web.Response(status=answer.status, body=await answer.read(), headers=returned)


@asynccontextmanager
async def proxied(api: Api, max_body_bytes: int = 1 << 30) -> AsyncIterator[tuple[str, Proxy]]:
    proxy = Proxy(str(api.session._base_url).rstrip("/"), max_body_bytes)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", proxy.forward)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", proxy
    finally:
        await runner.cleanup()
        for task in proxy.left_running:
            task.cancel()
        await asyncio.gather(*proxy.left_running, return_exceptions=True)
        await proxy.session.close()


async def test_g04_the_next_pull_returns_the_batch_that_the_proxy_dropped(data_dir: Path):
    async with orchestrator(data_dir) as api, proxied(api) as (url, proxy):
        await api.create_run()
        attempts = await api.lease(free=4)

        async def finish_late() -> None:
            await asyncio.sleep(0.7)
            await api.submit(submission((attempt, record_for(attempt)) for attempt in attempts))

        async with AsyncClient(url, poll_s=2.0, retry_for_s=20, on_wait=lambda run, reasons: None) as learner:
            late = asyncio.create_task(finish_late())
            batch = await learner.pull("run", timeout_s=20)
            await late
            assert proxy.timeouts >= 1
            status = await learner.run("run")
            assert (status.batches_open, status.groups.leased) == (1, 2), "one batch, not two"
            await learner.ack(batch, 1)
        async with AsyncClient(str(api.session._base_url)) as direct:
            assert (await direct.run("run")).batches_acked == 1


async def test_g04_the_error_of_a_failed_pull_names_the_proxy_its_status_and_the_wait(data_dir: Path):
    async with orchestrator(data_dir) as api, proxied(api) as (url, proxy):
        await api.create_run()
        async with AsyncClient(url, poll_s=2.0, retry_for_s=0.1) as learner:
            with pytest.raises(Unavailable, match=r"A proxy responded 504 \(text/html\).*wait_s = 2") as caught:
                await learner.pull("run")
            assert caught.value.extra["http_status"] == 504
            assert "read timeout" in caught.value.hint
            await api.play(free=4)
            assert (await learner.pull("run")).generation == 1, "the next pull continues the failed one"
        assert proxy.timeouts >= 1


async def test_g04_a_grant_that_was_lost_is_granted_again_at_once_and_draws_no_budget(data_dir: Path):
    async with orchestrator(data_dir) as api, proxied(api) as (url, proxy):
        fence = EpochFence()
        connection = OrchestratorConnection(url, worker="worker-1", token="", fence=fence)
        request = messages.LeaseRequest(worker="worker-1", slots=4, free=4, wait_s=2.0)
        leasing = asyncio.create_task(connection.lease(msgspec.structs.replace(request, holding=[])))
        with pytest.raises(Unavailable, match="504"):
            await leasing
        await api.create_run(
            attempt_lease_s=60
        )  # now there is work, and it is granted to the request that the proxy dropped
        (dropped,) = proxy.left_running
        lost = msgspec.json.decode((await dropped).body, type=messages.LeaseReply).attempts  # type: ignore[arg-type]
        assert len(lost) == 4
        begun = time.monotonic()
        reply = await connection.lease(msgspec.structs.replace(request, holding=[]))
        await connection.close()
        assert reply.attempts == lost, "the same attempts: no attempt number and no retry is used"
        assert time.monotonic() - begun < 60 / 3, "long before the lease of the first grant ends"


async def test_g04_a_body_that_a_proxy_refuses_names_the_limit_and_stays_in_the_spool(data_dir: Path):
    async with orchestrator(data_dir) as api, proxied(api, max_body_bytes=1 << 20) as (url, _):
        await api.create_run()
        attempts = await api.lease(free=4)
        large = record_for(attempts[0], turns=1, turn_tokens=400_000)
        spool = Spool(1 << 30)
        for attempt in attempts:
            record = record_for(attempt) if attempt is not attempts[0] else large
            spool.add(SpoolEntry(attempt, codec.encode(record)))
        connection = OrchestratorConnection(url, worker="worker-1", token="", fence=EpochFence())
        with pytest.raises(RequestTooLarge, match=r"refused a body of \d{7} bytes with 413.*max_body_bytes"):
            await connection.submit([(entry.key, entry.record) for entry in spool.entries()])
        submitter = Submitter(connection, spool, lambda entry, error: pytest.fail(str(error)))
        sending = asyncio.create_task(submitter.submit_forever())
        async with asyncio.timeout(20):
            while len(spool) > 1:
                await asyncio.sleep(0.01)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await connection.close()
        (kept,) = spool.entries()
        assert kept.assignment == attempts[0]
        assert (await api.ask("GET", "/v1/runs/run"))["episodes"] == {"finished": 3}


async def test_g04_a_large_batch_passes_a_proxy_that_buffers(data_dir: Path):
    async with orchestrator(data_dir) as api, proxied(api) as (url, _):
        await api.create_run()
        await api.play(free=4, turns=1, turn_tokens=300_000)
        async with AsyncClient(url) as learner:
            batch = await learner.pull("run", timeout_s=20)
            assert len(batch.records) > 10 << 20
            batch.verify()
            await learner.ack(batch)


@pytest.mark.parametrize("ask", ["lease", "pull", "hold"])
async def test_g04_the_server_caps_the_wait_and_reports_the_wait_that_it_used(data_dir: Path, ask: str):
    async with orchestrator(data_dir, max_wait_s=0.2) as api:
        await api.create_run()
        await api.lease("other", free=99)
        requests: dict[str, Callable[[], Any]] = {
            "lease": lambda: api.session.post(
                "/v1/worker/lease", json={"worker": "w", "slots": 4, "free": 4, "wait_s": 20}
            ),
            "pull": lambda: api.session.post(
                "/v1/runs/run/pull", json={"learner": "l", "session": "s", "request": "r", "wait_s": 20}
            ),
            "hold": lambda: api.session.get("/v1/runs/run/hold?wait_s=20"),
        }
        async with asyncio.timeout(10), requests[ask]() as answer:
            assert answer.status == 200
            assert answer.headers[messages.HEADER_WAIT_S] == "0.2"
            if ask == "pull":
                assert 0.2 <= (await answer.json())["waited_s"] < 10


async def test_a_response_to_a_request_without_a_long_poll_reports_no_wait(data_dir: Path):
    async with orchestrator(data_dir) as api, api.session.get("/v1/status") as answer:
        assert messages.HEADER_WAIT_S not in answer.headers
