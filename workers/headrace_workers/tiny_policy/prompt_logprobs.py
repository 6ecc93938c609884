"""Logprobs of a prompt's tokens, as an engine returns them on request.

* The policy's own earlier tokens have their logprob under the current weights.
* A token that the policy can never sample at its position has the engine's lowest logprob.
* All other tokens have the logprob 0, and the first token has none.
"""

from __future__ import annotations

from itertools import pairwise

from headrace.errors import InvalidRequest
from headrace.wire.policy_server import CLAMPED_LOGPROB
from headrace_workers.renderers.bytes_renderer import ASSISTANT, END
from headrace_workers.tiny_policy.model import Model


def prompt_logprobs(model: Model, prompt: list[int]) -> list[float | None]:
    """The logprob of each token of the prompt."""
    logprobs: list[float | None] = [None, *[0.0] * (len(prompt) - 1)]
    for start in (at + 1 for at, token in enumerate(prompt) if token == ASSISTANT):
        end = prompt.index(END, start) + 1 if END in prompt[start:] else len(prompt)
        logprobs[start:end] = _answer_logprobs(model, prompt[:start], prompt[start:end])
    return logprobs


def _answer_logprobs(model: Model, before: list[int], answer: list[int]) -> list[float]:
    sums = [0.0]
    for length in range(1, len(answer) + 1):
        try:
            sums.append(model.log_prob(before, answer[:length]))
        except InvalidRequest:
            break
    impossible = [CLAMPED_LOGPROB] * (len(answer) + 1 - len(sums))
    # A difference of sums may be above 0 by a rounding error.
    return [min(0.0, after - first) for first, after in pairwise(sums)] + impossible
