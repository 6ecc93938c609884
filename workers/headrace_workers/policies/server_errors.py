"""What an error answer of a policy server stands for.

* Each way to refuse has a kind of its own, and says whether another try could help.
* The server's own words are quoted, to a bounded length.
"""

from __future__ import annotations

import msgspec

from headrace.errors import PolicyFailure
from headrace.wire.policy_server import ErrorResponse

QUOTE_CHARACTERS = 300
"""How much of an error body a failure quotes."""

_CONTEXT_WORDS = ("maximum context length", "maximum model length", "context_length_exceeded", "context window")
_VOCABULARY_WORDS = ("out of vocabulary", "outside the vocabulary")

_UNWRITABLE = b"out of range float"
"""What Python's JSON says of NaN and infinities, and servers pass on."""

_decode_error = msgspec.json.Decoder(ErrorResponse).decode


def refusal(who: str, status: int, body: bytes) -> PolicyFailure:
    """The failure that an answer with an error status stands for."""
    said = quoted(body)
    if status == 429:
        return PolicyFailure(f"{who} is over its rate limit (429): {said}", kind="rate-limited", retryable=True)
    if status == 500 and _UNWRITABLE in body.lower():
        return PolicyFailure(
            f"{who} could not write a logprob that is no finite number ({status}): {said}",
            hint="The model's arithmetic breaks down on this prompt; a shorter context or a wider dtype may help.",
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
            f"{who} does not know a token of the prompt ({status}): {said}",
            hint="The renderer's tokenizer must be that of the model: `headrace policy check` tells.",
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
    """The prompt does not fit into the model's context: the end of the episode, as a truncation."""
    return PolicyFailure(
        detail,
        hint="Set limits.max_context_tokens to what the server allows (its max_model_len).",
        kind="context-overflow",
        retryable=False,
    )


def quoted(body: bytes) -> str:
    """The beginning of a body, as text."""
    text = body.decode(errors="replace").strip()
    return text if len(text) <= QUOTE_CHARACTERS else text[:QUOTE_CHARACTERS] + "…"


def _is_about_the_model(body: bytes) -> bool:
    try:
        error = _decode_error(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return error.param == "model" or error.code == "model_not_found" or "model" in error.message.lower()
