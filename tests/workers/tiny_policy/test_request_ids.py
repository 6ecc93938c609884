"""Field case G10: live requests have different ids, an abandoned one ends at the engine, a late answer is discarded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from headrace.errors import PolicyFailure
from headrace.trajectory import Sampling
from headrace_workers.policies import SampleRequest, ServedPolicies
from headrace_workers.renderers.bytes_renderer import END, VOCAB_SIZE
from tests.workers.tiny_policy import prompts
from tests.workers.tiny_policy.conftest import Api

REQUEST = SampleRequest(
    group="g",
    episode="e",
    id="e-1-0",
    model="policy",
    prompt=prompts.guessing([10, 40]),
    sampling=Sampling(seed=1),
    max_tokens=64,
    stop=[],
    stop_token_ids=[END],
    timeout_s=20.0,
    vocab_size=VOCAB_SIZE,
)
STALLS = {"stall_next": 1, "stall_s": 60.0}
"""Delay of the first try, longer than any test."""


@pytest.fixture
async def policies(api: Api) -> AsyncIterator[ServedPolicies]:
    made = ServedPolicies(default_endpoints=[api.address], clock=time.monotonic)
    yield made
    await made.close()


def attempt(number: int, **changes: object) -> SampleRequest:
    """The same turn in another attempt."""
    return msgspec.structs.replace(REQUEST, id=f"e-{number}-0", **changes)


@pytest.mark.parametrize("engine_notices", [True, False])
async def test_G10_a_turn_that_timed_out_is_sampled_again_by_only_one_try(  # noqa: N802
    api: Api, policies: ServedPolicies, engine_notices: bool
) -> None:
    policy = policies.at([])
    honest = await policy.sample(REQUEST)
    # One that does not notice that the client has gone is told by the request's id.
    await api.misbehave(**STALLS, keep_generating=not engine_notices)
    with pytest.raises(PolicyFailure) as caught:
        await policy.sample(attempt(1, timeout_s=0.2))
    assert caught.value.kind == "timeout"
    again = await policy.sample(attempt(2))
    assert (again.token_ids, again.logprobs) == (honest.token_ids, honest.logprobs)
    await api.until_running(0)


async def test_G10_a_cancellation_between_two_tries_leaves_no_request_at_the_engine(  # noqa: N802
    api: Api, policies: ServedPolicies
) -> None:
    policy = policies.at([])
    await policy.sample(REQUEST)
    await api.misbehave(**STALLS)
    with pytest.raises(PolicyFailure):
        await policy.sample(attempt(1, timeout_s=0.2))
    await api.misbehave(**STALLS)
    second = asyncio.create_task(policy.sample(attempt(2)))
    await api.until_running(1)
    second.cancel()
    await asyncio.wait([second])
    await api.until_running(0)


async def test_G10_two_workers_with_attempts_of_one_episode_never_use_the_same_id(  # noqa: N802
    api: Api, policies: ServedPolicies
) -> None:
    await api.misbehave(stall_next=4, stall_s=0.3)
    other = ServedPolicies(default_endpoints=[api.address], clock=time.monotonic)
    try:
        frozen = asyncio.create_task(policies.at([]).sample(attempt(1)))
        taking_over = asyncio.create_task(other.at([]).sample(attempt(2)))
        await api.until_running(2)
        first, second = await asyncio.gather(frozen, taking_over)
    finally:
        await other.close()
    assert first.token_ids == second.token_ids  # both were answered; neither "already running"


async def test_G10_aborting_one_of_four_equal_requests_does_not_abort_the_others(  # noqa: N802
    api: Api, policies: ServedPolicies
) -> None:
    policy = policies.at([])
    await policy.sample(REQUEST)
    await api.misbehave(stall_next=4, stall_s=0.5)
    members = [
        asyncio.create_task(policy.sample(msgspec.structs.replace(REQUEST, id=f"e{number}-1-0"))) for number in range(4)
    ]
    await api.until_running(4)
    members[1].cancel()
    await api.until_running(3)
    done = await asyncio.gather(*members, return_exceptions=True)
    assert isinstance(done[1], asyncio.CancelledError)
    assert len({tuple(sample.token_ids) for number, sample in enumerate(done) if number != 1}) == 1
