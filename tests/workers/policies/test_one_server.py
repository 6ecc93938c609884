"""The policy client with one server, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from aiohttp import web

from headrace.errors import PolicyFailure
from headrace.trajectory import Sampling, VersionRun
from headrace_workers.policies import Policy, SampleRequest, ServedPolicies
from headrace_workers.policies import http_policies as module
from tests.workers.engine import DROP, Engine, completion, serving
from tests.workers.fakes import Clock

REQUEST = SampleRequest(
    group="g",
    episode="e",
    id="episode-1-0",
    model="tiny",
    prompt=[256, 258, 65, 261, 259],
    sampling=Sampling(temperature=0.5, top_p=0.9, seed=42),
    max_tokens=16,
    stop=["</a>"],
    stop_token_ids=[261],
    timeout_s=5.0,
    vocab_size=262,
)


def fine(engine: Engine, body: dict[str, Any]) -> Any:
    return completion([66, 261], [-0.5, 0.0], prompt_token_ids=body["prompt"])


def reply(body: str | bytes, status: int = 200) -> Any:
    data = body.encode() if isinstance(body, str) else body
    return lambda engine, asked: web.Response(body=data, status=status, content_type="application/json")


@asynccontextmanager
async def client(engine: Engine, clock: Any = None) -> AsyncIterator[Policy]:
    policies = ServedPolicies(default_endpoints=[engine.url], clock=clock or Clock())
    try:
        yield policies.at([])
    finally:
        await policies.close()


async def sampled(answer: Any) -> Any:
    async with serving(answer) as engine, client(engine) as policy:
        return await policy.sample(REQUEST)


async def failure(answer: Any, request: SampleRequest = REQUEST) -> PolicyFailure:
    async with serving(answer) as engine, client(engine) as policy:
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(request)
        return caught.value


async def test_prompt_ids_sampling_and_the_request_for_token_ids_are_sent() -> None:
    async with serving(fine) as engine, client(engine) as policy:
        sample = await policy.sample(REQUEST)
    (body,) = engine.bodies
    expected = {
        "model": "tiny",
        "prompt": [256, 258, 65, 261, 259],
        "max_tokens": 16,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 42,
        "stop": ["</a>"],
        "stop_token_ids": [261],
        "logprobs": 0,
        "return_token_ids": True,
    }
    assert expected.items() <= body.items()
    assert "structured_outputs" not in body
    assert engine.request_ids == ["episode-1-0-1"]
    assert (sample.token_ids, sample.logprobs, sample.finish_reason) == ([66, 261], [-0.5, 0.0], "stop")
    assert sample.versions == [VersionRun(2, 0, 1)]


@pytest.mark.parametrize("protocol", ["generate", "completions", "chat"])
async def test_every_parameter_that_changes_the_distribution_is_sent_on_every_route(protocol: Any) -> None:
    async with serving(fine, chat=protocol == "chat", generate=protocol == "generate") as engine:
        policies = ServedPolicies(default_endpoints=[engine.url], clock=Clock())
        with suppress(PolicyFailure):  # the answer to a chat has no ids here
            await policies.at([], protocol=protocol).sample(REQUEST)
        await policies.close()
    (body,) = engine.bodies
    sent = body.get("sampling_params", body)
    values = [sent.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")]
    assert values == [0.5, 0.9, -1, 0.0, 1.0]
    assert [sent.get(name) for name in ("presence_penalty", "frequency_penalty", "min_tokens")] == [0.0, 0.0, 0]
    assert [sent.get(name) for name in ("logit_bias", "bad_words", "watermarking", "ignore_eos")] == [
        {},
        [],
        False,
        False,
    ]
    assert [sent.get(name) for name in ("seed", "stop", "stop_token_ids", "n")] == [42, ["</a>"], [261], 1]


async def test_text_without_ids_is_refused_as_no_token_ids() -> None:
    error = await failure(lambda engine, body: completion(None, [-0.5]))
    assert (error.kind, error.retryable) == ("no-token-ids", False)
    assert "must return token ids" in str(error)


async def test_an_answer_without_logprobs_is_refused() -> None:
    error = await failure(lambda engine, body: completion([66], None))
    assert (error.kind, error.retryable) == ("no-logprobs", False)


IDS = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"


def raw(fifth: str, ids: str = IDS) -> str:
    values = ["-1.0"] * 10
    values[4] = fifth
    logprobs = f'{{"token_logprobs": [{", ".join(values)}]}}'
    return f'{{"choices": [{{"text": "x", "finish_reason": "stop", "token_ids": {ids}, "logprobs": {logprobs}}}]}}'


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (raw("NaN"), "logprob-nan"),
        (raw("null"), "logprob-missing"),
        (raw("-Infinity"), "logprob-infinite"),
        (raw("0.3"), "logprob-positive"),
        (raw("-1e308"), "logprob-out-of-range"),
        (raw("-1.0", ids="[1, 2, 3, 4, 5, 6, 7, 8, 9]"), "logprobs-too-many"),
        (raw("-1.0", ids="[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]"), "logprobs-too-few"),
        (raw("-1.0", ids="[1, 2, 3, 4, 999, 6, 7, 8, 9, 10]"), "token-out-of-range"),
    ],
)
async def test_G09_each_bad_answer_has_its_own_kind(body: str, kind: str) -> None:  # noqa: N802
    error = await failure(reply(body))
    assert (error.layer, error.kind, error.retryable) == ("policy", kind, True)
    assert "position 4" in str(error) or kind.startswith("logprobs-too")


async def test_G09_a_500_about_floats_has_its_own_kind_and_quotes_the_body() -> None:  # noqa: N802
    error = await failure(reply('{"error": {"message": "Out of range float values"}}', status=500))
    assert (error.kind, error.retryable) == ("logprob-unwritable", True)
    assert "Out of range float values" in str(error)


async def test_G09_zeros_are_accepted() -> None:  # noqa: N802
    sample = await sampled(reply(raw("0.0").replace("-1.0", "-0.0")))
    assert sample.logprobs == [0.0] * 10


@pytest.mark.parametrize(
    ("answer", "kind", "retryable"),
    [
        (reply("slow down", status=429), "rate-limited", True),
        (reply('{"error": "max_tokens"}', status=400), "request-refused", False),
        (reply("no such model", status=404), "request-refused", False),
        (reply("<html>", status=200), "unreadable-response", True),
        (reply('{"choices": []}'), "unreadable-response", True),
        (lambda engine, body: completion([66], [-1.0], prompt_token_ids=[1, 2]), "prompt-changed", False),
        (lambda engine, body: completion([], []), "empty-sample", True),
    ],
)
async def test_each_cause_of_failure_has_its_own_kind_and_tells_whether_another_try_could_help(
    answer: Any, kind: str, retryable: bool
) -> None:
    error = await failure(answer)
    assert (error.kind, error.retryable) == (kind, retryable)


async def test_a_refused_request_quotes_the_body() -> None:
    assert "max_tokens is too large" in str(await failure(reply("max_tokens is too large", status=400)))


async def test_a_late_answer_is_a_timeout_and_its_request_is_aborted() -> None:
    async def never(engine: Engine, body: dict[str, Any]) -> Any:
        if len(engine.bodies) == 1:
            return fine(engine, body)
        await asyncio.Event().wait()

    async with serving(never) as engine, client(engine) as policy:
        await policy.sample(REQUEST)  # so that the server is known, and the next request is under way at once
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(msgspec.structs.replace(REQUEST, timeout_s=0.5))
        assert (caught.value.kind, caught.value.retryable) == ("timeout", True)
        async with asyncio.timeout(5):
            await engine.aborted.wait()


async def test_cancelling_a_call_closes_its_connection_so_that_the_engine_stops() -> None:
    asked = asyncio.Event()

    async def never(engine: Engine, body: dict[str, Any]) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with serving(never) as engine, client(engine) as policy, asyncio.timeout(5):
        task = asyncio.create_task(policy.sample(REQUEST))
        await asked.wait()
        task.cancel()
        await asyncio.wait([task])
        await engine.aborted.wait()


async def test_a_refused_connection_is_tried_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.001)
    async with serving(fine) as engine:
        policies = ServedPolicies(default_endpoints=[engine.url], clock=Clock())
        policy = policies.at([])
        await policy.sample(REQUEST)
    with pytest.raises(PolicyFailure) as caught:
        await policy.sample(REQUEST)
    await policies.close()
    assert (caught.value.kind, caught.value.retryable) == ("connection-refused", True)


async def test_G10_each_try_has_its_own_id(monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    monkeypatch.setattr(module, "BACKOFF_S", 0.001)

    def lose_two(engine: Engine, body: dict[str, Any]) -> Any:
        return fine(engine, body) if len(engine.request_ids) == 3 else DROP

    async with serving(lose_two) as engine, client(engine) as policy:
        sample = await policy.sample(REQUEST)
    assert engine.request_ids == ["episode-1-0-1", "episode-1-0-2", "episode-1-0-3"]
    assert sample.waiting_s == pytest.approx(0.003)


async def test_a_connection_that_is_lost_again_and_again_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.001)
    error = await failure(lambda engine, body: DROP)
    assert (error.kind, error.retryable) == ("connection-lost", True)


async def test_a_call_is_bracketed_by_the_versions_before_and_after_it_and_the_lower_one_covers_it() -> None:
    def changes(engine: Engine, body: dict[str, Any]) -> Any:
        engine.version = "0.5"
        return fine(engine, body)

    async with serving(changes) as engine, client(engine) as policy:
        engine.version = "0.4"
        assert (await policy.sample(REQUEST)).versions == [VersionRun(2, 0, 4)]
        assert (await policy.sample(REQUEST)).versions == [VersionRun(2, 0, 5)]
    assert engine.weight_questions == 3  # the second call's "before" was confirmed by the first one's "after"


async def test_an_old_confirmation_is_requested_again() -> None:
    clock = Clock()
    async with serving(fine) as engine, client(engine, clock) as policy:
        await policy.sample(REQUEST)
        engine.version = "0.9"
        clock.now += 60
        assert (await policy.sample(REQUEST)).versions == [VersionRun(2, 0, 9)]


async def test_calls_that_end_together_share_one_confirmation() -> None:
    gate = asyncio.Event()
    waiting = 0

    async def together(engine: Engine, body: dict[str, Any]) -> Any:
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            gate.set()
        await gate.wait()
        return fine(engine, body)

    async with serving(together) as engine, client(engine) as policy:
        await asyncio.gather(*(policy.sample(REQUEST) for _ in range(4)))
    assert engine.weight_questions <= 1 + 4


async def test_versions_in_the_answer_are_used_by_position_without_further_confirmations() -> None:
    spans = [{"version": "0.3", "start": 0, "end": 1}, {"version": "0.4", "start": 1, "end": 2}]

    def answer(engine: Engine, body: dict[str, Any]) -> Any:
        return completion([66, 261], [-0.5, -0.5], weight_versions=spans)

    async with serving(answer) as engine, client(engine) as policy:
        first = await policy.sample(REQUEST)
        await policy.sample(REQUEST)
    assert first.versions == [VersionRun(1, 0, 3), VersionRun(2, 0, 4)]
    assert engine.weight_questions == 1


async def test_versions_in_the_answer_that_leave_a_gap_are_refused() -> None:
    spans = [{"version": "0.3", "start": 0, "end": 1}, {"version": "0.4", "start": 2, "end": 2}]
    error = await failure(lambda engine, body: completion([66, 261], [-0.5, -0.5], weight_versions=spans))
    assert error.kind == "versions-do-not-cover"


async def test_vllms_initial_default_counts_as_version_0_0() -> None:
    async with serving(fine) as engine, client(engine) as policy:
        engine.version = "default"
        assert (await policy.sample(REQUEST)).versions == [VersionRun(2, 0, 0)]


@pytest.mark.parametrize("version", ["latest", "1", "", None, "0.-1"])
async def test_a_version_that_cannot_be_read_is_a_failure(version: Any) -> None:
    async with serving(fine) as engine, client(engine) as policy:
        engine.version = version
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(REQUEST)
    assert caught.value.kind == "unknown-version"


@pytest.mark.parametrize(("named", "again"), [("0.7 -> 0.8", True), ("latest", False)], ids=["a load", "a word"])
async def test_a_sample_during_a_failed_load_may_be_tried_again(named: str, again: bool) -> None:
    spans = [{"version": named, "start": 0, "end": 2}]
    error = await failure(lambda engine, body: completion([66, 261], [-0.5, -0.5], weight_versions=spans))
    assert (error.kind, error.retryable) == ("unknown-version", again)


@pytest.mark.parametrize("carried", [True, False], ids=["in the answer", "asked for"])
@pytest.mark.parametrize(("named", "whose"), [("mine@0.1", "its own"), ("0.1", "nobody's"), ("other@0.1", "another's")])
async def test_a_sample_by_weights_of_another_run_is_a_failure_never_this_runs_version(
    named: str, whose: str, carried: bool
) -> None:
    spans = {"weight_versions": [{"version": named, "start": 0, "end": 2}]} if carried else {}
    async with serving(lambda engine, body: completion([66, 261], [-0.5, -0.5], **spans)) as engine:
        engine.version = named
        policies = ServedPolicies(default_endpoints=[engine.url], clock=Clock())
        try:
            if whose != "another's":
                assert (await policies.at([], run="mine").sample(REQUEST)).versions == [VersionRun(2, 0, 1)]
                return
            with pytest.raises(PolicyFailure, match="weights of run other") as caught:
                await policies.at([], run="mine").sample(REQUEST)
            assert (caught.value.kind, caught.value.retryable) == ("weights-of-another-run", True)
            named_by_adapter = msgspec.structs.replace(REQUEST, frozen=True)
            assert (await policies.at([], run="mine").sample(named_by_adapter)).token_ids, "an adapter has its own name"
        finally:
            await policies.close()


async def test_without_an_endpoint_a_policy_is_a_failure() -> None:
    policies = ServedPolicies(default_endpoints=[], clock=Clock())
    with pytest.raises(PolicyFailure) as caught:
        policies.at([])
    assert caught.value.kind == "no-endpoint"


async def test_proxy_settings_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nothing listens there
    await sampled(fine)


async def test_an_invalid_address_is_a_failure_with_the_reason() -> None:
    policies = ServedPolicies(default_endpoints=["127.0.0.1:8000"], clock=Clock())
    with pytest.raises(PolicyFailure, match="not the address of a server") as caught:
        await policies.at([]).sample(REQUEST)
    await policies.close()
    assert (caught.value.kind, caught.value.retryable) == ("bad-address", False)


async def test_a_redirect_is_not_followed() -> None:
    error = await failure(lambda engine, body: web.Response(status=307, headers={"Location": f"{engine.url}/other"}))
    assert (error.kind, error.retryable) == ("request-refused", False)
    assert "(307)" in str(error)
