"""Turns of adapters: named by version at the server that is asked, over real HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web

from headrace.errors import PolicyFailure
from headrace.runspec import RunSpec
from headrace.trajectory import PolicyRef
from headrace.wire.messages import PolicyServersReply, PolicyServerStatus
from headrace_workers.episode.run_plan import make_plan
from headrace_workers.policies import ServedPolicies
from headrace_workers.policies import http_policies as served_module
from headrace_workers.policies.server_pools import ManagedPool
from tests.workers.engine import Engine, serving
from tests.workers.fakes import Clock
from tests.workers.policies.test_one_server import REQUEST, fine

TRAINED = msgspec.structs.replace(REQUEST, adapter="math")
FROZEN = msgspec.structs.replace(REQUEST, model="opponent", frozen=True)


def absent(engine: Engine, body: dict[str, Any]) -> web.Response:
    return web.json_response({"error": {"message": f"The model `{body['model']}` does not exist."}}, status=404)


def following(engine: Engine, *versions: str) -> ServedPolicies:
    """A client whose orchestrator says these versions of the server, one after the other."""
    left = list(versions)

    async def servers(run: str, revision: int, wait_s: float) -> PolicyServersReply:
        version = left.pop(0) if len(left) > 1 else left[0]
        server = PolicyServerStatus(address=engine.url, state="serving", version=version)
        return PolicyServersReply(epoch=1, revision=revision + 1, servers=[server])

    return ServedPolicies(default_endpoints=[], clock=Clock(), list_servers=servers)


@pytest.mark.parametrize(("version", "model"), [("0.7", "run/math@0.7"), ("0.0", "tiny")])
async def test_a_trained_adapter_is_requested_in_the_servers_version_and_before_the_first_one_the_base(
    version: str, model: str
) -> None:
    async with serving(fine) as engine:
        policies = following(engine, version)
        try:
            sample = await policies.at([engine.url], run="run").sample(TRAINED)
        finally:
            await policies.close()
    assert [body["model"] for body in engine.bodies] == [model]
    assert [str(run.version) for run in sample.versions] == [version], "not what the server calls its base"


@pytest.mark.parametrize("request_", [TRAINED, FROZEN], ids=["trained", "frozen"])
async def test_a_missing_adapter_is_requested_again_and_then_a_retryable_failure(
    request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_module, "BACKOFF_S", 0.001)
    async with serving(absent) as engine:
        policies = following(engine, "0.7")
        try:
            with pytest.raises(PolicyFailure) as caught:
                await policies.at([engine.url], run="run").sample(request_)
        finally:
            await policies.close()
    assert (caught.value.kind, caught.value.retryable) == ("adapter-not-loaded", True)
    assert len(engine.bodies) == 3


async def test_without_a_word_from_the_orchestrator_no_version_of_an_adapter_is_made_up() -> None:
    async with serving(fine) as engine:
        policies = ServedPolicies(default_endpoints=[engine.url], clock=Clock())
        try:
            with pytest.raises(PolicyFailure, match="is unknown") as caught:
                await policies.at([]).sample(TRAINED)
        finally:
            await policies.close()
    assert (caught.value.kind, engine.bodies) == ("adapter-not-loaded", [])


def test_dns_names_of_several_servers_get_no_requests() -> None:
    pool = ManagedPool("run", ["dns+http://vllm:8000", "http://127.0.0.1:1"], Clock())
    pool.mark_unreachable()
    assert list(pool.addresses()) == ["http://127.0.0.1:1"]


def test_agents_use_the_trained_adapter_a_frozen_one_or_their_own_model() -> None:
    server = "http://127.0.0.1:1"
    policy = {
        "endpoints": [server],
        "adapter": "math",
        "adapters": [{"name": "old", "path": "/old"}],
        "agents": {
            "self": {},
            "opponent": {"train": False, "adapters": ["old"]},
            "judge": {"base": "judge", "endpoints": [server], "train": False},
        },
    }
    plan = make_plan(RunSpec.model_validate({"name": "run", "policy": policy}))
    mine, theirs, judge = plan.agent("self"), plan.agent("opponent", "old"), plan.agent("judge")
    assert (mine.policy, mine.adapter) == (PolicyRef(base="policy", adapter="math"), "math")
    assert (theirs.policy, theirs.model) == (PolicyRef(base="policy", adapter="old"), "run/old")
    assert (theirs.adapter, theirs.frozen) == ("", True)
    assert (judge.policy, judge.adapter) == (PolicyRef(base="judge"), "")
