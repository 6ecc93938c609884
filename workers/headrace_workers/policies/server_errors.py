"""The mapping from error answers of a policy server to failures.

* Each refusal has its own failure kind, which determines whether another try could help.
* The server's own message is quote, up to a limit.
"""

from __future__ import annotations

import msgspec

from headrace.errors import PolicyFailure
from headrace.wire.policy_server import ErrorResponse

QUOTE_CHARACTERS = 300
"""Characters of an error body that a failure quotes."""

_CONTEXT_WORDS = ("maximum context length", "maximum model length", "context_length_exceeded", "context window")
_VOCABULARY_WORDS = ("out of vocabulary", "outside the vocabulary")

_UNWRITABLE = b"out of range float"
"""Message of Python's JSON encoder about NaN and infinities, which servers pass on."""

_decode_error = msgspec.json.Decoder(ErrorResponse).decode


def refusal(server: str, status: int, body: bytes) -> PolicyFailure:
    """Convert an error answer to a failure."""
    text = quote(body)
    if status == 429:
        return PolicyFailure(f"{server} is over its rate limit (429): {text}", kind="rate-limited", retryable=True)
    if status == 500 and _UNWRITABLE in body.lower():
        return PolicyFailure(
            f"{server} could not encode a logprob that is not finite ({status}): {text}",
            hint="The model's output for this prompt is not finite; a shorter context or a wider dtype may help.",
            kind="logprob-unwritable",
            retryable=True,
        )
    if status >= 500:
        return PolicyFailure(f"{server} failed ({status}): {text}", kind="server-error", retryable=True)
    if status == 404 and _is_about_the_model(body):
        return PolicyFailure(
            f"{server} does not serve the model ({status}): {text}",
            hint="Set policy.model (or the agent's base) to the name of a model that the server has.",
            kind="unknown-model",
            retryable=False,
        )
    words = body.decode(errors="replace").lower()
    if any(word in words for word in _CONTEXT_WORDS):
        return context_overflow(f"{server} refused the prompt as too long ({status}): {text}")
    if any(word in words for word in _VOCABULARY_WORDS):
        return PolicyFailure(
            f"{server} does not have a token of the prompt ({status}): {text}",
            hint="The renderer's tokenizer must be that of the model: run `headrace policy check`.",
            kind="prompt-out-of-vocabulary",
            retryable=False,
        )
    return PolicyFailure(
        f"{server} refused the request ({status}): {text}",
        hint="Compare the run's policy, sampling and limits with the server's capabilities.",
        kind="request-refused",
        retryable=False,
    )


def context_overflow(detail: str) -> PolicyFailure:
    """The failure of a prompt that exceeds the model's context; it truncates the episode."""
    return PolicyFailure(
        detail,
        hint="Set limits.max_context_tokens to the server's limit (its max_model_len).",
        kind="context-overflow",
        retryable=False,
    )


def quote(body: bytes) -> str:
    """Decode the beginning of a body as text."""
    text = body.decode(errors="replace").strip()
    return text if len(text) <= QUOTE_CHARACTERS else text[:QUOTE_CHARACTERS] + "…"


def _is_about_the_model(body: bytes) -> bool:
    try:
        error = _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return error.param == "model" or error.code == "model_not_found" or "model" in error.message.lower()
