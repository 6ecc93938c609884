"""The worker asks scorers for logprobs: another server where one fails, and a failure where all do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from headrace.errors import PolicyFailure
from headrace_workers.policies import ServedPolicies
from headrace_workers.policies import logprobs as module
from headrace_workers.policies.base import ScoreRequest
from tests.workers.engine import Engine, serving
from tests.workers.fakes import Clock
from tests.workers.policies.test_one_server import reply

REQUEST = ScoreRequest(id="e-1-ref-0", model="tiny", token_ids=[5, 6, 7], timeout_s=10.0)


def scores(engine: Engine, body: dict[str, Any]) -> Any:
    told: list[Any] = [None, *({str(token): {"logprob": -float(token)}} for token in body["prompt"][1:])]
    return {"choices": [{"text": "x", "prompt_logprobs": told}]}


@asynccontextmanager
async def scorers(*answers: Any) -> AsyncIterator[tuple[list[Engine], ServedPolicies]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(serving(answer)) for answer in answers]
        policies = ServedPolicies(default_endpoints=[], clock=Clock())
        stack.push_async_callback(policies.close)
        for engine in engines[1:]:
            policies.router.sent(engine.url)  # a little load, so that the first one is asked first
        yield engines, policies


async def ask(engines: list[Engine], policies: ServedPolicies) -> list[float]:
    found: list[float] = (await policies.score([engine.url for engine in engines], REQUEST)).tolist()
    return found


async def test_every_token_has_its_logprob_and_the_first_has_0() -> None:
    async with scorers(scores) as (engines, policies):
        assert await ask(engines, policies) == [0.0, -6.0, -7.0]
    (body,) = engines[0].bodies
    expected = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    assert expected.items() <= body.items()
    assert "logprobs" not in body


@pytest.mark.parametrize("bad", [reply("x", status=500), reply("<html>"), reply('{"choices": [{"text": ""}]}')])
async def test_scores_that_one_server_cannot_return_are_requested_from_another_under_a_new_id(bad: Any) -> None:
    async with scorers(bad, scores) as (engines, policies):
        assert await ask(engines, policies) == [0.0, -6.0, -7.0]
    assert [engine.request_ids for engine in engines] == [["e-1-ref-0-1"], ["e-1-ref-0-2"]]


async def test_scores_interrupted_by_new_weights_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.0)

    def once(engine: Engine, body: dict[str, Any]) -> Any:
        engine.version = "0.2"
        return scores(engine, body)

    async with scorers(once) as (engines, policies):
        assert await ask(engines, policies) == [0.0, -6.0, -7.0]
    assert len(set(engines[0].request_ids)) == 2


async def test_if_no_server_returns_scores_the_failure_is_raised() -> None:
    async with scorers(reply("x", status=500)) as (engines, policies):
        with pytest.raises(PolicyFailure) as caught:
            await ask(engines, policies)
    assert (caught.value.kind, caught.value.retryable) == ("server-error", True)


async def test_a_scorer_that_does_not_answer_in_time_is_a_failure() -> None:
    async def never(engine: Engine, body: dict[str, Any]) -> Any:
        await engine.aborted.wait()

    async with scorers(never) as (engines, policies):
        with pytest.raises(PolicyFailure) as caught:
            await policies.score([engines[0].url], ScoreRequest(id="e", model="tiny", token_ids=[5, 6], timeout_s=0.05))
    assert caught.value.kind == "timeout"
