"""Specs at the bounds of each field are served: what is accepted can be leased, submitted, pulled, acked and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import headrace
from headrace.batch.batch import Batch
from headrace.errors import InvalidRunSpec
from headrace.runspec import parse_run_spec
from headrace.store.tables import as_json, tables
from headrace.wire import messages
from tests.orchestrator.serving import Api, orchestrator, record_for, submission
from tests.sdk.spec_fields import NUMBERS, spec_with

TOGETHER = 4
"""Fields that one spec has at their bounds: a run for each field would take long."""


def specs_at_the_bounds() -> list[dict[str, Any]]:
    """Specs with each number at each end of its range, several in one spec where their fields allow it."""
    found: list[dict[str, Any]] = []
    paths = list(NUMBERS)
    for end in (0, 1):
        for start in range(0, len(paths), TOGETHER):
            together = paths[start : start + TOGETHER]
            specs = [spec for spec in [_at_bounds(together, end)] if _is_valid(spec)]
            found += specs or [spec for path in together if _is_valid(spec := _at_bounds([path], end))]
    return [{**spec, "name": f"run-{number}"} for number, spec in enumerate(found)]


def _at_bounds(paths: list[str], end: int) -> dict[str, Any]:
    spec: dict[str, Any] = {"batch_size": 1}
    for path in paths:
        spec = spec_with(path, NUMBERS[path][end], **spec)
    return spec


def _is_valid(spec: dict[str, Any]) -> bool:
    try:
        parse_run_spec(spec)
    except InvalidRunSpec:
        return False
    return True


async def serve_once(api: Api, spec: dict[str, Any]) -> bool:
    """Let a run be served once; returns whether it made a batch: many bounds only allow to wait for one."""
    run = spec["name"]
    await api.ask("POST", "/v1/runs", spec, status=201)
    if "environments" not in spec and "tasks" not in spec:
        return False
    attempts = [attempt for attempt in await api.lease(free=4, holding=[]) if attempt.run == run]
    results = await api.submit(submission((attempt, record_for(attempt)) for attempt in attempts))
    assert all(result.verdict == "accepted" for result in results)
    served = await api.pull(run)
    if isinstance(served, Batch):
        await api.ack(served)
    else:
        assert served.reasons
    await api.ask("GET", f"/v1/runs/{run}/trajectories")
    await api.ask("POST", f"/v1/runs/{run}/close")
    return isinstance(served, Batch)


async def test_a_spec_at_the_bounds_of_any_field_is_served_listed_and_exported(data_dir: Path) -> None:
    specs = specs_at_the_bounds()
    async with orchestrator(data_dir) as api:
        made = [await serve_once(api, spec) for spec in specs]
        assert sum(made) > len(specs) / 2
        status = await api.ask("GET", "/v1/status")
        assert status["epoch"] == 1
        async with api.session.get("/metrics") as answer:
            assert answer.status == 200
        async with api.session.get("/") as answer:
            assert answer.status == 200
    async with orchestrator(data_dir) as api:
        assert {run["name"] for run in await api.ask("GET", "/v1/runs")} == {spec["name"] for spec in specs}
    stored = list(headrace.open(data_dir).trajectories())
    assert len(stored) >= sum(made)
    assert sum(table.num_rows for table in tables(stored)) == len(stored)
    assert all(as_json(trajectory) for trajectory in stored)


async def test_a_spec_that_could_not_be_served_is_refused_by_the_service(data_dir: Path) -> None:
    refused = [
        ("attempt_lease_s", 1e-6),
        ("batch_lease_s", 1e-6),
        ("bin_tokens", 2**53 + 1),
        ("sampling.temperature", 1e-9),
        ("environments.0.weight", 1e-300),
    ]
    async with orchestrator(data_dir) as api:
        for path, value in refused:
            problem = await api.ask("POST", "/v1/runs", spec_with(path, value), status=422)
            assert [item["field"] for item in problem["problems"]] == [path]
        await api.create_run()
        evaluation: dict[str, Any] = {"tasks": [{"environment": "test:Echo"}]}
        for fields in ({"temperature": -1}, {"temperature": 0.001}, {"temperature": 1e3}, {"deadline_s": 1e10}):
            await api.ask("POST", "/v1/runs/run/evaluations", {**evaluation, **fields}, status=400)
        started = await api.ask("POST", "/v1/runs/run/evaluations", {**evaluation, "temperature": 0}, status=201)
        assert messages.EvaluationReply(**started).wanted == 1
