"""The tiny policy's messages: vLLM's completions and its generate route.

* A request of either route is read into one struct; unused fields are ignored, as in vLLM.
* An answer of the generate route is a converted completion, so a fault appears in both.
* Sampling parameters are checked as in vLLM; only the generate route reduces ``max_tokens`` to the context.
* A parameter that would change the distribution and is not supported is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace_workers.tiny_policy.sampler import Generation, SamplerSettings

MAX_MODEL_LEN = 131072
"""Most tokens of prompt and answer; reported by ``/v1/models`` and refused beyond, as in vLLM."""

MAX_N = 256
"""Most answers to one request."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "min_tokens": (0,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "structured_outputs": (None,),
}
"""The accepted values of parameters that the tiny policy does not support: those that change nothing. An answer always
ends by itself, so ``ignore_eos`` has no effect; and it has no watermark."""

AnswerData = dict[str, Any]
"""A choice of a completion, as JSON-able data."""


class _SamplingParameters(msgspec.Struct, kw_only=True):
    max_tokens: int | None = 16
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int = 0
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    watermarking: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class TinyPolicyRequest(_SamplingParameters, kw_only=True):
    """The fields of vLLM's request that the tiny policy uses."""

    model: str = ""
    prompt: msgspec.Raw
    return_token_ids: bool | None = None
    stream: bool | None = None


class TinyGenerateRequest(TinyPolicyRequest, kw_only=True):
    """A request of the generate route: it always gets token ids, and ``max_tokens`` is reduced to the context."""


class _GenerateBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    token_ids: msgspec.Raw
    sampling_params: _SamplingParameters
    return_token_ids: bool | None = None
    stream: bool | None = None


_decode_completion = msgspec.json.Decoder(TinyPolicyRequest).decode
_decode_generate = msgspec.json.Decoder(_GenerateBody).decode
_decode_prompt = msgspec.json.Decoder(list[int]).decode


def read_completion(body: bytes) -> TinyPolicyRequest:
    """Read a request of ``/v1/completions``. Raises InvalidRequest."""
    try:
        return _decode_completion(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request cannot be read: {error}.") from error


def read_generate(body: bytes) -> TinyGenerateRequest:
    """Read a request of ``/inference/v1/generate``. Raises InvalidRequest."""
    try:
        request = _decode_generate(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request cannot be read: {error}.") from error
    return TinyGenerateRequest(
        model=request.model or "",
        prompt=request.token_ids,
        return_token_ids=request.return_token_ids,
        stream=request.stream,
        **msgspec.structs.asdict(request.sampling_params),
    )


def read_prompt(raw: msgspec.Raw) -> list[int]:
    """Read the token ids of a prompt. Raises InvalidRequest."""
    try:
        return _decode_prompt(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The prompt must be a list of token ids: {error}.") from error


def sampler_settings(request: TinyPolicyRequest, prompt_length: int) -> SamplerSettings:
    """Read the sampling parameters of a request. Raises InvalidRequest."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    top_k = request.top_k or -1
    min_p = request.min_p or 0.0
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    limit = max_tokens if isinstance(request, TinyGenerateRequest) else MAX_MODEL_LEN
    checks = {
        "stream": (not request.stream, "streaming is not supported"),
        "temperature": (temperature >= 0, "it must be 0 or more"),
        "top_p": (0 < top_p <= 1, "it must be above 0 and at most 1"),
        "top_k": (top_k >= -1, "it must be -1 or more"),
        "min_p": (0 <= min_p <= 1, "it must be 0 to 1"),
        "max_tokens": (1 <= max_tokens <= limit, f"it must be 1 to {MAX_MODEL_LEN}"),
        "prompt": (1 <= prompt_length < MAX_MODEL_LEN, f"it must have 1 to {MAX_MODEL_LEN - 1} tokens"),
        "n": (1 <= request.n <= MAX_N, f"it must be 1 to {MAX_N}"),
        "logprobs": ((request.logprobs or 0) >= -1, "it must be -1 or more"),
    }
    for name, (is_valid, problem) in checks.items():
        if not is_valid:
            raise InvalidRequest(f"{name}: {problem}.", param=name)
    _refuse_unsupported(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    room = min(max_tokens, MAX_MODEL_LEN - prompt_length)
    return SamplerSettings(temperature, top_p, top_k, min_p, room, stop, request.stop_token_ids or ())


def _refuse_unsupported(request: TinyPolicyRequest) -> None:
    for name, neutral in NEUTRAL.items():
        if getattr(request, name) not in neutral:
            raise InvalidRequest(f"{name}: the tiny policy does not support it.", param=name)


def completion_choice(
    index: int,
    generation: Generation,
    request: TinyPolicyRequest,
    version: str,
    prompt_logprobs: list[dict[int, dict[str, Any]] | None] | None,
) -> AnswerData:
    """Make one choice of an answer of ``/v1/completions``."""
    token_ids = generation.token_ids
    return {
        "index": index,
        "text": generation.text,
        "logprobs": _logprobs(generation) if request.logprobs is not None else None,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "token_ids": token_ids if request.return_token_ids or isinstance(request, TinyGenerateRequest) else None,
        "prompt_logprobs": prompt_logprobs,
        # The original bytes: an echo needs no decoding.
        "prompt_token_ids": request.prompt if request.return_token_ids else None,
        "weight_versions": [{"version": version, "start": 0, "end": len(token_ids)}] if token_ids else [],
    }


def prompt_logprobs_field(
    prompt: Sequence[int], logprobs: Sequence[float | None]
) -> list[dict[int, dict[str, Any]] | None]:
    """Format the logprobs of a prompt's tokens as vLLM does."""
    return [
        None if logprob is None else {token: {"logprob": logprob, "rank": None, "decoded_token": None}}
        for token, logprob in zip(prompt, logprobs, strict=True)
    ]


def _logprobs(generation: Generation) -> dict[str, Any]:
    tokens = [chr(token) if token < 128 else "" for token in generation.token_ids]
    offsets = list(itertools.accumulate((len(token) for token in tokens[:-1]), initial=0))
    return {"text_offset": offsets, "token_logprobs": generation.logprobs, "tokens": tokens, "top_logprobs": None}


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
    ids = [*(token_ids or ()), *[0] * len(values)]  # with a lie their numbers may differ
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
