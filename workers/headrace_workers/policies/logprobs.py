"""Requests for the logprobs of given tokens, over the servers of a policy.

* A failure that another server may not have is retried there; the same server is asked again if weights changed
  meanwhile or if it did not answer, a bounded number of times.
* A failure is raised; a missing logprob is never replaced by another number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.errors import PolicyFailure
from headrace_workers.policies.base import ScoreRequest
from headrace_workers.policies.router import ServerRouter
from headrace_workers.policies.server_client import HEALTHY_FAILURES, NO_ANSWER, REQUEST_FAULTS, PolicyServerClient
from headrace_workers.policies.server_pools import ServerPool

MAX_TRIES = 5
"""Limit on requests, over all servers."""

BACKOFF_S = 0.1
"""Pause before the same server is asked again; it doubles."""

RETRYABLE_HERE = NO_ANSWER | {"version-changed", "rate-limited"}
"""Failure kinds after which the same server may be asked again."""


async def request_logprobs(
    request: ScoreRequest, pool: ServerPool, router: ServerRouter, server: Callable[[str], PolicyServerClient]
) -> npt.NDArray[np.float32]:
    """Logprobs f32[n] from the first server that returns them. Raises PolicyFailure."""
    tried: set[str] = set()
    number = 0
    while True:
        number += 1
        candidates = [address for address in pool.addresses() if address not in tried]
        address = router.choose(candidates, policy=pool.name, group=request.id, episode=request.id)
        assert address is not None  # the last server is never added to `tried`
        try:
            return await _ask(request, f"{request.id}-{number}", address, router, server)
        except PolicyFailure as failure:
            if failure.kind in REQUEST_FAULTS or number == MAX_TRIES:
                raise
            if len(candidates) > 1:
                tried.add(address)
            elif failure.kind in RETRYABLE_HERE:
                await asyncio.sleep(BACKOFF_S * 2 ** (number - 1))
            else:
                raise


async def _ask(
    request: ScoreRequest,
    request_id: str,
    address: str,
    router: ServerRouter,
    server: Callable[[str], PolicyServerClient],
) -> npt.NDArray[np.float32]:
    router.sent(address)
    try:
        scores = await server(address).score(request, request_id=request_id)
    except PolicyFailure as failure:
        if failure.kind in REQUEST_FAULTS | HEALTHY_FAILURES:
            router.released(address)
        else:
            router.failed(address, str(failure), at_once=failure.kind == "connection-refused")
        raise
    except BaseException:
        router.released(address)
        raise
    router.answered(address)
    return scores
