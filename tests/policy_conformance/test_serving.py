"""Other functions of a policy server: models, health, metrics, request ids, abandoned requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tests.policy_conformance.conftest import COMPLETIONS, GENERATE, Server

BOTH = pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
LONG = {"max_tokens": 1900, "ignore_eos": True}
RUNNING = "vllm:num_requests_running"


async def test_the_server_reports_its_model_and_its_context_length(server: Server):
    models = (await server.get("/v1/models"))[1]["data"]
    assert models[0]["id"] == "policy"
    assert models[0]["max_model_len"] >= 2048


async def test_the_server_is_healthy_and_refuses_unknown_routes(server: Server):
    assert (await server.get("/health"))[0] == 200
    assert (await server.get("/nowhere"))[0] == 404


@pytest.mark.parametrize(
    "name",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    ],
)
async def test_the_metrics_report_the_load(server: Server, name: str):
    await server.sample()
    assert await server.metric(name) >= 0


async def test_metrics_count_requests_and_tokens(server: Server):
    names = ("vllm:generation_tokens_total", "vllm:request_success_total")
    before = [await server.metric(name) for name in names]
    choices = (await server.sample(n=2))["choices"]
    await server.until(names[0], before[0] + sum(len(choice["token_ids"]) for choice in choices))
    assert await server.metric(names[1]) == before[1] + 2


@BOTH
async def test_an_answer_carries_the_id_of_its_request(server: Server, path: str):
    answer = await server.sample(path, headers={"X-Request-Id": "e1-1-0-1"})
    assert answer.get("request_id", answer.get("id")) in ("cmpl-e1-1-0-1", "generate-tokens-e1-1-0-1")


@BOTH
async def test_a_request_whose_client_disconnected_is_ended(server: Server, path: str):
    await server.misbehave(slow_s=60)
    asking = asyncio.create_task(server.ask(path, **LONG))
    await server.until(RUNNING, 1)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    await server.until(RUNNING, 0)


async def test_requests_are_worked_on_together(server: Server):
    await server.misbehave(slow_s=0.5)
    asking = [asyncio.create_task(server.ask(GENERATE, max_tokens=200, seed=seed)) for seed in range(8)]
    await server.until(RUNNING, 8)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8


@BOTH
async def test_two_open_requests_with_one_id_are_both_answered_or_the_second_is_refused(server: Server, path: str):
    alone = await server.sample(path, seed=2, max_tokens=50)
    await server.misbehave(slow_s=0.5)
    headers = {"X-Request-Id": "e2-1-0-1"}
    first = asyncio.create_task(server.ask(path, seed=1, max_tokens=200, headers=headers))
    await server.until(RUNNING, 1)
    status, second = await server.ask(path, seed=2, max_tokens=50, headers=headers)
    assert status == 400 or second["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert (await first)[0] == 200
