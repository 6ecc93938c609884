"""The base of all operations: requests with retries.

* Every call is safe to repeat, and is repeated until there is a response.
* A call that changes something is recognized as a repeat by a key: a name in it, or an id that the client made.
* An outage longer than ``retry_for_s`` raises its error, ``Unavailable`` as a rule, with the key of the call.
* A full disk is treated like an outage: the refused call is repeated until the disk accepts data again.

The retry policy is exponential backoff with jitter. Each response ends an outage, so a pull continues for as long as
the service responds now and then, across restarts of the orchestrator.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headrace.client.requests import ApiCall, ApiRequest, Operation, Sleep, check_response, json_reader, request
from headrace.client.responses import read_nothing
from headrace.errors import Conflict, NotFound, ServiceError, StoreError, Unavailable
from headrace.http.problems import GATEWAY_STATUSES

T = TypeVar("T")

log = logging.getLogger("headrace.client.sync_client")

FIRST_DELAY_S = 0.05
"""Delay before the first retry. A restarted listener is back sooner."""

MAX_DELAY_S = 5.0
"""Longest delay between retries: a learner on expensive hardware should not sleep through a recovery."""

MIN_POLL_S = 1.0
"""Shortest long poll, whatever a proxy does."""

EARLY_POLL_DELAY_S = 0.25
"""Delay after a poll that returned early without a result, so that a loop over it does not spin."""


@dataclass(kw_only=True)
class RetryingOperations:
    """Requests with retries, and the state that all operations share. ``clock`` is monotonic, in seconds."""

    retry_for_s: float = 60.0
    poll_s: float = 20.0
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random
    epoch: int = 0

    def call(self, call: ApiCall[T], *, retry_for_s: float | None = None) -> Operation[T]:
        """Send a request until there is a response.

        A ``Conflict`` or ``NotFound`` has ``extra["repeated"] = True`` if an earlier try, whose response was lost, may
        have caused it.
        """
        give_up_at = self.clock() + (self.retry_for_s if retry_for_s is None else retry_for_s)
        delay = FIRST_DELAY_S
        unsure = False
        while True:
            response = yield call.request
            try:
                assert response is not None
                good = check_response(call.request, response, newest_epoch=self.epoch)
                self.epoch = max(self.epoch, good.epoch or 0)
                return call.read(good)
            except (Unavailable, StoreError) as error:
                unsure = unsure or isinstance(error, StoreError) or error.extra.get("outcome") == "unknown"
                pause = delay * (0.5 + self.jitter() / 2)
                if self.clock() + pause > give_up_at:
                    if call.key:
                        error.extra["key"] = call.key
                    raise
                log.info("%s Trying again in %.2f s.", error.detail, pause)
                call = self._fit_wait(call, error)
            except (Conflict, NotFound) as error:
                if unsure:
                    error.extra["repeated"] = True
                raise
            yield Sleep(pause)
            delay = min(2 * delay, MAX_DELAY_S)

    def _fit_wait(self, call: ApiCall[T], error: ServiceError) -> ApiCall[T]:
        """Shorten the wait of a long poll that a proxy ended."""
        wait_s = call.request.wait_s
        if error.extra.get("http_status") not in GATEWAY_STATUSES or wait_s <= MIN_POLL_S:
            return call
        self.poll_s = max(MIN_POLL_S, min(self.poll_s, wait_s / 2))
        return call.waiting(self.poll_s)

    def get(self, kind: type[T], *parts: str) -> Operation[T]:
        """GET ``/v1/<parts>``, which responds with that type as JSON."""
        return self.call(ApiCall(request=request("GET", *parts), read=json_reader(kind)))

    def poll(self, kind: type[T], *parts: str, wait_s: float, **query: Any) -> Operation[T]:
        """GET ``/v1/<parts>`` as a long poll of ``wait_s``."""

        def build(wait_s: float) -> ApiRequest:
            return request("GET", *parts, query={**query, "wait_s": f"{wait_s:g}"}, wait_s=wait_s)

        return self.call(ApiCall(request=build(wait_s), read=json_reader(kind), rebuild=build))

    def post(self, kind: type[T], *parts: str, body: msgspec.Struct | Any, key: str = "") -> Operation[T]:
        """POST the body to ``/v1/<parts>``, which responds with that type as JSON."""
        return self.call(ApiCall(request=request("POST", *parts, body=body), read=json_reader(kind), key=key))

    def command(
        self, method: str, *parts: str, body: msgspec.Struct | None = None, retry_for_s: float | None = None
    ) -> Operation[None]:
        """Send a request whose response has no content."""
        call = ApiCall(request=request(method, *parts, body=body), read=read_nothing)
        return self.call(call, retry_for_s=retry_for_s)

    def delay_next_poll(self, sent_at: float, wait_s: float) -> Operation[None]:
        """Sleep if a poll of ``wait_s``, sent at that time, returned early."""
        if self.clock() - sent_at < min(wait_s, MIN_POLL_S) / 2:
            yield Sleep(min(EARLY_POLL_DELAY_S, wait_s))
