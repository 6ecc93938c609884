"""Sampling, and the contract of its module."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_workers.renderers.bytes_renderer import END
from headrace_workers.tiny_policy.model import SIZE, choice_for
from headrace_workers.tiny_policy.sampler import SamplerSettings, WeightedAnswers, end_generation
from headrace_workers.tiny_policy.situations import Guess

WEIGHTS = np.random.default_rng(11).normal(0.0, 2.0, SIZE)


def answers(low: int = 1, high: int = 30) -> WeightedAnswers:
    return WeightedAnswers(choice_for(Guess(low, high)), WEIGHTS)


def draw(sampling: SamplerSettings, count: int = 4000) -> Counter[str]:
    ready, rng = answers(), random.Random(5)
    return Counter(ready.sample(sampling, rng).text for _ in range(count))


def tempered(temperature: float) -> dict[str, float]:
    """Exact probabilities at a temperature, from the log-probabilities of each byte."""
    choice, ready = choice_for(Guess(1, 30)), answers()
    found = {}
    for text in choice.texts:
        probability, prefix = 1.0, b""
        for token in (*text, END):
            masses = branch_masses(prefix, ready)
            powers = {key: mass ** (1 / temperature) for key, mass in masses.items()}
            probability *= powers[token] / math.fsum(powers.values())
            prefix += bytes([token]) if token != END else b""
        found[text.decode()] = probability
    return found


def branch_masses(prefix: bytes, ready: WeightedAnswers) -> dict[int, float]:
    masses: dict[int, float] = {}
    for text, mass in zip(choice_for(Guess(1, 30)).texts, ready._masses, strict=True):
        if text.startswith(prefix):
            token = (*text, END)[len(prefix)]
            masses[token] = masses.get(token, 0.0) + mass
    return masses


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_acts_on_each_byte(temperature):
    count = 4000
    seen, expected = draw(SamplerSettings(temperature, max_tokens=64), count), tempered(temperature)
    for text, probability in expected.items():
        spread = math.sqrt(count * probability * (1 - probability))
        assert abs(seen[text] - count * probability) <= 5 * spread + 1


def test_zero_is_greedy_and_ties_go_to_the_lowest_id():
    assert len(draw(SamplerSettings(0.0, max_tokens=64), 50)) == 1
    neutral = WeightedAnswers(choice_for(Guess(30, 39)), np.zeros(SIZE))
    assert neutral.sample(SamplerSettings(0.0, max_tokens=64), random.Random(0)).text == "\\boxed{30}"


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    greedy = next(iter(draw(SamplerSettings(0.0, max_tokens=64), 1)))
    assert set(draw(SamplerSettings(1.0, 1e-9, max_tokens=64), 100)) == {greedy}
    assert len(draw(SamplerSettings(1.0, 0.999999, max_tokens=64))) > 5


def test_top_k_and_min_p_keep_the_likeliest_tokens_at_each_byte():
    greedy = next(iter(draw(SamplerSettings(0.0, max_tokens=64), 1)))
    assert set(draw(SamplerSettings(top_k=1, max_tokens=64), 100)) == {greedy}
    assert set(draw(SamplerSettings(min_p=1.0, max_tokens=64), 100)) == {greedy}
    everything = len(draw(SamplerSettings(max_tokens=64)))
    assert 1 < len(draw(SamplerSettings(top_k=3, max_tokens=64))) < everything
    assert 1 < len(draw(SamplerSettings(min_p=0.5, max_tokens=64))) < everything


def test_log_probabilities_are_raw_before_temperature_and_top_p():
    ready = answers()
    greedy = ready.sample(SamplerSettings(0.0, max_tokens=64), random.Random(0))
    known = {
        made.text: made.logprobs
        for made in (ready.sample(SamplerSettings(max_tokens=64), random.Random(s)) for s in range(500))
    }
    assert known[greedy.text] == greedy.logprobs


@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.lists(st.sampled_from(["}", "{1", "boxed", "2", "\\b", "zz"]), max_size=2),
    st.lists(st.sampled_from([END, ord("{"), ord("2")]), max_size=2),
)
@settings(deadline=None)
def test_ids_text_and_log_probabilities_end_together(seed, max_tokens, stop, stop_token_ids):
    whole = answers().sample(SamplerSettings(max_tokens=64), random.Random(seed))
    made = answers().sample(
        SamplerSettings(max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids), random.Random(seed)
    )
    count = len(made.token_ids)
    assert made.token_ids == whole.token_ids[:count]
    assert made.logprobs == whole.logprobs[:count]
    assert 1 <= count <= max_tokens
    text = bytes(token for token in made.token_ids if token < 256).decode()
    if isinstance(made.stop_reason, str):
        assert text == made.text + made.stop_reason
        assert made.stop_reason in stop
    elif isinstance(made.stop_reason, int):
        assert made.token_ids[-1] == made.stop_reason
        assert made.text == (text if made.stop_reason == END else text[:-1])
    else:
        assert made.text == text
    assert made.finish_reason == ("length" if made.stop_reason is None and made.token_ids[-1] != END else "stop")
    assert not any(entry in made.text for entry in stop)


@pytest.mark.parametrize(
    ("sampling", "ids", "text", "finish", "stop"),
    [
        (SamplerSettings(max_tokens=9, stop=["</a>"]), b"7</a>", "7", "stop", "</a>"),
        (SamplerSettings(max_tokens=4, stop=["</a>"]), b"7</a", "7</a", "length", None),
        (SamplerSettings(max_tokens=9, stop_token_ids=[60]), b"7<", "7", "stop", 60),
    ],
)
def test_the_text_does_not_include_the_end_of_turn_token_a_stop_token_or_a_stop_string(
    sampling, ids, text, finish, stop
):
    said = [*b"7</a>\n\nX", END]
    made = end_generation(said, [0.0] * len(said), sampling)
    assert made == (list(ids), [0.0] * len(ids), text, finish, stop)
