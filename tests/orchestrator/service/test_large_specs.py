"""Large specs: they are bounded, they hold nobody up, and no listing has them."""

from __future__ import annotations

import asyncio
import io
import threading

import msgspec
import pytest

from headrace.bounds import MAX_SPEC_BYTES
from headrace.runspec import RunSpec
from headrace_orchestrator.service import run_specs
from tests.orchestrator.serving import Api


def list_spec(tasks: int, name: str = "run") -> bytes:
    task = {"environment": "test:Echo", "example": {"question": "What is it?"}}
    return msgspec.json.encode({"name": name, "batch_size": 1, "tasks": [task] * tasks})


async def test_a_spec_above_the_bound_is_refused_before_it_is_read(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(run_specs, "parse_run_spec", read.append)
    body = list_spec(MAX_SPEC_BYTES // 60)
    assert len(body) > MAX_SPEC_BYTES
    async with api.session.post("/v1/runs", data=io.BytesIO(body)) as answer:
        assert answer.status == 422
        problem = await answer.json(content_type=None)
    assert problem["code"] == "invalid-run-spec"
    assert problem["max_bytes"] == MAX_SPEC_BYTES
    assert "submit_groups" in problem["hint"]
    assert not read


async def test_a_spec_is_read_while_others_are_answered(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, proceed = run_specs.parse_run_spec, threading.Event()

    def slow(value: object) -> RunSpec:
        assert proceed.wait(30)
        return parse(value)

    monkeypatch.setattr(run_specs, "parse_run_spec", slow)
    creating = asyncio.create_task(api.ask("POST", "/v1/runs", list_spec(10), status=201))
    assert await api.lease(free=1) == []
    assert await api.ask("GET", "/v1/runs") == []
    proceed.set()
    await creating
    assert [attempt.run for attempt in await api.lease(free=1, holding=[])] == ["run"]


async def test_no_listing_has_specs_and_the_status_of_one_run_does(api: Api) -> None:
    created = await api.ask("POST", "/v1/runs", list_spec(5000), status=201)
    status = await api.ask("GET", "/v1/status")
    for listed in (created, *status["runs"], *await api.ask("GET", "/v1/runs")):
        assert "spec" not in listed
    assert len(msgspec.json.encode(status)) < 5000
    run = await api.ask("GET", "/v1/runs/run")
    assert len(run["spec"]["tasks"]) == 5000
    assert run["spec"]["batch_size"] == 1
    without = await api.ask("GET", "/v1/runs/run?tasks=false")
    assert without["spec"] == {**run["spec"], "tasks": []}
    await api.ask("GET", "/v1/runs/run?tasks=maybe", status=400)


@pytest.mark.parametrize("field", ["environments", "tasks"])
async def test_the_error_of_a_large_invalid_spec_is_small(api: Api, field: str) -> None:
    body = msgspec.json.encode({"name": "run", field: [{"wrong": 1}] * 150_000})
    async with api.session.post("/v1/runs", data=io.BytesIO(body)) as answer:
        assert answer.status == 422
        assert len(await answer.read()) < 20_000
    many = msgspec.json.encode({"name": "run", **{f"field_{number}": 1 for number in range(20_000)}})
    async with api.session.post("/v1/runs", data=many) as answer:
        said = await answer.read()
        assert len(said) < 20_000
        assert b"and 19980 more" in said
