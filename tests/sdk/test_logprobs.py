"""Reading the logprobs of a prompt: what is no logprob is an error that names the position."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace import logprobs as scoring
from headrace.errors import PolicyFailure
from headrace.logprobs import read_scores, scoring_body

TOKENS = [10, 11, 12, 13]


def answer(*values: Any, tokens: list[int] = TOKENS) -> bytes:
    told = [None] + [
        {str(token): {"logprob": value, "rank": 1, "decoded_token": "x"}}
        for token, value in zip(tokens[1:], values, strict=False)
    ]
    return json.dumps({"choices": [{"text": "z", "prompt_logprobs": told, "token_ids": [1]}]}).encode()


def test_one_logprob_for_each_token_and_0_for_the_first() -> None:
    scores = read_scores(answer(-1.5, -0.0, -20.25), TOKENS)
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, np.array([0.0, -1.5, 0.0, -20.25], np.float32))
    np.testing.assert_array_equal(read_scores(answer(-1.5, -0.0, -20.25), np.array(TOKENS, np.int32)), scores)


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
def test_what_is_no_logprob_is_an_error_that_names_the_position(value: Any, kind: str) -> None:
    with pytest.raises(PolicyFailure, match="at position 2") as caught:
        read_scores(answer(-1.0, value, -1.0), TOKENS)
    assert caught.value.kind == kind


def test_the_logprob_of_another_token_is_none() -> None:
    with pytest.raises(PolicyFailure, match="at position 3") as caught:
        read_scores(answer(-1.0, -1.0, -1.0, tokens=[10, 11, 12, 99]), TOKENS)
    assert caught.value.kind == "logprob-missing"


@pytest.mark.parametrize(("values", "kind"), [((-1.0, -1.0), "logprobs-too-few")])
def test_an_answer_of_another_length_is_refused(values: tuple[float, ...], kind: str) -> None:
    with pytest.raises(PolicyFailure) as caught:
        read_scores(answer(*values), TOKENS)
    assert caught.value.kind == kind


@pytest.mark.parametrize("body", [b"<html>", b'{"choices": [{"text": "z"}]}', b'{"choices": []}', b"\xff"])
def test_an_answer_without_the_logprobs_of_the_prompt_is_refused(body: bytes) -> None:
    with pytest.raises(PolicyFailure) as caught:
        read_scores(body, TOKENS)
    assert caught.value.kind in ("unreadable-response", "no-prompt-logprobs")


def test_an_engine_is_asked_for_one_token_and_the_logprobs_of_the_prompt() -> None:
    assert json.loads(scoring_body("m", TOKENS)) == {
        "model": "m",
        "prompt": TOKENS,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
    }


class Server:
    """Answers in place of HTTP: the versions that it names, one after the other, and always the same logprobs."""

    def __init__(self, *versions: str) -> None:
        self.versions = list(versions)
        self.questions = 0

    def ask(self, url: str, timeout_s: float, body: bytes | None = None) -> bytes:
        if url.endswith("/weight_info"):
            version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
            return json.dumps({"weight_version": version}).encode()
        self.questions += 1
        return answer(-1.0, -2.0, -3.0)


def test_scores_are_of_the_version_that_was_confirmed_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("0.3", "0.4", "0.4")
    monkeypatch.setattr(scoring, "_ask", server.ask)
    found = scoring.score("http://policy/", "m", TOKENS)
    assert (str(found.version), server.questions) == ("0.4", 2)
    assert found.logprobs.tolist() == [0.0, -1.0, -2.0, -3.0]


def test_scores_that_new_weights_spoil_again_and_again_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(*(f"0.{number}" for number in range(20)))
    monkeypatch.setattr(scoring, "_ask", server.ask)
    with pytest.raises(PolicyFailure) as caught:
        scoring.score("http://policy", "m", TOKENS)
    assert (caught.value.kind, caught.value.retryable) == ("version-changed", True)


@pytest.mark.parametrize("version", ["latest", "1"])
def test_scores_of_weights_without_a_version_are_an_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_ask", Server(version).ask)
    with pytest.raises(PolicyFailure) as caught:
        scoring.score("http://policy", "m", TOKENS)
    assert caught.value.kind == "unknown-version"
