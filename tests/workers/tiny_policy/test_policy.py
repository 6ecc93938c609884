"""The policy object and the in-process policy."""

import numpy as np
import pytest

from headrace.errors import InvalidRequest, PolicyFailure
from headrace.trajectory import Sampling as TrajectorySampling
from headrace.trajectory import Version
from headrace_workers.policies.base import SampleRequest, check_sample
from headrace_workers.policies.in_process import load_in_process_policy
from headrace_workers.renderers.bytes_renderer import END, VOCAB_SIZE
from headrace_workers.tiny_policy.model import SIZE, neutral_weights
from headrace_workers.tiny_policy.policy import TinyPolicy
from headrace_workers.tiny_policy.sampler import SamplerSettings
from tests.workers.tiny_policy import prompts

SAMPLING = SamplerSettings(max_tokens=64)


def test_the_same_seed_and_prompt_give_the_same_answer_independent_of_other_requests():
    one, other = TinyPolicy(seed=1), TinyPolicy(seed=2)
    other.generate(prompts.UNKNOWN, SAMPLING)
    for seed in range(20):
        expected = one.generate(prompts.guessing(), SAMPLING, seed=seed)
        assert other.generate(prompts.guessing(), SAMPLING, seed=seed) == expected


def test_answer_0_of_several_is_the_answer_to_one():
    policy = TinyPolicy()
    several, _ = policy.generate(prompts.guessing(), SAMPLING, count=4, seed=9)
    assert several[0] == policy.generate(prompts.guessing(), SAMPLING, seed=9)[0][0]
    assert len({made.text for made in several}) > 1


def test_one_seed_draws_independently_at_every_turn():
    policy = TinyPolicy()
    one, two = prompts.guessing(), prompts.guessing([50])
    same = sum(
        policy.generate(one, SAMPLING, seed=seed)[0][0].text == policy.generate(two, SAMPLING, seed=seed)[0][0].text
        for seed in range(300)
    )
    assert same < 30


def test_without_a_seed_answers_come_from_the_policys_own_generator():
    def answers(policy):
        return [policy.generate(prompts.guessing(), SAMPLING)[0][0].text for _ in range(10)]

    assert answers(TinyPolicy(seed=3)) == answers(TinyPolicy(seed=3))
    assert answers(TinyPolicy(seed=3)) != answers(TinyPolicy(seed=4))


def test_new_weights_come_with_their_version_and_replace_the_old_ones_in_one_step():
    policy = TinyPolicy()
    greedy = SamplerSettings(0.0, max_tokens=64)
    before, version = policy.generate(prompts.guessing(), greedy)
    assert (before[0].text, version) == ("\\boxed{10}", Version(0, 0))
    weights = neutral_weights()
    weights[8] = 50.0
    policy.load(weights, Version(0, 1))
    after, version = policy.generate(prompts.guessing(), greedy)
    assert (after[0].text, version) == ("\\boxed{25}", Version(0, 1))


def test_weights_of_the_wrong_size_change_nothing():
    policy = TinyPolicy()
    with pytest.raises(InvalidRequest):
        policy.load(np.full(SIZE, np.nan), Version(0, 1))
    assert policy.version == Version(0, 0)
    assert not policy.weights.any()


def request(prompt: list[int], seed: int) -> SampleRequest:
    return SampleRequest(
        group="g",
        episode="e",
        id="e-1-0",
        model="policy",
        prompt=prompt,
        sampling=TrajectorySampling(seed=seed),
        max_tokens=64,
        stop=(),
        stop_token_ids=(END,),
        timeout_s=1.0,
        vocab_size=VOCAB_SIZE,
    )


async def test_the_in_process_policy_gives_the_same_answers():
    local = load_in_process_policy("headrace_workers.tiny_policy.in_process:factory")
    sample = await local.sample(request(prompts.guessing(), seed=4))
    check_sample(sample, VOCAB_SIZE, 64)
    made, version = TinyPolicy().generate(
        prompts.guessing(), SamplerSettings(max_tokens=64, stop_token_ids=(END,)), seed=4
    )
    assert (sample.token_ids, sample.logprobs) == (made[0].token_ids, made[0].logprobs)
    assert sample.versions[0].version == version


async def test_the_in_process_policy_refuses_ids_outside_the_vocabulary():
    local = load_in_process_policy("headrace_workers.tiny_policy.in_process:factory")
    with pytest.raises(PolicyFailure) as caught:
        await local.sample(request([VOCAB_SIZE], seed=0))
    assert (caught.value.kind, caught.value.retryable) == ("request-refused", False)
