"""Policy servers at a real orchestrator: a run's list, their states, and long polls for changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from headrace.wire import messages
from headrace_orchestrator.policy_servers import calls
from headrace_orchestrator.service.policy_servers import watches
from headrace_orchestrator.service.policy_servers.watch import PolicyServerWatch
from tests.orchestrator.policy_servers.doubles import double
from tests.orchestrator.serving import Api, orchestrator

PATH = "/v1/runs/run/servers"
UNUSED = "http://127.0.0.1:9"


async def servers(api: Api, **query: Any) -> messages.PolicyServersReply:
    fields = "&".join(f"{name}={value}" for name, value in query.items())
    return msgspec.convert(await api.ask("GET", f"{PATH}?{fields}"), messages.PolicyServersReply)


async def until(
    api: Api, enough: Callable[[dict[str, messages.PolicyServerStatus]], bool]
) -> messages.PolicyServersReply:
    """Wait until the servers satisfy ``enough``."""
    reply = await servers(api)
    end = time.monotonic() + 20
    while not enough({server.address: server for server in reply.servers}):
        assert time.monotonic() < end, reply
        reply = await servers(api, revision=reply.revision, wait_s=5)
    return reply


async def test_the_servers_of_a_run_are_those_of_its_spec_and_each_is_probed(api: Api) -> None:
    async with double() as one, double() as two:
        await api.create_run(policy={"endpoints": [f"{one}/", two, UNUSED]})
        reply = await until(api, lambda servers: all(server.state != "unknown" for server in servers.values()))
        shown = {server.address: (server.state, server.version) for server in reply.servers}
        assert shown == {one: ("serving", "0.0"), two: ("serving", "0.0"), UNUSED: ("ejected", "")}
        assert "nothing listens at this address" in reply.servers[2].reason


async def test_a_run_without_endpoints_has_no_servers_and_none_can_be_added(api: Api) -> None:
    await api.create_run()
    problem = await api.ask("POST", PATH, {"address": UNUSED}, status=409)
    assert "policy.endpoints" in problem["hint"]
    assert (await servers(api)).servers == []


async def test_added_drained_and_removed_servers_are_known_after_a_restart(data_dir: Path) -> None:
    async with double() as one, double() as two, double() as three:
        async with orchestrator(data_dir) as api:
            await api.create_run(policy={"endpoints": [one, two]})
            await api.ask("POST", PATH, {"address": three})
            await api.ask("POST", f"{PATH}/drain", {"address": one})
            await api.ask("DELETE", PATH, {"address": two})
        async with orchestrator(data_dir) as api:
            reply = await until(api, lambda servers: all(server.state != "unknown" for server in servers.values()))
            assert {server.address: server.state for server in reply.servers} == {one: "draining", three: "serving"}
            await api.ask("POST", PATH, {"address": one})
            await until(api, lambda servers: servers[one].state == "serving")


async def test_a_long_poll_that_names_the_revision_it_knows_is_answered_at_the_next_one(api: Api) -> None:
    async with double() as one:
        await api.create_run(policy={"endpoints": [one]})
        known = await until(api, lambda servers: servers[one].state == "serving")
        waiting = asyncio.create_task(servers(api, revision=known.revision, wait_s=20))
        await asyncio.sleep(0)
        await api.ask("POST", f"{PATH}/drain", {"address": one})
        changed = await waiting
        assert changed.servers[0].state == "draining"
        assert changed.revision > known.revision
        assert (await servers(api, revision=changed.revision, wait_s=0.01)).revision == changed.revision


async def test_a_failed_watch_is_logged_with_its_traceback_and_started_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, failures, step = Mock(), iter([RuntimeError("the watch fails once")]), PolicyServerWatch._step

    async def failing_step(watch: PolicyServerWatch) -> None:
        for failure in failures:
            raise failure
        await step(watch)

    monkeypatch.setattr(watches, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(watches, "log", log)
    monkeypatch.setattr(PolicyServerWatch, "_step", failing_step)
    async with double() as one:
        await api.create_run(policy={"endpoints": [one]})
        await until(api, lambda servers: one in servers and servers[one].state == "serving")
    log.exception.assert_called_once_with("the watch of policy servers failed", run="run")


async def test_a_server_that_dies_is_ejected_and_returns_when_it_answers(api: Api) -> None:
    async with double() as one:
        await api.create_run(policy={"endpoints": [one]})
        await until(api, lambda servers: servers[one].state == "serving")
    reply = await until(api, lambda servers: servers[one].state == "ejected")
    reason = (await api.ask("GET", "/v1/runs/run"))["reasons"][0]
    assert (reason["code"], one in reason["message"]) == ("no-policy-servers", True)
    async with double(int(one.rsplit(":", 1)[1])):
        again = await until(api, lambda servers: servers[one].state == "serving")
        assert again.revision > reply.revision


async def test_a_server_with_an_endless_response_is_ejected_with_the_reason(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_RESPONSE_BYTES", 5)
    async with double() as one:
        await api.create_run(policy={"endpoints": [one]})
        reply = await until(api, lambda servers: servers[one].state == "ejected")
        assert "longer than 5 bytes" in reply.servers[0].reason


async def test_an_unknown_server_and_an_invalid_address_are_refused_by_name(api: Api) -> None:
    await api.create_run()
    problem = await api.ask("POST", f"{PATH}/drain", {"address": UNUSED}, status=404)
    assert (problem["code"], UNUSED in problem["detail"]) == ("unknown-server", True)
    assert (await api.ask("DELETE", PATH, {"address": UNUSED}, status=404))["code"] == "unknown-server"
    problem = await api.ask("POST", PATH, {"address": "127.0.0.1:8000"}, status=400)
    assert "not the address of a policy server" in problem["detail"]


async def test_a_closed_run_has_no_servers(api: Api) -> None:
    async with double() as one:
        await api.create_run(policy={"endpoints": [one]})
        known = await until(api, lambda servers: servers[one].state == "serving")
        waiting = asyncio.create_task(servers(api, revision=known.revision, wait_s=20))
        await api.ask("POST", "/v1/runs/run/close")
        assert (await waiting).servers == []
