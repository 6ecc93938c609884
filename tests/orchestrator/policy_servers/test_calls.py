"""The HTTP calls to policy servers, against a server whose responses the test sets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from headrace.trajectory import Version
from headrace.wire.messages import Weights
from headrace_orchestrator.policy_servers import calls as calls_module
from headrace_orchestrator.policy_servers.calls import PolicyServerCalls
from headrace_orchestrator.policy_servers.controller import PolicyServerCall
from headrace_orchestrator.policy_servers.server_state import CallProblem, ProbeResult

LOADED: dict[str, Any] = {}
REFUSED = {"refused": "a shape differs"}
MIXED = {"mixed": "it stopped half-way"}


class Engine:
    """A paused engine at version 0.3 whose processes have these ``results`` of a load. ``names``: the weight versions
    that it was given."""

    def __init__(self, results: list[dict[str, Any]], *, paused: bool = True) -> None:
        self.results = results
        self.paused = paused
        self.names = ["math@0.3"]
        self.name_at_load = ""
        self.pending_answers = 0
        self.hangs = False
        self.arguments: list[list[str]] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read() or b"{}")
        match request.path:
            case "/is_paused":
                return web.json_response({"is_paused": self.paused})
            case "/weight_info":
                return web.json_response({"weight_version": self.names[-1]})
            case "/update_weight_version":
                self.names.append(body["new_version"])
                return web.json_response({})
            case "/collective_rpc":
                self.name_at_load = self.names[-1]
                self.arguments.append(body["args"])
                if self.hangs:
                    await asyncio.Event().wait()
                if self.pending_answers and len(self.arguments) > self.pending_answers:
                    return web.json_response({"results": [{}]})
                return web.json_response({"results": self.results})
        return web.Response(status=500, text="out of memory")


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[PolicyServerCalls, str]]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    calls = PolicyServerCalls()
    try:
        yield calls, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await calls.close()
        await runner.cleanup()


async def load(engine: Engine) -> CallProblem | None:
    """Load version 0.4 into the engine."""
    async with served(engine) as (calls, address):
        call = PolicyServerCall("load", address, 10.0, Version(0, 4), Weights(path="/weights"), run="math")
        return await calls.carry_out(call)


async def test_a_call_returns_the_problem_of_a_server_and_does_not_raise():
    async with served(Engine([])) as (calls, address):
        problem = await calls.carry_out(PolicyServerCall("resume", address, 10.0))
        assert problem == CallProblem("server-error", "/resume answered 500: out of memory", untouched=True)
        assert (await calls.probe(address)).problem == "/health answered 500: out of memory"
        assert await calls.read_metrics(address) == "no answer"
        assert await calls.list_adapters(address) is None
        assert "out of memory" in await calls.change_adapter(address, "load", "a", "/a")
    async with served(Engine([])) as (calls, _):
        assert await calls.probe("http://127.0.0.1:9") == ProbeResult("nothing listens at this address")


async def test_the_weight_name_says_that_a_load_has_begun_before_weights_change():
    engine = Engine([LOADED])
    assert await load(engine) is None
    assert engine.name_at_load == "math@0.3 -> math@0.4"
    assert engine.names[-1] == "math@0.4"


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        ([LOADED, REFUSED], "weights-mixed"),
        ([LOADED, MIXED], "weights-mixed"),
        ([], "unreadable-response"),
    ],
)
async def test_a_load_succeeds_only_if_every_process_of_the_engine_confirms_it(
    results: list[dict[str, Any]], kind: str
):
    engine = Engine(results)
    problem = await load(engine)
    assert problem is not None
    assert (problem.kind, problem.untouched) == (kind, False)
    assert engine.names[-1] == "math@0.3 -> math@0.4"


async def test_a_refused_load_changes_nothing_not_even_the_name():
    engine = Engine([REFUSED, REFUSED])
    assert await load(engine) == CallProblem("weights-refused", "a shape differs", untouched=True)
    assert engine.names[-1] == "math@0.3"


async def test_a_check_waits_while_a_server_hashes_files_and_sends_the_digest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calls_module, "PENDING_PAUSE_S", 0.0)
    engine = Engine([{"pending": True}, {}])
    engine.pending_answers = 3
    async with served(engine) as (calls, address):
        weights = Weights(path="/weights", digest="ab.cd")
        assert await calls.carry_out(PolicyServerCall("check", address, 10.0, Version(0, 4), weights)) is None
    assert engine.arguments == [["/weights", "ab.cd"]] * 4


async def test_a_server_that_hangs_in_a_check_is_noticed_before_the_time_that_hashing_may_take(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(calls_module, "CHECK_ANSWER_TIMEOUT_S", 0.05)
    engine = Engine([])
    engine.hangs = True
    async with served(engine) as (calls, address):
        weights = Weights(path="/weights")
        problem = await calls.carry_out(PolicyServerCall("check", address, 600.0, Version(0, 4), weights))
    assert problem == CallProblem("timeout", "it did not answer headrace_check within 0.05 s", untouched=True)


async def test_a_server_is_loaded_only_while_it_is_paused():
    engine = Engine([LOADED], paused=False)
    problem = await load(engine)
    assert problem is not None
    assert (problem.kind, problem.untouched) == ("not-paused", True)
    assert (engine.names, engine.name_at_load) == (["math@0.3"], "")


async def test_proxy_settings_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert await load(Engine([LOADED])) is None
