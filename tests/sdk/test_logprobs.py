"""``score``: logprobs of one version of the weights."""

from __future__ import annotations

import json

import pytest

from headrace import logprobs
from headrace.errors import PolicyFailure
from tests.sdk.wire.test_prompt_logprobs import TOKENS, response


class FakeServer:
    """Responses in place of HTTP: the given versions one after the other, and always the same logprobs."""

    def __init__(self, *versions: str) -> None:
        self.versions = list(versions)
        self.completions = 0

    def request(self, url: str, timeout_s: float, body: bytes | None = None) -> bytes:
        if url.endswith("/weight_info"):
            version = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
            return json.dumps({"weight_version": version}).encode()
        self.completions += 1
        return response(-1.0, -2.0, -3.0)


def test_a_score_belongs_to_the_version_that_was_confirmed_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer("0.3", "0.4", "0.4")
    monkeypatch.setattr(logprobs, "_request", server.request)
    scores = logprobs.score("http://policy/", "m", TOKENS)
    assert (str(scores.version), server.completions) == ("0.4", 2)
    assert scores.logprobs.tolist() == [0.0, -1.0, -2.0, -3.0]


def test_weights_that_change_during_every_try_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer(*(f"0.{number}" for number in range(20)))
    monkeypatch.setattr(logprobs, "_request", server.request)
    with pytest.raises(PolicyFailure) as caught:
        logprobs.score("http://policy", "m", TOKENS)
    assert (caught.value.kind, caught.value.retryable) == ("version-changed", True)


@pytest.mark.parametrize("version", ["latest", "1"])
def test_weights_without_a_version_are_an_error(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_request", FakeServer(version).request)
    with pytest.raises(PolicyFailure) as caught:
        logprobs.score("http://policy", "m", TOKENS)
    assert caught.value.kind == "unknown-version"
