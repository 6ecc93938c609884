"""The worker's policy client and the real vLLM: exact tokens by every route, real aborts, turns that go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import score
from headrace.errors import PolicyFailure
from headrace.runspec import SamplingSpec
from headrace.trajectory import Message, Sampling
from headrace_workers.policies import Policy, Sample, SampleRequest, ServedPolicies
from tests.vllm.server import GENERATION_CONFIG, Vllm

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

CLOSE = 1e-3
"""Largest difference between two computations of a token's logprob."""

REQUEST = SampleRequest(
    id="e-1-0",
    group="g",
    episode="e",
    model="policy",
    prompt=[*range(40, 52)],
    messages=[Message(role="user", content="the king and the")],
    sampling=Sampling(temperature=0.0, seed=3),
    max_tokens=24,
    stop=[],
    stop_token_ids=[],
    timeout_s=120.0,
    vocab_size=100_000,
)


@pytest.fixture
async def policies(vllm: Vllm) -> AsyncIterator[ServedPolicies]:
    made = ServedPolicies(default_endpoints=[vllm.address], clock=time.monotonic)
    yield made
    await made.close()


def asked(**changes: Any) -> SampleRequest:
    return msgspec.structs.replace(REQUEST, **changes)


async def check(vllm: Vllm, prompt: list[int], sample: Sample) -> None:
    """The logprobs are those that the server itself gives of these tokens."""
    told = await asyncio.to_thread(score, vllm.address, "policy", [*prompt, *sample.token_ids])
    np.testing.assert_allclose(sample.logprobs, told.logprobs[len(prompt) :], rtol=0, atol=CLOSE)


async def test_every_route_returns_the_same_tokens_and_the_engines_logprobs(
    vllm: Vllm, policies: ServedPolicies
) -> None:
    found = await policies.at([]).sample(REQUEST)
    generated = await policies.at([], protocol="generate").sample(REQUEST)
    completed = await policies.at([], protocol="completions").sample(REQUEST)
    assert list(found.token_ids) == list(generated.token_ids) == list(completed.token_ids)
    assert [str(run.version) for run in generated.versions] == ["0.0"]
    for sample in (generated, completed):
        await check(vllm, list(REQUEST.prompt), sample)


@pytest.mark.parametrize("protocol", ["generate", "completions", "chat"])
async def test_sampling_defaults_of_the_models_folder_apply_on_no_route(
    policies: ServedPolicies, protocol: Any
) -> None:
    policy = policies.at([], protocol=protocol)
    samples = await asyncio.gather(
        *(policy.sample(asked(id=f"d{seed}-1-0", sampling=Sampling(seed=seed), max_tokens=1)) for seed in range(160))
    )
    distinct = {sample.token_ids[0] for sample in samples}
    assert len(distinct) > 2 * GENERATION_CONFIG["top_k"]


async def test_a_chat_returns_the_ids_of_its_prompt_and_answer(vllm: Vllm, policies: ServedPolicies) -> None:
    sample = await policies.at([], protocol="chat").sample(REQUEST)
    assert sample.prompt is not None
    await check(vllm, list(sample.prompt), sample)


async def test_a_turn_that_a_pause_interrupted_continues_to_its_length(vllm: Vllm, policies: ServedPolicies) -> None:
    turn = asyncio.create_task(policies.at([]).sample(asked(max_tokens=400, sampling=Sampling(seed=5))))
    await vllm.until_sampling()
    assert (await vllm.post("/pause?mode=abort&clear_cache=true"))[0] == 200
    assert (await vllm.post("/resume"))[0] == 200
    sample = await turn
    assert len(sample.token_ids) == 400 or sample.finish_reason == "stop"
    (seam,) = sample.continued
    assert 0 < seam < len(sample.token_ids)
    await check(vllm, list(REQUEST.prompt), sample)


@pytest.mark.parametrize("protocol", ["generate", "completions", "chat"])
async def test_G10_a_turn_that_is_cancelled_ends_at_the_engine_and_no_other_with_it(  # noqa: N802
    vllm: Vllm, policies: ServedPolicies, protocol: Any
) -> None:
    policy: Policy = policies.at([], protocol=protocol)
    await policy.sample(REQUEST)
    turns = [
        asyncio.create_task(policy.sample(asked(id=f"{protocol}-{number}-0", max_tokens=1500))) for number in range(2)
    ]
    await vllm.until_sampling()
    turns[0].cancel()
    before = await vllm.metric("vllm:generation_tokens_total")
    kept = await turns[1]
    with pytest.raises(asyncio.CancelledError):
        await turns[0]
    after = await vllm.metric("vllm:generation_tokens_total")
    assert after - before < len(kept.token_ids) + 300  # not twice as many: one of the two ended long before


async def test_bad_requests_have_kinds_of_their_own(vllm: Vllm, policies: ServedPolicies) -> None:
    policy = policies.at([])
    for request, kind in (
        (asked(model="another"), "unknown-model"),
        (asked(prompt=[5] * 2048), "context-overflow"),
        (asked(prompt=[5, 99_999]), "prompt-out-of-vocabulary"),
    ):
        with pytest.raises(PolicyFailure) as caught:
            await policy.sample(request)
        assert (caught.value.kind, caught.value.retryable) == (kind, False)
        if kind == "unknown-model":
            assert "policy" in caught.value.hint


async def test_an_answer_matches_its_request(policies: ServedPolicies) -> None:
    request = asked(sampling_spec=SamplingSpec(structured_outputs={"choice": ["aa", "b"]}), sampling=Sampling(seed=1))
    for protocol in ("generate", "completions"):
        sample = await policies.at([], protocol=protocol).sample(request)
        assert bytes(token for token in sample.token_ids if token < 256) in (b"aa", b"b")
