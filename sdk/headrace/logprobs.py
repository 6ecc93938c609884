"""The logprobs of given tokens under a policy, asked of a policy server.

* One logprob for each token, given the tokens before it. The first has none before it, and its value is 0.
* The version that the server confirmed before and after is the one that the logprobs are of; where it changed in
  between, the question is asked again.
* What is no logprob is an error that names the position, never a number in its place.

``score`` is for learners, and needs nothing but the standard library. A run's spec can ask for the same beforehand
(``policy.scorers``): then the batch brings them.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import PolicyFailure
from headrace.trajectory import Version
from headrace.wire import policy_server

MAX_TRIES = 5
"""Questions whose answer new weights may spoil. They change every few seconds at most; a question takes less."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(policy_server.CompletionResponse).decode


class Scores(NamedTuple):
    """``logprobs`` f32[n], one for each token, and the version that they are of."""

    logprobs: npt.NDArray[np.float32]
    version: Version


def score(
    endpoint: str, model: str, token_ids: Sequence[int] | npt.NDArray[np.int32], *, timeout_s: float = 300.0
) -> Scores:
    """The logprobs of ``token_ids`` int[n], n ≥ 1, under the weights that the server at ``endpoint`` holds now.

    ``model`` is the name that the server knows the policy by. ``timeout_s`` bounds each request. Raises PolicyFailure:
    ``unreachable``, ``request-refused``, ``unknown-version``, ``version-changed``, and the kinds of ``read_scores``.
    """
    address = policy_server.base_url(endpoint)
    body = scoring_body(model, [int(token) for token in token_ids])
    after = _weights(address, timeout_s)
    for _ in range(MAX_TRIES):
        before = after
        answer = _ask(f"{address}{policy_server.COMPLETIONS}", timeout_s, body)
        after = _weights(address, timeout_s)
        if after == before:
            return Scores(read_scores(answer, token_ids), after.version)
    raise version_changed(address, before.name, after.name)


def scoring_body(model: str, token_ids: Sequence[int]) -> bytes:
    """The body of the request to ``/v1/completions``. An engine samples at least one token; it is not looked at."""
    return _encode(
        policy_server.CompletionRequest(model=model, prompt=token_ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
    )


def read_scores(body: bytes, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """f32[n] of an answer. Raises PolicyFailure: ``unreadable-response``, ``no-prompt-logprobs``,
    ``logprobs-too-few``, ``logprobs-too-many``, ``logprob-missing``, ``logprob-nan``, ``logprob-infinite``,
    ``logprob-positive``."""
    told = _prompt_logprobs(body)
    if len(told) != len(token_ids):
        kind = "logprobs-too-few" if len(told) < len(token_ids) else "logprobs-too-many"
        raise _broken(kind, f"The server gave {len(told)} logprobs for {len(token_ids)} tokens.")
    scores = np.zeros(len(token_ids), np.float32)
    for position, (token, entry) in enumerate(zip(token_ids, told, strict=True)):
        if position:
            scores[position] = _checked(position, None if entry is None else entry.get(int(token)))
    return scores


def version_changed(address: str, before: str, after: str) -> PolicyFailure:
    """The failure of scores that cannot be said to be of one version."""
    return PolicyFailure(
        f"{address} held {before} before and {after} after it was asked for logprobs.",
        hint="Ask while no weights are loaded, or a server whose weights stay as they are.",
        kind="version-changed",
        retryable=True,
    )


def _prompt_logprobs(body: bytes) -> policy_server.PromptLogprobs:
    try:
        choices = _decode(body).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            choices = msgspec.convert(
                json.loads(body), policy_server.CompletionResponse, strict=False
            ).choices  # NaN, for one
        except (ValueError, msgspec.ValidationError, RecursionError):
            raise _broken("unreadable-response", f"The answer cannot be read: {error}.") from error
    if len(choices) != 1 or choices[0].prompt_logprobs is None:
        raise PolicyFailure(
            "The server answered without the logprobs of the prompt.",
            hint="It must know `prompt_logprobs` on /v1/completions, as vLLM does.",
            kind="no-prompt-logprobs",
            retryable=False,
        )
    return choices[0].prompt_logprobs


def _checked(position: int, entry: policy_server.PromptLogprob | None) -> float:
    value = None if entry is None else entry.logprob
    where = f"at position {position}"
    if value is None or value == policy_server.CLAMPED_LOGPROB:
        raise _broken("logprob-missing", f"The engine has no logprob {where}.")
    if math.isnan(value):
        raise _broken("logprob-nan", f"The logprob {where} is NaN.")
    if math.isinf(value) or value < float(np.finfo(np.float32).min):
        raise _broken("logprob-infinite", f"The logprob {where} is {value}.")
    if value > 0:
        raise _broken("logprob-positive", f"The logprob {where} is {value}, above 0.")
    return value


def _broken(kind: str, detail: str) -> PolicyFailure:
    return PolicyFailure(detail, hint="Nothing is put in its place.", kind=kind, retryable=True)


class _Weights(NamedTuple):
    name: str
    version: Version


def _weights(address: str, timeout_s: float) -> _Weights:
    said = _ask(f"{address}{policy_server.WEIGHT_INFO}", timeout_s)
    try:
        name = str(msgspec.json.decode(said, type=policy_server.WeightInfo).weight_version)
        version = policy_server.parse_weight_version(name)
    except (msgspec.DecodeError, UnicodeDecodeError):
        version = None
    if version is None:
        raise PolicyFailure(
            f"{address} does not name its weights by a version: {said[:100].decode(errors='replace')}",
            hint="Give the server a weight version of the form 'lineage.n', as in '0.12', when its weights change.",
            kind="unknown-version",
            retryable=False,
        )
    return _Weights(name, version)


def _ask(url: str, timeout_s: float, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            said: bytes = answer.read()
            return said
    except urllib.error.HTTPError as error:
        raise PolicyFailure(
            f"{url} refused ({error.code}): {error.read(300).decode(errors='replace')}",
            kind="request-refused",
            retryable=error.code >= 500,
        ) from error
    except OSError as error:
        raise PolicyFailure(
            f"No answer from {url}: {error}.",
            hint="Is the policy server running at that address?",
            kind="unreachable",
            retryable=True,
        ) from error
