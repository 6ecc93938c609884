"""The mapping from error answers of a policy server to failures.

* Each refusal has its own failure kind, and says whether another try could help.
* The server's own message is quoted, to a bounded length.
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


def refusal(who: str, status: int, body: bytes) -> PolicyFailure:
    """Convert an error answer to a failure."""
    said = quoted(body)
    if status == 429:
        return PolicyFailure(f"{who} is over its rate limit (429): {said}", kind="rate-limited", retryable=True)
    if status == 500 and _UNWRITABLE in body.lower():
        return PolicyFailure(
            f"{who} could not write a logprob that is not finite ({status}): {said}",
            hint="The model computes no finite numbers for this prompt; a shorter context or a wider dtype may help.",
            kind="logprob-unwritable",
            retryable=True,
        )
    if status >= 500:
        return PolicyFailure(f"{who} failed ({status}): {said}", kind="server-error", retryable=True)
    if status == 404 and _is_about_the_model(body):
        return PolicyFailure(
            f"{who} does not serve the model ({status}): {said}",
            hint="Set policy.model (or the agent's base) to a name that the server knows.",
            kind="unknown-model",
            retryable=False,
        )
    words = body.decode(errors="replace").lower()
    if any(word in words for word in _CONTEXT_WORDS):
        return context_overflow(f"{who} finds the prompt too long ({status}): {said}")
    if any(word in words for word in _VOCABULARY_WORDS):
        return PolicyFailure(
            f"{who} has no such token as one in the prompt ({status}): {said}",
            hint="The renderer's tokenizer must be that of the model: run `headrace policy check`.",
            kind="prompt-out-of-vocabulary",
            retryable=False,
        )
    return PolicyFailure(
        f"{who} refused the request ({status}): {said}",
        hint="Check the run's policy, sampling and limits against what the server offers.",
        kind="request-refused",
        retryable=False,
    )


def context_overflow(detail: str) -> PolicyFailure:
    """The failure of a prompt that exceeds the model's context; it truncates the episode."""
    return PolicyFailure(
        detail,
        hint="Set limits.max_context_tokens to what the server allows (its max_model_len).",
        kind="context-overflow",
        retryable=False,
    )


def quoted(body: bytes) -> str:
    """The beginning of a body as text."""
    text = body.decode(errors="replace").strip()
    return text if len(text) <= QUOTE_CHARACTERS else text[:QUOTE_CHARACTERS] + "…"


def _is_about_the_model(body: bytes) -> bool:
    try:
        error = _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return error.param == "model" or error.code == "model_not_found" or "model" in error.message.lower()
