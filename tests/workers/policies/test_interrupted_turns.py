"""Turns that the engine ends for new weights: they go on from their exact tokens, or are sampled again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.errors import InvalidRunSpec, PolicyFailure
from headrace.runspec import PolicySpec, SamplingSpec, parse_run_spec
from headrace.trajectory import VersionRun
from headrace_workers.policies import http_policies as served_module
from headrace_workers.policies.base import part_seed
from tests.workers.engine import Engine, completion, serving
from tests.workers.policies.test_one_server import REQUEST, client

OLD = {"version": "0.3", "start": 0, "end": 2}
NEW = {"version": "0.4", "start": 0, "end": 2}


def interrupted(engine: Engine, body: dict[str, Any]) -> Any:
    """The first request ends after two tokens on the old weights; the next is answered by the new."""
    if len(engine.bodies) == 1:
        return completion([1, 2], [-0.1, -0.2], finish="abort", weight_versions=[OLD])
    return completion([3, 261], [-0.3, -0.4], weight_versions=[NEW])


@pytest.mark.parametrize("generate", [False, True])
async def test_an_interrupted_turn_continues_from_its_exact_tokens_with_the_new_weights(generate: bool) -> None:
    async with serving(interrupted, generate=generate) as engine, client(engine) as policy:
        sample = await policy.sample(REQUEST)
    first, second = engine.bodies
    prompts = [body["token_ids"] if generate else body["prompt"] for body in (first, second)]
    asked = [body["sampling_params"] if generate else body for body in (first, second)]
    assert prompts == [REQUEST.prompt, [*REQUEST.prompt, 1, 2]]
    assert [body["max_tokens"] for body in asked] == [16, 14]
    assert [body["seed"] for body in asked] == [42, part_seed(42, 1)]
    assert engine.request_ids == ["episode-1-0-1", "episode-1-0-2"]
    assert (sample.token_ids, sample.logprobs) == ([1, 2, 3, 261], [-0.1, -0.2, -0.3, -0.4])
    assert sample.versions == [VersionRun(2, 0, 3), VersionRun(4, 0, 4)]
    assert (sample.continued, sample.finish_reason) == ([2], "stop")


async def test_with_restart_the_whole_turn_is_sampled_again() -> None:
    async with serving(interrupted) as engine, client(engine) as policy:
        sample = await policy.sample(msgspec.structs.replace(REQUEST, policy_spec=PolicySpec(interrupted="restart")))
    assert [body["prompt"] for body in engine.bodies] == [REQUEST.prompt, REQUEST.prompt]
    assert (sample.token_ids, sample.versions) == ([3, 261], [VersionRun(2, 0, 4)])
    assert sample.continued == ()


async def test_an_interrupted_turn_with_a_grammar_is_sampled_again_from_its_start() -> None:
    request = msgspec.structs.replace(REQUEST, sampling_spec=SamplingSpec(structured_outputs={"regex": "[ab]+"}))
    async with serving(interrupted) as engine, client(engine) as policy:
        sample = await policy.sample(request)
    assert [body["prompt"] for body in engine.bodies] == [REQUEST.prompt, REQUEST.prompt]
    assert engine.bodies[0]["structured_outputs"] == {"regex": "[ab]+"}
    assert sample.token_ids == [3, 261]


async def test_a_turn_that_was_interrupted_at_its_last_token_is_over() -> None:
    def full(engine: Engine, body: dict[str, Any]) -> Any:
        return completion([1, 2], [-0.1, -0.2], finish="abort", weight_versions=[OLD])

    async with serving(full) as engine, client(engine) as policy:
        sample = await policy.sample(msgspec.structs.replace(REQUEST, max_tokens=2))
    assert (sample.token_ids, sample.finish_reason, len(engine.bodies)) == ([1, 2], "length", 1)


async def test_a_part_is_checked_like_any_sample() -> None:
    def wrong(engine: Engine, body: dict[str, Any]) -> Any:
        return completion([1, 999], [-0.1, -0.2], finish="abort", weight_versions=[OLD])

    async with serving(wrong) as engine, client(engine) as policy:
        with pytest.raises(PolicyFailure, match="position 1") as caught:
            await policy.sample(REQUEST)
    assert caught.value.kind == "token-out-of-range"


async def test_an_engine_that_aborts_all_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "BACKOFF_S", 0.0)

    def nothing(engine: Engine, body: dict[str, Any]) -> Any:
        return completion([], [], finish="abort")

    async with serving(nothing) as engine, client(engine) as policy:
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(REQUEST)
    assert (caught.value.kind, caught.value.retryable) == ("aborted", True)


async def test_three_parts_of_one_version_are_one_run_and_two_seams() -> None:
    def twice(engine: Engine, body: dict[str, Any]) -> Any:
        last = len(engine.bodies) == 3
        return completion([len(engine.bodies)], [-0.1], finish="stop" if last else "abort", weight_versions=[SPAN])

    async with serving(twice) as engine, client(engine) as policy:
        sample = await policy.sample(REQUEST)
    assert (sample.token_ids, sample.continued) == ([1, 2, 3], [1, 2])
    assert sample.versions == [VersionRun(3, 0, 3)]


SPAN = {"version": "0.3", "start": 0, "end": 1}


@pytest.mark.parametrize("wrong", [{}, {"jsn": {}}, {"json": {}, "regex": "a"}])
def test_a_spec_has_exactly_one_constraint_on_structured_outputs(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRunSpec, match="give exactly one of choice, grammar, json, regex"):
        parse_run_spec({"name": "r", "sampling": {"structured_outputs": wrong}})
    assert parse_run_spec({"name": "r", "sampling": {"structured_outputs": {"regex": "a"}}})
