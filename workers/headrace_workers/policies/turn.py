"""The state of one turn while it is sampled: its tries, its parts and its time.

* Each try has its own number, at any server.
* Parts that the engine interrupted are joined in order: ids, logprobs, version runs. Each has its own seed.
* With ``restart``, and if continuing is impossible (structured outputs, messages instead of ids), parts are dropped.
* Time while the server of the try, or every server, is paused counts as paused; backoff and time without a server count
  as waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from headrace.errors import PolicyFailure
from headrace.trajectory import VersionRun
from headrace.wire.policy_server import ABORTED
from headrace_workers.policies.base import Sample, SampleRequest, append_versions, check_sample, part_seed
from headrace_workers.policies.server_pools import ServerPool


class TurnSampling:
    """The state of one call of ``Policy.sample``. ``failure``: the failure of the last try; ``timed_out_at``: the
    server of the try that the deadline ended."""

    def __init__(self, request: SampleRequest, pool: ServerPool, clock: Callable[[], float]) -> None:
        self.request = request
        self.tried: set[str] = set()
        self.failure: PolicyFailure | None = None
        self.timed_out_at = ""
        self.unanswered = 0
        self.rate_limited = 0
        self.interruptions = 0
        self._pool = pool
        self._clock = clock
        self._parts: list[Sample] = []
        self._tries = 0
        self._servers: list[str] = []
        self._address = ""
        self._paused_before_s = 0.0
        self._all_paused_before_s: float | None = None
        self._paused_s = 0.0
        self._waiting_s = 0.0

    def untried(self, addresses: Iterable[str]) -> list[str]:
        """The given servers that have not failed in this turn."""
        if not self.tried:
            return list(addresses)
        return [address for address in addresses if address not in self.tried]

    # Tries

    def begin(self, address: str) -> tuple[SampleRequest, str]:
        """Begin the next try; return its request and its id."""
        self._tries += 1
        if address not in self._servers:
            self._servers.append(address)
        self._address = address
        self._paused_before_s = self._pool.paused_s(address)
        return self._remaining_request(), f"{self.request.id}-{self._tries}"

    def end(self) -> None:
        """Record the end of the try."""
        self._paused_s += self._try_paused_s()
        self._address = ""

    def check(self, sample: Sample) -> None:
        """Raise a PolicyFailure that names the fault of an invalid part."""
        if sample.text is None and (sample.token_ids or sample.finish_reason != ABORTED):
            check_sample(sample, self.request.vocab_size, self._tokens_left())

    def add(self, part: Sample) -> Sample | None:
        """Add a part; return the joined sample after the last one."""
        if part.finish_reason == ABORTED:
            self.interruptions += 1
            can_continue = self.request.policy_spec.interrupted == "continue" and part.prompt is None
            if can_continue and self.request.sampling_spec.structured_outputs is None:
                self._parts += [part] if part.token_ids else []
            if self._tokens_left():
                return None
            part = self._parts.pop()
        return self._join(part)

    def _join(self, last: Sample) -> Sample:
        parts = [*self._parts, last]
        reason = "length" if last.finish_reason == ABORTED else last.finish_reason
        waiting_s = self._waiting_s + self._paused_s
        if len(parts) == 1:
            return msgspec.structs.replace(
                last, finish_reason=reason, servers=self._servers, waiting_s=waiting_s, paused_s=self._paused_s
            )
        ends: list[int] = []
        versions: list[VersionRun] = []
        for part in parts:
            start = ends[-1] if ends else 0
            append_versions(versions, part.versions, start)
            ends.append(start + len(part.token_ids))
        return Sample(
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[value for part in parts for value in part.logprobs],
            finish_reason=reason,
            versions=versions,
            continued=ends[:-1],
            seen=parts[0].seen,
            servers=self._servers,
            waiting_s=waiting_s,
            paused_s=self._paused_s,
        )

    def _tokens_left(self) -> int:
        return self.request.max_tokens - sum(len(part.token_ids) for part in self._parts)

    def _remaining_request(self) -> SampleRequest:
        """The request for the rest of the turn."""
        if not self._parts:
            return self.request
        sampling = self.request.sampling
        return msgspec.structs.replace(
            self.request,
            prompt=[*self.request.prompt, *(token for part in self._parts for token in part.token_ids)],
            max_tokens=self._tokens_left(),
            sampling=msgspec.structs.replace(sampling, seed=part_seed(sampling.seed, len(self._parts))),
        )

    # Time

    def paused_s(self) -> float:
        """Seconds of pauses so far."""
        paused_s = self._paused_s
        if self._address:
            paused_s += self._try_paused_s()
        if self._all_paused_before_s is not None:
            paused_s += self._pool.all_paused_s() - self._all_paused_before_s
        return paused_s

    def _try_paused_s(self) -> float:
        # The clock may be slightly ahead of the orchestrator's count, and a server may have been removed meanwhile.
        return max(0.0, self._pool.paused_s(self._address) - self._paused_before_s)

    async def pause(self, seconds: float) -> None:
        """Wait before another try."""
        await asyncio.sleep(seconds)
        self._waiting_s += seconds

    async def wait_for_a_server(self) -> None:
        """Wait until the set of available servers changes."""
        started_at, self._all_paused_before_s = self._clock(), self._pool.all_paused_s()
        await self._pool.changed()
        paused_s = self._pool.all_paused_s() - self._all_paused_before_s
        self._all_paused_before_s = None
        self._paused_s += paused_s
        self._waiting_s += max(0.0, self._clock() - started_at - paused_s)

    def add_servers_to(self, failure: PolicyFailure) -> PolicyFailure:
        """Add the servers of all tries to the failure."""
        failure.extra["servers"] = self._servers
        return failure

    def timeout_failure(self) -> PolicyFailure:
        """The failure of a turn that exceeded its deadline."""
        limit = f"within {self.request.timeout_s:g} s"
        if self.failure is not None and (self.rate_limited or not self.timed_out_at):
            return self.failure  # a persistent rate limit is the reason, even if another try was open
        if self.timed_out_at:
            return PolicyFailure(f"{self.timed_out_at} did not answer {limit}.", kind="timeout", retryable=True)
        return PolicyFailure(
            f"No server was available {limit}.", hint=self._pool.unavailable_reason(), kind="no-server", retryable=True
        )
