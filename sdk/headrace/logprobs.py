"""Logprobs of given tokens under a policy, from a policy server.

* A score belongs to one version: the server's weight version is read before and after each request; if it changed, the
  request is repeated.

``score`` is for learners, and needs nothing but the standard library. A run spec can ask for the same beforehand
(``policy.scorers``); then the batch brings the logprobs.
"""

from __future__ import annotations

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
from headrace.wire.prompt_logprobs import prompt_logprobs_request, read_prompt_logprobs, version_changed_failure

MAX_TRIES = 5
"""Requests before giving up because weights changed. They change every few seconds at most; a request takes less."""


class Scores(NamedTuple):
    """``logprobs`` f32[n], one for each token, and the version of the weights that gave them."""

    logprobs: npt.NDArray[np.float32]
    version: Version


def score(
    endpoint: str, model: str, token_ids: Sequence[int] | npt.NDArray[np.int32], *, timeout_s: float = 300.0
) -> Scores:
    """The logprobs of ``token_ids`` int[n], n ≥ 1, under the weights that the server at ``endpoint`` holds now.

    The first token has no logprob, and its value is 0. ``model`` is the server's name for the policy. ``timeout_s``
    bounds each request. Raises PolicyFailure with one of the kinds ``unreachable``, ``request-refused``,
    ``unknown-version``, ``version-changed``, or a kind that ``read_prompt_logprobs`` raises.
    """
    address = policy_server.base_url(endpoint)
    body = prompt_logprobs_request(model, [int(token) for token in token_ids])
    after = _held_weights(address, timeout_s)
    for _ in range(MAX_TRIES):
        before = after
        response = _request(f"{address}{policy_server.COMPLETIONS}", timeout_s, body)
        after = _held_weights(address, timeout_s)
        if after == before:
            return Scores(read_prompt_logprobs(response, token_ids), after.version)
    raise version_changed_failure(address, before.name, after.name)


class _HeldWeights(NamedTuple):
    name: str
    version: Version


def _held_weights(address: str, timeout_s: float) -> _HeldWeights:
    body = _request(f"{address}{policy_server.WEIGHT_INFO}", timeout_s)
    try:
        name = str(msgspec.json.decode(body, type=policy_server.WeightInfo).weight_version)
        version = policy_server.parse_weight_version(name)
    except (msgspec.DecodeError, UnicodeDecodeError):
        version = None
    if version is None:
        raise PolicyFailure(
            f"{address} reports no weight version: {body[:100].decode(errors='replace')}",
            hint="Give the server a weight version of the form 'lineage.n', as in '0.12', when its weights change.",
            kind="unknown-version",
            retryable=False,
        )
    return _HeldWeights(name, version)


def _request(url: str, timeout_s: float, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        raise PolicyFailure(
            f"{url} refused ({error.code}): {error.read(300).decode(errors='replace')}",
            kind="request-refused",
            retryable=error.code >= 500,
        ) from error
    except OSError as error:
        raise PolicyFailure(
            f"No response from {url}: {error}.",
            hint="Is the policy server running at that address?",
            kind="unreachable",
            retryable=True,
        ) from error
