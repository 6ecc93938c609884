"""The state of one turn while it is sampled: its tries, its parts and its time.

* Each try has its own number, whatever server it goes to.
* Parts that the engine interrupted are joined in order: ids, logprobs, version runs. Each has its own seed.
* With ``restart``, and where continuing is impossible (structured outputs, messages instead of ids), parts are dropped.
* Time in which the asked server or all servers were paused is pause; backoff and lack of servers is waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from headrace.errors import PolicyFailure
from headrace.trajectory import VersionRun
from headrace.wire.policy_server import ABORTED
from headrace_workers.policies.base import Sample, SampleRequest, check_sample, part_seed
from headrace_workers.policies.server_pools import ServerPool


class TurnSampling:
    """The state of one call of ``Policy.sample``. ``failure``: of the last try; ``late``: the server asked when the
    time was up."""

    def __init__(self, request: SampleRequest, pool: ServerPool, clock: Callable[[], float]) -> None:
        self.request = request
        self.tried: set[str] = set()
        self.failure: PolicyFailure | None = None
        self.late = ""
        self.silences = 0
        self.refusals = 0
        self.interruptions = 0
        self._pool = pool
        self._clock = clock
        self._parts: list[Sample] = []
        self._tries = 0
        self._servers: list[str] = []
        self._asked = ""
        self._asked_paused_s = 0.0
        self._held_s: float | None = None
        self._paused_s = 0.0
        self._waiting_s = 0.0

    def untried(self, addresses: Iterable[str]) -> list[str]:
        """The given servers that have not failed this turn."""
        if not self.tried:
            return list(addresses)
        return [address for address in addresses if address not in self.tried]

    # Tries

    def begin(self, address: str) -> tuple[SampleRequest, str]:
        """Begin the next try: its request and its id."""
        self._tries += 1
        if address not in self._servers:
            self._servers.append(address)
        self._asked = address
        self._asked_paused_s = self._pool.paused_s(address)
        return self._rest(), f"{self.request.id}-{self._tries}"

    def end(self) -> None:
        """Record the end of the try."""
        self._paused_s += self._asked_pause_s()
        self._asked = ""

    def check(self, sample: Sample) -> None:
        """Raise a PolicyFailure that names the fault of an invalid part."""
        if sample.text is None and (sample.token_ids or sample.finish_reason != ABORTED):
            check_sample(sample, self.request.vocab_size, self._left())

    def add(self, part: Sample) -> Sample | None:
        """Add a part; returns the whole sample after the last one."""
        if part.finish_reason == ABORTED:
            self.interruptions += 1
            goes_on = self.request.policy_spec.interrupted == "continue" and part.prompt is None
            if goes_on and self.request.sampling_spec.structured_outputs is None:
                self._parts += [part] if part.token_ids else []
            if self._left():
                return None
            part = self._parts.pop()
        return self._whole(part)

    def _whole(self, last: Sample) -> Sample:
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
            for run in part.versions:
                if versions and versions[-1].version == run.version:
                    versions.pop()
                versions.append(VersionRun(start + run.end, run.lineage, run.n))
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

    def _left(self) -> int:
        return self.request.max_tokens - sum(len(part.token_ids) for part in self._parts)

    def _rest(self) -> SampleRequest:
        """The request for the rest of the turn."""
        if not self._parts:
            return self.request
        sampling = self.request.sampling
        return msgspec.structs.replace(
            self.request,
            prompt=[*self.request.prompt, *(token for part in self._parts for token in part.token_ids)],
            max_tokens=self._left(),
            sampling=msgspec.structs.replace(sampling, seed=part_seed(sampling.seed, len(self._parts))),
        )

    # Time

    def paused_s(self) -> float:
        """Seconds of pauses so far."""
        paused_s = self._paused_s
        if self._asked:
            paused_s += self._asked_pause_s()
        if self._held_s is not None:
            paused_s += self._pool.held_s() - self._held_s
        return paused_s

    def _asked_pause_s(self) -> float:
        # Our clock may be slightly ahead of the orchestrator's count, and a server may have been removed meanwhile.
        return max(0.0, self._pool.paused_s(self._asked) - self._asked_paused_s)

    async def pause(self, seconds: float) -> None:
        """Wait before another try."""
        await asyncio.sleep(seconds)
        self._waiting_s += seconds

    async def wait_for_a_server(self) -> None:
        """Wait until the set of available servers changes."""
        started_at, self._held_s = self._clock(), self._pool.held_s()
        await self._pool.changed()
        held_s = self._pool.held_s() - self._held_s
        self._held_s = None
        self._paused_s += held_s
        self._waiting_s += max(0.0, self._clock() - started_at - held_s)

    def named(self, failure: PolicyFailure) -> PolicyFailure:
        """Add the servers that were asked to the failure."""
        failure.extra["servers"] = self._servers
        return failure

    def overdue(self) -> PolicyFailure:
        """The failure of a turn that exceeded its deadline."""
        limit = f"within {self.request.timeout_s:g} s"
        if self.failure is not None and (self.refusals or not self.late):
            return self.failure  # a rate limit that lasted is the reason, also if the last try was under way
        if self.late:
            return PolicyFailure(f"{self.late} did not answer {limit}.", kind="timeout", retryable=True)
        return PolicyFailure(
            f"No server took the turn {limit}.", hint=self._pool.unavailable_reason(), kind="no-server", retryable=True
        )
