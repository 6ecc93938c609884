"""The weight version that an endpoint confirms before and after each call (invariant 6).

* A call is bracketed by the versions that its endpoint confirmed before and after it.
* If the two differ, the lower one covers the call.
* One request is open at a time; all calls that ended before it was sent share its answer.
* While new weights are being loaded, the version before covers the samples.
* An unreadable version is a failure, never a guess. vLLM's initial ``default`` counts as 0.0.
* Weights of another run are a failure, at any version: both runs count from 0.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.errors import PolicyFailure
from headrace.trajectory import Version
from headrace.wire.policy_server import name_before_load, parse_weight_version, run_of_weight_version

FRESH_S = 0.05
"""Age up to which a confirmation still counts as "before". Under load confirmations are always younger; after a pause
they are requested again, so that the first calls after new weights are not attributed to the old ones."""


def read_version(text: object, run: str = "") -> Version:
    """Parse the version that an endpoint reports; without ``run`` it may be any run's. Raises PolicyFailure
    ``unknown-version`` or ``weights-of-another-run``."""
    version = parse_weight_version(str(text), run)
    if version is None and parse_weight_version(str(text)) is not None:
        raise PolicyFailure(
            f"The endpoint has weights of run {run_of_weight_version(str(text))}: it reports {text!r}.",
            hint="`headrace servers` shows the run that loads weights into a server. Give each run its own servers.",
            kind="weights-of-another-run",
            retryable=True,
        )
    if version is None:
        raise PolicyFailure(
            f"The endpoint reports the weights {text!r}, which is not a version.",
            hint="Give the server a weight version of the form 'lineage.n', as in '0.12', when its weights change.",
            kind="unknown-version",
            # After a load that is pending or has failed, the server is repaired or ejected.
            retryable=name_before_load(str(text)) != str(text),
        )
    return version


def confirmed_name(text: object) -> str:
    """The name of the weights that cover everything an endpoint has sampled so far. While it loads new weights it does
    not sample, so these are the previous weights. Raises PolicyFailure ``unknown-version``."""
    name = name_before_load(str(text))
    read_version(name)
    return name


class Confirmations:
    """The weight names that one endpoint has confirmed. ``request_name`` requests the current one; ``clock`` is
    monotonic, in seconds."""

    def __init__(self, request_name: Callable[[], Awaitable[str]], clock: Callable[[], float]) -> None:
        self._request_name = request_name
        self._clock = clock
        self.last_name: str | None = None
        """The last confirmed name, of any age."""
        self._last_at = 0.0
        self._current: asyncio.Task[str] | None = None
        self._next: asyncio.Task[str] | None = None

    def learn(self, name: str) -> None:
        """Record a confirmed name."""
        self.last_name = name
        self._last_at = self._clock()

    async def before(self) -> str:
        """A name confirmed before the call that follows."""
        if self.last_name is not None and self._clock() - self._last_at <= FRESH_S:
            return self.last_name
        return await asyncio.shield(self._current or self._start_next())

    async def after(self) -> str:
        """A name confirmed by a request that is sent after this call."""
        return await asyncio.shield(self._start_next())

    def _start_next(self) -> asyncio.Task[str]:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._confirm(self._current))
            # If every caller is cancelled, the error must still be retrieved.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._next

    async def _confirm(self, previous: asyncio.Task[str] | None) -> str:
        if previous is not None:
            await asyncio.wait([previous])
        self._current, self._next = self._next, None
        try:
            name = await self._request_name()
            self.learn(name)
            return name
        finally:
            self._current = None
