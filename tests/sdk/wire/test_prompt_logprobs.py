"""Prompt logprobs: the request and the reading of the response."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace.errors import PolicyFailure
from headrace.wire.prompt_logprobs import prompt_logprobs_request, read_prompt_logprobs

TOKENS = [10, 11, 12, 13]


def response(*values: Any, tokens: list[int] = TOKENS) -> bytes:
    """A response of the engine with these logprobs behind the first token."""
    entries = [None] + [
        {str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}}
        for token, value in zip(tokens[1:], values, strict=False)
    ]
    return json.dumps({"choices": [{"text": "z", "prompt_logprobs": entries, "token_ids": [1]}]}).encode()


def test_each_token_has_one_logprob_and_the_first_has_0() -> None:
    scores = read_prompt_logprobs(response(-1.5, -0.0, -20.25), TOKENS)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, np.array([0.0, -1.5, 0.0, -20.25], np.float32))
    np.testing.assert_array_equal(
        read_prompt_logprobs(response(-1.5, -0.0, -20.25), np.array(TOKENS, np.int32)), scores
    )


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "logprob-nan"),
        (float("-inf"), "logprob-infinite"),
        (-1e308, "logprob-infinite"),
        (0.3, "logprob-positive"),
        (None, "logprob-missing"),
        (-9999.0, "logprob-missing"),
    ],
)
def test_a_missing_or_invalid_logprob_is_an_error_that_names_the_position(value: Any, kind: str) -> None:
    with pytest.raises(PolicyFailure, match="at position 2") as caught:
        read_prompt_logprobs(response(-1.0, value, -1.0), TOKENS)
    assert caught.value.kind == kind


def test_the_logprob_of_another_token_does_not_count() -> None:
    with pytest.raises(PolicyFailure, match="at position 3") as caught:
        read_prompt_logprobs(response(-1.0, -1.0, -1.0, tokens=[10, 11, 12, 99]), TOKENS)
    assert caught.value.kind == "logprob-missing"


@pytest.mark.parametrize(("values", "kind"), [((-1.0, -1.0), "logprobs-too-few")])
def test_a_response_of_another_length_is_refused(values: tuple[float, ...], kind: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        read_prompt_logprobs(response(*values), TOKENS)
    assert caught.value.kind == kind


@pytest.mark.parametrize("body", [b"<html>", b'{"choices": [{"text": "z"}]}', b'{"choices": []}', b"\xff"])
def test_a_response_without_prompt_logprobs_is_refused(body: bytes) -> None:
    with pytest.raises(PolicyFailure) as caught:
        read_prompt_logprobs(body, TOKENS)
    assert caught.value.kind in ("unreadable-response", "no-prompt-logprobs")


def test_the_request_is_for_one_token_and_the_prompt_logprobs() -> None:
    expected = {"model": "m", "prompt": TOKENS, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    assert expected.items() <= json.loads(prompt_logprobs_request("m", TOKENS)).items()
