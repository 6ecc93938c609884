"""The capacity of policy servers at a real orchestrator: the cap of a run, and servers found by DNS name."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from headrace.runspec import AdmissionSpec
from headrace.wire import messages
from headrace_orchestrator.policy_servers import controller, discovery
from headrace_orchestrator.policy_servers.capacity import CapacityMeter
from headrace_orchestrator.policy_servers.server_state import WatchedServer
from tests.orchestrator.policy_servers.doubles import double
from tests.orchestrator.policy_servers.test_servers import until
from tests.orchestrator.serving import Api

LARGE = {"batch_size": 128, "max_staleness": 3}


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "PROBE_EVERY_S", 0.02)
    monkeypatch.setattr(discovery, "LOOKUP_EVERY_S", 0.02)


class Engine:
    """A policy server whose metrics the test sets."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] | None = {"vllm:num_requests_running": 1, "vllm:generation_tokens_total": 0}
        self.reads = 0

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/weight_info":
            return web.json_response({"weight_version": "0.0"})
        if request.path != "/metrics" or self.metrics is None:
            return web.Response(status=200 if request.path == "/health" else 404)
        self.reads += 1
        return web.Response(text="".join(f"{name} {value}\n" for name, value in self.metrics.items()))

    def set(self, **changes: float) -> None:
        assert self.metrics is not None
        self.metrics |= {f"vllm:{name}": value for name, value in changes.items()}


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()


async def status(api: Api, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + 20
    while not enough(reply := await api.ask("GET", "/v1/runs/run")):
        assert time.monotonic() < end, reply
        await asyncio.sleep(0.01)
    return reply


def test_a_server_counts_from_the_moment_that_the_run_has_it_as_long_as_it_takes_requests_or_is_paused() -> None:
    meter, server = CapacityMeter(AdmissionSpec(start=5, floor=1)), WatchedServer("http://a:1")
    meter.take_servers([server], 0)
    assert meter.attainable == 5
    for state, attainable in (("serving", 5), ("draining", 1), ("syncing", 5), ("ejected", 1), ("serving", 5)):
        server.state = state  # type: ignore[assignment]
        meter.take_servers([server], 0)
        assert meter.attainable == attainable, state


async def test_a_run_has_its_cap_before_its_first_episode_is_granted(api: Api) -> None:
    async with double() as one, double() as two:
        await api.create_run(**LARGE, policy={"endpoints": [one, two], "admission": {"start": 5}})
        assert len(await api.lease(free=60)) == 10
        reply = await api.pull()
        assert isinstance(reply, messages.EmptyReply)
        (reason,) = [reason for reason in reply.reasons if reason.code == "policy-saturated"]
        assert (reason.facts["attainable"], reason.facts["leased"]) == (10, 10)
        async with api.session.get("/metrics") as answer:
            assert 'headrace_run_episodes_attainable{run="run"} 10.0' in await answer.text()


async def test_a_run_without_known_servers_or_with_adapt_off_has_no_cap(api: Api) -> None:
    async with double() as one:
        await api.create_run(**LARGE, policy={"endpoints": [one], "admission": {"adapt": False, "start": 1}})
        assert len(await api.lease(free=60)) == 60
    await api.create_run(name="other", **LARGE)
    assert (await api.ask("GET", "/v1/runs/other")).get("attainable") is None


async def test_the_cap_follows_the_metrics_of_a_server_and_waiting_workers_get_its_growth(api: Api) -> None:
    engine = Engine()
    async with serving(engine) as one:
        await api.create_run(**LARGE, policy={"endpoints": [one], "admission": {"start": 4}})
        assert len(await api.lease(free=60)) == 4
        await status(api, lambda _: engine.reads > 1)
        waiting = asyncio.create_task(api.lease(worker="other", free=60, wait_s=20))
        engine.set(request_success_total=2)
        assert len(await waiting) == 2
        engine.set(num_preemptions_total=50)
        await status(api, lambda reply: reply["attainable"] < 6)


async def test_a_server_without_metrics_lifts_the_cap(api: Api) -> None:
    engine = Engine()
    engine.metrics = None
    async with serving(engine) as one:
        await api.create_run(**LARGE, policy={"endpoints": [one], "admission": {"start": 4}})
        await status(api, lambda reply: reply.get("attainable") is None)
        assert len(await api.lease(free=60)) == 60


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The IP addresses of host names, which the test sets."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if not str(host).endswith(".test"):
            return real(host, port, *more, **named)
        if not known.get(host):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in known[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


async def test_servers_change_with_the_addresses_of_their_name(api: Api, names: dict[str, list[str]]) -> None:
    async with double() as one:
        port = one.rsplit(":", 1)[1]
        await api.create_run(**LARGE, policy={"endpoints": [f"dns+http://vllm.test:{port}"]})
        reply = await status(api, lambda reply: any("resolves to no address" in r["message"] for r in reply["reasons"]))
        assert [reason["code"] for reason in reply["reasons"] if reason["code"] == "no-policy-servers"]
        names["vllm.test"] = ["127.0.0.1"]
        await until(api, lambda reply: set(reply) == {one} and reply[one].state == "serving")
        names["vllm.test"] = ["127.0.0.2"]
        await until(api, lambda reply: one in reply and reply[one].state == "draining" and len(reply) == 2)
    await until(api, lambda reply: one not in reply)
