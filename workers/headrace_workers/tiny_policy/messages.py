"""The tiny policy's messages: vLLM's completions and its generate route.

* A request of either route is read into one struct; unused fields are ignored, as in vLLM.
* An answer of the generate route is a converted completion, so a fault appears in both.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.errors import InvalidRequest


class TinyPolicyRequest(msgspec.Struct, kw_only=True):
    """The fields of vLLM's request that the tiny policy uses."""

    model: str = ""
    prompt: msgspec.Raw
    max_tokens: int | None = 16
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None


class _GenerateSampling(msgspec.Struct, kw_only=True):
    max_tokens: int | None = 16
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class _GenerateRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    token_ids: msgspec.Raw
    sampling_params: _GenerateSampling
    return_token_ids: bool | None = None
    stream: bool | None = None


_decode_completion = msgspec.json.Decoder(TinyPolicyRequest).decode
_decode_generate = msgspec.json.Decoder(_GenerateRequest).decode


def read_completion(body: bytes) -> TinyPolicyRequest:
    """Read a request of ``/v1/completions``. Raises InvalidRequest."""
    try:
        return _decode_completion(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request cannot be read: {error}.") from error


def read_generate(body: bytes) -> TinyPolicyRequest:
    """Read a request of ``/inference/v1/generate``. Raises InvalidRequest."""
    try:
        asked = _decode_generate(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request cannot be read: {error}.") from error
    return TinyPolicyRequest(
        model=asked.model or "",
        prompt=asked.token_ids,
        return_token_ids=asked.return_token_ids,
        stream=asked.stream,
        **msgspec.structs.asdict(asked.sampling_params),
    )


def generate_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """Convert an answer of ``/v1/completions`` to one of ``/inference/v1/generate``."""
    first = answer["choices"][0]
    return {
        "request_id": answer["id"].replace("cmpl-", "generate-tokens-", 1),
        "model": answer["model"],
        "created": answer["created"],
        "usage": answer["usage"],
        "prompt_logprobs": first["prompt_logprobs"],
        "prompt_token_ids": first["prompt_token_ids"],
        "output_mode": "tokens",
        "choices": [_generate_choice(choice) for choice in answer["choices"]],
    }


def _generate_choice(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "index": choice["index"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        "token_ids": choice["token_ids"],
        "weight_versions": choice["weight_versions"],
        "logprobs": _generate_logprobs(choice["token_ids"], choice["logprobs"]),
    }


def _generate_logprobs(token_ids: list[int] | None, logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    values = logprobs["token_logprobs"]
    ids = [*(token_ids or ()), *[0] * len(values)]  # a lie may give more of one than of the other
    return {
        "content": [
            {
                "token_id": token,
                "logprob": value,
                "rank": None,
                "top_logprobs": [{"token_id": token, "logprob": value, "rank": None}],
            }
            for token, value in zip(ids, values, strict=False)
        ]
    }
