"""Logprobs of given tokens, requested from a policy server on ``/v1/completions``.

* Each token has one logprob, given the tokens before it; the first token has none, and its value is 0.
* A logprob that is missing or invalid is an error that names the position; it is never replaced by a number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import PolicyFailure
from headrace.wire import policy_server

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(policy_server.CompletionResponse).decode


def prompt_logprobs_request(model: str, token_ids: Sequence[int]) -> bytes:
    """The body of a request to ``/v1/completions``. An engine samples at least one token, which is ignored."""
    return _encode(
        policy_server.CompletionRequest(model=model, prompt=token_ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    )


def read_prompt_logprobs(body: bytes, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """The logprobs f32[n] in a response, for ``token_ids`` int[n].

    Raises PolicyFailure with one of the kinds ``unreadable-response``, ``no-prompt-logprobs``, ``logprobs-too-few``,
    ``logprobs-too-many``, ``logprob-missing``, ``logprob-nan``, ``logprob-infinite``, ``logprob-positive``.
    """
    entries = _decode_entries(body)
    if len(entries) != len(token_ids):
        kind = "logprobs-too-few" if len(entries) < len(token_ids) else "logprobs-too-many"
        raise _bad_response(kind, f"The server gave {len(entries)} logprobs for {len(token_ids)} tokens.")
    logprobs = np.zeros(len(token_ids), np.float32)
    for position, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if position:
            logprobs[position] = _checked_value(position, None if entry is None else entry.get(int(token)))
    return logprobs


def version_changed_failure(address: str, before: str, after: str) -> PolicyFailure:
    """The failure of a request during which the weights changed, so that its logprobs belong to no single version."""
    return PolicyFailure(
        f"{address} held {before} before and {after} after the request for logprobs.",
        hint="Repeat it while no weights are being loaded, or use a server with fixed weights.",
        kind="version-changed",
        retryable=True,
    )


def _decode_entries(body: bytes) -> policy_server.PromptLogprobs:
    try:
        choices = _decode(body).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            # The standard library also reads NaN and Infinity.
            choices = msgspec.convert(json.loads(body), policy_server.CompletionResponse, strict=False).choices
        except (ValueError, msgspec.ValidationError, RecursionError):
            raise _bad_response("unreadable-response", f"The response cannot be read: {error}.") from error
    if len(choices) != 1 or choices[0].prompt_logprobs is None:
        raise PolicyFailure(
            "The response has no prompt logprobs.",
            hint="The server must support `prompt_logprobs` on /v1/completions, as vLLM does.",
            kind="no-prompt-logprobs",
            retryable=False,
        )
    return choices[0].prompt_logprobs


def _checked_value(position: int, entry: policy_server.PromptLogprob | None) -> float:
    value = None if entry is None else entry.logprob
    where = f"at position {position}"
    if value is None or value == policy_server.CLAMPED_LOGPROB:
        raise _bad_response("logprob-missing", f"The engine gave no logprob {where}.")
    if math.isnan(value):
        raise _bad_response("logprob-nan", f"The logprob {where} is NaN.")
    if math.isinf(value) or value < float(np.finfo(np.float32).min):
        raise _bad_response("logprob-infinite", f"The logprob {where} is {value}.")
    if value > 0:
        raise _bad_response("logprob-positive", f"The logprob {where} is {value}, above 0.")
    return value


def _bad_response(kind: str, detail: str) -> PolicyFailure:
    return PolicyFailure(detail, hint="No other value is used in its place.", kind=kind, retryable=True)
