"""The model, and the contract of its module."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace_workers.tiny_policy.model import (
    GUESS,
    NIM,
    OTHER,
    SIZE,
    SUM,
    UNKNOWN_PROMPT,
    Model,
    choice_for,
    neutral_weights,
)
from headrace_workers.tiny_policy.sampler import SamplerSettings, WeightedAnswers
from headrace_workers.tiny_policy.situations import Guess, prompt_text, read_situation
from tests.workers.tiny_policy import prompts

NAMES = sorted(prompts.ALL)


def random_weights(seed: int, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, scale, SIZE)


def answers_to(prompt) -> list[str]:
    return [text.decode() for text in choice_for(read_situation(prompt_text(prompt))).texts]


@pytest.mark.parametrize("name", NAMES)
def test_all_zeros_is_version_0_0_and_answers_uniformly(name):
    prompt, model = prompts.ALL[name], Model(neutral_weights())
    answers = answers_to(prompt)
    for answer in answers:
        assert model.log_prob(prompt, prompts.sampled(answer)) == pytest.approx(-math.log(len(answers)), abs=1e-12)


@given(st.integers(0, 2**32), st.sampled_from(NAMES))
@settings(deadline=None)
def test_probabilities_sum_to_1(seed, name):
    prompt, model = prompts.ALL[name], Model(random_weights(seed))
    total = math.fsum(math.exp(model.log_prob(prompt, prompts.sampled(answer))) for answer in answers_to(prompt))
    assert total == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_an_answers_tokens_sum_to_its_log_probability(name):
    prompt, weights = prompts.ALL[name], random_weights(7)
    answers = WeightedAnswers(choice_for(read_situation(prompt_text(prompt))), weights)
    rng = np.random.default_rng(0)
    for _ in range(50):
        made = answers.sample(SamplerSettings(max_tokens=64), rng)  # numpy's generator has random() too
        assert math.fsum(made.logprobs) == pytest.approx(Model(weights).log_prob(prompt, made.token_ids), abs=1e-12)


def test_a_byte_without_an_alternative_is_forced_and_has_log_probability_exactly_0():
    made = WeightedAnswers(choice_for(Guess(30, 39)), random_weights(1)).sample(
        SamplerSettings(max_tokens=64), np.random.default_rng(0)
    )
    assert made.text.startswith("\\boxed{3")
    assert [value == 0.0 for value in made.logprobs] == [True] * 8 + [False] + [True] * 2


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_log_prob_is_exact(name):
    prompt, weights = prompts.ALL[name], random_weights(3, scale=0.5)
    for answer in answers_to(prompt)[:3]:
        ids = prompts.sampled(answer)
        exact = Model(weights).gradient(prompt, ids)
        touched = np.flatnonzero(exact)[:25]
        for index in touched:
            step = np.zeros(SIZE)
            step[index] = 1e-5
            slope = (Model(weights + step).log_prob(prompt, ids) - Model(weights - step).log_prob(prompt, ids)) / 2e-5
            assert slope == pytest.approx(exact[index], abs=1e-8)


def test_an_answer_cut_short_has_the_probability_and_gradient_of_its_beginning():
    prompt, weights = prompts.guessing(), random_weights(5)
    model, beginning = Model(weights), [*b"\\boxed{3"]
    whole = [f"\\boxed{{{number}}}" for number in (3, *range(30, 40))]
    expected = np.logaddexp.reduce([model.log_prob(prompt, prompts.sampled(text)) for text in whole])
    assert model.log_prob(prompt, beginning) == pytest.approx(expected, abs=1e-12)
    exact = model.gradient(prompt, beginning)
    for index in range(GUESS.start, GUESS.stop):
        step = np.zeros(SIZE)
        step[index] = 1e-5
        slope = (
            Model(weights + step).log_prob(prompt, beginning) - Model(weights - step).log_prob(prompt, beginning)
        ) / 2e-5
        assert slope == pytest.approx(exact[index], abs=1e-8)


def test_a_gradient_touches_only_the_part_of_its_situation():
    parts = {"guess": GUESS, "nim": NIM, "sum": SUM, "other-arithmetic": OTHER, "unknown": UNKNOWN_PROMPT}
    for name, part in parts.items():
        prompt = prompts.ALL[name]
        gradient = Model(neutral_weights()).gradient(prompt, prompts.sampled(answers_to(prompt)[0]))
        gradient[part] = 0.0
        assert not gradient.any()


def test_the_parts_cover_the_vector_in_their_order():
    assert [GUESS.start, NIM.start, SUM.start, OTHER.start, UNKNOWN_PROMPT.start, SIZE] == [
        0,
        GUESS.stop,
        NIM.stop,
        SUM.stop,
        OTHER.stop,
        UNKNOWN_PROMPT.stop,
    ]


def test_a_very_wide_interval_is_cut_to_its_middle():
    texts = choice_for(Guess(0, 10**12)).texts
    assert len(texts) == 1000
    assert texts[500] == b"\\boxed{%d}" % (10**12 // 2)


@pytest.mark.parametrize("text", ["\\boxed{51}", "\\boxed{10}", "hello"])
def test_an_answer_that_the_policy_never_gives_is_refused(text):
    with pytest.raises(InvalidRequest, match="begins with the sampled ids"):
        Model(neutral_weights()).log_prob(prompts.guessing([10]), prompts.sampled(text))


def test_weights_of_another_size_or_not_finite_are_refused():
    bad = neutral_weights()
    bad[3] = np.inf
    for weights in (np.zeros(3), np.zeros(SIZE, dtype=np.float32), bad):
        with pytest.raises(InvalidRequest):
            Model(weights)
