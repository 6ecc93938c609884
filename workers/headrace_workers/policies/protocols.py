"""The three protocols for sampling tokens, each with an encoder of requests and a reader of answers.

* ``generate`` and ``completions`` send the prompt as token ids; ``chat`` sends messages, and the server renders them.
* Every request states all parameters that change the distribution, so that no default of a server applies.
* A reader takes ids and logprobs unchanged; missing ones are None.
* An answer that is not JSON, or does not have exactly one choice, is ``unreadable-response``. NaN and infinities are
  read, so that the check of the sample can report their position.
* A logprob that vLLM substituted for an unknown or non-finite one counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

from headrace.errors import PolicyFailure
from headrace.trajectory import Message
from headrace.wire import policy_server
from headrace_workers.policies.base import SampleRequest
from headrace_workers.policies.images import data_url
from headrace_workers.policies.server_errors import quote

ProtocolName = Literal["generate", "completions", "chat"]


class AnswerChoice(NamedTuple):
    """A choice of an answer, in the form shared by all protocols. ``prompt``: the prompt ids that the server reports.
    ``spans``: the weights that sampled each range of tokens. ``images``: the ranges of the prompt that are images."""

    token_ids: list[int] | None
    logprobs: list[float | None] | None
    finish_reason: str
    spans: list[policy_server.VersionSpan] | None
    prompt: list[int] | None
    text: str | None
    images: list[tuple[int, int]] | None = None


class SamplingProtocol(NamedTuple):
    """A protocol: ``body`` makes a request's body; ``read`` returns the choice of an answer."""

    name: ProtocolName
    path: str
    body: Callable[[SampleRequest], bytes]
    read: Callable[[bytes], AnswerChoice]


_encode = msgspec.json.Encoder().encode
_generate_answer = msgspec.json.Decoder(policy_server.GenerateResponse)
_completion_answer = msgspec.json.Decoder(policy_server.CompletionResponse)
_chat_answer = msgspec.json.Decoder(policy_server.ChatResponse)

T = TypeVar("T")


def _generate_body(request: SampleRequest) -> bytes:
    sampling, structured_outputs = request.sampling, request.sampling_spec.structured_outputs
    return _encode(
        policy_server.GenerateRequest(
            model=request.model,
            token_ids=request.prompt,
            sampling_params=policy_server.TokenSampling(
                max_tokens=request.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed,
                stop=request.stop,
                stop_token_ids=request.stop_token_ids,
                logprobs=0,
                structured_outputs=UNSET if structured_outputs is None else structured_outputs,
            ),
            content_parts=[policy_server.ImagePart(url=data_url(image)) for image in request.images],
            return_token_ids=bool(request.images),
        )
    )


def _read_generate(body: bytes) -> AnswerChoice:
    answer = _decode(_generate_answer, body)
    choice = _single_choice(answer.choices)
    logprobs = None if choice.logprobs is None else choice.logprobs.content
    if logprobs is not None and choice.token_ids is not None:
        _check_same_tokens(choice.token_ids, logprobs)
    return AnswerChoice(
        token_ids=choice.token_ids,
        logprobs=None if logprobs is None else _without_substitutes([item.logprob for item in logprobs]),
        finish_reason=choice.finish_reason or "",
        spans=choice.weight_versions,
        prompt=answer.prompt_token_ids,
        text=None,
        images=None if answer.mm_placeholders is None else _ranges(answer.mm_placeholders.get("image", [])),
    )


def _ranges(placeholders: list[policy_server.PlaceholderRange]) -> list[tuple[int, int]]:
    return [(item.offset, item.offset + item.length) for item in placeholders]


def _completion_body(request: SampleRequest) -> bytes:
    sampling, structured_outputs = request.sampling, request.sampling_spec.structured_outputs
    return _encode(
        policy_server.CompletionRequest(
            model=request.model,
            prompt=request.prompt,
            max_tokens=request.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            logprobs=0,
            structured_outputs=UNSET if structured_outputs is None else structured_outputs,
            return_token_ids=True,
        )
    )


def _read_completion(body: bytes) -> AnswerChoice:
    choice = _single_choice(_decode(_completion_answer, body).choices)
    logprobs = None if choice.logprobs is None else choice.logprobs.token_logprobs
    return AnswerChoice(
        token_ids=choice.token_ids,
        logprobs=None if logprobs is None else _without_substitutes(logprobs),
        finish_reason=choice.finish_reason or "",
        spans=choice.weight_versions,
        prompt=choice.prompt_token_ids,
        text=choice.text,
    )


def _chat_body(request: SampleRequest) -> bytes:
    sampling, structured_outputs = request.sampling, request.sampling_spec.structured_outputs
    schema = None
    if structured_outputs is not None and structured_outputs.keys() == {"json"}:
        schema = structured_outputs["json"]
    return _encode(
        policy_server.ChatRequest(
            model=request.model,
            messages=[_chat_message(message) for message in request.messages],
            max_tokens=request.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            logprobs=True,
            return_token_ids=True,
            # OpenAI's own field, if it can express the schema.
            response_format=UNSET
            if schema is None
            else {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
            structured_outputs=structured_outputs if structured_outputs is not None and schema is None else UNSET,
            tools=request.tools or UNSET,
            tool_choice="none" if request.tools else UNSET,
        )
    )


def _chat_message(message: Message) -> policy_server.ChatMessage:
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    return policy_server.ChatMessage(role=message.role, content=content)


def _read_chat(body: bytes) -> AnswerChoice:
    answer = _decode(_chat_answer, body)
    choice = _single_choice(answer.choices)
    logprobs = None if choice.logprobs is None else choice.logprobs.content
    return AnswerChoice(
        token_ids=choice.token_ids,
        logprobs=None if logprobs is None else _without_substitutes([item.logprob for item in logprobs]),
        finish_reason=choice.finish_reason or "",
        spans=choice.weight_versions,
        prompt=answer.prompt_token_ids,
        text=choice.message.content,
    )


PROTOCOLS: dict[ProtocolName, SamplingProtocol] = {
    protocol.name: protocol
    for protocol in (
        SamplingProtocol("generate", policy_server.GENERATE, _generate_body, _read_generate),
        SamplingProtocol("completions", policy_server.COMPLETIONS, _completion_body, _read_completion),
        SamplingProtocol("chat", policy_server.CHAT, _chat_body, _read_chat),
    )
}


def _without_substitutes(logprobs: list[float | None]) -> list[float | None]:
    """Replace logprobs that vLLM substituted for unknown or non-finite ones by None."""
    if policy_server.CLAMPED_LOGPROB not in logprobs:
        return logprobs
    return [None if value == policy_server.CLAMPED_LOGPROB else value for value in logprobs]


def _check_same_tokens(token_ids: list[int], logprobs: Sequence[policy_server.TokenLogprob]) -> None:
    if [item.token_id for item in logprobs] == token_ids:
        return
    for position, (token, item) in enumerate(zip(token_ids, logprobs, strict=False)):
        if item.token_id is not None and item.token_id != token:
            raise PolicyFailure(
                f"The logprob at position {position} is of token {item.token_id}, but the sampled token is {token}.",
                kind="logprob-of-another-token",
                retryable=True,
            )


def _single_choice(choices: list[T]) -> T:
    if len(choices) != 1:
        raise PolicyFailure(
            f"The answer has {len(choices)} choices, not one.", kind="unreadable-response", retryable=True
        )
    return choices[0]


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return decode_leniently(body, decoder.type, error)


def decode_leniently(body: bytes, kind: type[T], first_error: Exception) -> T:
    """Decode an answer that may contain NaN or Infinity. Raises PolicyFailure ``unreadable-response``."""
    try:
        return msgspec.convert(json.loads(body), kind)
    except (ValueError, msgspec.ValidationError, RecursionError):
        raise PolicyFailure(
            f"The answer cannot be read ({first_error}): {quote(body)}", kind="unreadable-response", retryable=True
        ) from first_error
