"""Reading a situation from a prompt, and the contract of that module."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidRequest
from headrace_workers.renderers.bytes_renderer import VOCAB_SIZE
from headrace_workers.tiny_policy.situations import (
    UNKNOWN,
    Guess,
    Heaps,
    OtherArithmetic,
    Sum,
    prompt_text,
    read_situation,
)
from tests.workers.tiny_policy import prompts


@pytest.mark.parametrize(
    ("name", "situation"),
    [
        ("guess", Guess(11, 39)),
        ("guess-one-left", Guess(20, 20)),
        ("nim", Heaps((2, 0, 4))),
        ("nim-large", Heaps((1, 7))),
        ("other-arithmetic", OtherArithmetic()),
        ("unknown", UNKNOWN),
    ],
)
def test_the_wording_of_the_environments_is_understood(name, situation):
    assert read_situation(prompt_text(prompts.ALL[name])) == situation


def test_a_sum_of_two_digits_has_its_own_situation():
    assert isinstance(read_situation(prompt_text(prompts.ALL["sum"])), Sum)


def test_the_same_hints_give_the_same_situation():
    one, other = prompts.guessing([10, 40]), prompts.guessing([5, 40, 10, 41, 41])
    assert one != other
    assert read_situation(prompt_text(one)) == read_situation(prompt_text(other))


def test_situations_of_different_kinds_are_never_equal():
    assert Guess(1, 9) != Sum(1, 9)
    assert OtherArithmetic() != UNKNOWN


def test_hints_that_contradict_each_other_are_unknown():
    text = "secret whole number from 1 to 9; secret number is higher than 5; secret number is lower than 3"
    assert read_situation(text) == UNKNOWN


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=300))
def test_every_prompt_is_some_situation(ids):
    text = prompt_text(ids)
    assert [ord(character) for character in text] == ids
    assert prompt_text(np.array(ids, dtype=np.int32)) == text
    read_situation(text)


@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 0xD800, 1 << 16, 1 << 40])
def test_an_id_outside_the_vocabulary_is_refused(bad):
    with pytest.raises(InvalidRequest, match=f"{bad} is outside"):
        prompt_text([1, bad, 2])
