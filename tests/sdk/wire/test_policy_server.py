"""Messages of policy servers, and their addresses."""

from __future__ import annotations

import msgspec
import pytest

from headrace.wire import policy_server


@pytest.mark.parametrize(
    "kind", [policy_server.GenerateResponse, policy_server.CompletionResponse, policy_server.ChatResponse]
)
def test_a_field_that_a_response_omits_is_none(kind: type[msgspec.Struct]) -> None:
    (choice,) = msgspec.json.decode(b'{"choices": [{}]}', type=kind).choices  # type: ignore[attr-defined]
    assert (choice.token_ids, choice.logprobs, choice.finish_reason, choice.weight_versions) == (None,) * 4


def test_readers_ignore_the_fields_that_are_not_used() -> None:
    body = b'{"id": "a", "usage": {"total_tokens": 3}, "choices": [{"index": 0, "token_ids": [1, 2]}]}'
    assert msgspec.json.decode(body, type=policy_server.GenerateResponse).choices[0].token_ids == [1, 2]


def test_the_sampling_parameters_of_a_request_are_beside_its_prompt() -> None:
    request = policy_server.CompletionRequest(model="m", prompt=[1, 2], max_tokens=4, temperature=0.0, logprobs=0)
    body = msgspec.to_builtins(request)
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("m", [1, 2], 4, 0.0)
    assert body["logprobs"] == 0
    assert "prompt_logprobs" not in body, "or the engine would compute them"


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "bad_words": (),
    "seed": None,
    "stop": (),
    "stop_token_ids": (),
    "ignore_eos": False,
    "watermarking": False,
    "n": 1,
}


def test_a_request_states_every_parameter_that_changes_the_distribution_because_a_server_may_have_other_defaults() -> (
    None
):
    sampling = policy_server.TokenSampling(max_tokens=4)
    for request in (
        policy_server.GenerateRequest(model="m", token_ids=[1], sampling_params=sampling),
        policy_server.CompletionRequest(model="m", prompt=[1], max_tokens=4),
        policy_server.ChatRequest(model="m", messages=[], max_tokens=4),
    ):
        body = msgspec.to_builtins(request)
        stated = body.get("sampling_params", body)
        assert {name: stated.get(name, "missing") for name in NEUTRAL} == NEUTRAL


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HTTP://Host:8000/v1/", "http://host:8000"),
        ("http://user:Secret@Host/Prefix", "http://user:Secret@host/Prefix"),
        ("dns+http://VLLM:8000", "dns+http://vllm:8000"),
    ],
)
def test_an_address_has_one_canonical_form(text: str, expected: str) -> None:
    assert policy_server.canonical_address(text) == expected


@pytest.mark.parametrize("text", ["host:8000", "http://", "http://host?a=1", "dns+http://vllm", "ftp://host"])
def test_another_text_is_not_an_address(text: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a policy server"):
        policy_server.canonical_address(text)
