"""Policies served over HTTP: each has several servers, and a turn goes to one of them.

* A failure that another server may not have is retried there, within the turn's deadline and under a new id.
* The same server is asked again only if it did not answer or was over its rate limit, a bounded number of times.
* No part of a refused answer is kept; a turn's sample comes from one try, or from the parts of a turn that the engine
  itself interrupted.
* Pauses for new weights do not count against the deadline; they are waiting time.
* A server that fails its health probes, or is ejected, loses its open requests if another server is in.
* Each open request has its own connection, kept for the next one; no request queues for a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.common.timeouts import timeout
from headrace.errors import PolicyFailure
from headrace.wire.policy_server import base_url
from headrace_workers.policies.base import AnyProtocol, Policy, Sample, SampleRequest, ScoreRequest, one_version
from headrace_workers.policies.logprobs import scored
from headrace_workers.policies.pausable_deadline import Deadline
from headrace_workers.policies.probes import ServerProber
from headrace_workers.policies.router import ServerRouter
from headrace_workers.policies.server_client import NO_ANSWER, NOT_ITS_HEALTH, NOT_THE_SERVERS, PolicyServerClient
from headrace_workers.policies.server_list import ListServers, ServerListPoller
from headrace_workers.policies.server_pools import FixedPool, ManagedPool, ServerPool
from headrace_workers.policies.turn import TurnSampling

MAX_TRIES = 3
"""Tries at one server that does not answer, including the first. More would hide a dead server."""

BACKOFF_S = 0.1
"""Pause before the second try at the same server; it doubles. A load balancer restarts within it."""

LONGEST_BACKOFF_S = 5.0
"""The longest pause between tries at a server that is over its rate limit."""

MAX_INTERRUPTIONS = 64
"""Most parts of one turn. Weights change a few times during a long turn; an engine that aborts more often is broken."""


class ServedPolicies:
    """All policy servers of a worker, behind one router.

    ``default_endpoints`` serve runs that name none. ``list_servers`` asks the orchestrator for the servers of a run;
    without it, the run's spec names them.
    """

    def __init__(
        self,
        *,
        default_endpoints: Sequence[str],
        clock: Callable[[], float],
        list_servers: ListServers | None = None,
    ) -> None:
        self._list_servers = list_servers
        self._followers: dict[str, ServerListPoller] = {}
        self._default_endpoints = tuple(default_endpoints)
        self._clock = clock
        self._servers: dict[str, PolicyServerClient] = {}
        self._policies: dict[tuple[Any, ...], Policy] = {}
        self._pools: dict[str, ServerPool] = {}
        self.router = ServerRouter(clock)
        self._watch = ServerProber(self.router, self._server, clock)

    def at(self, endpoints: Sequence[str], *, run: str = "", protocol: AnyProtocol = "auto") -> Policy:
        if run and self._list_servers is not None:
            self._follower(run, endpoints, self._list_servers).used()
        key = (tuple(endpoints), run, protocol)
        policy = self._policies.get(key)
        if policy is None:
            pool = self._pool(endpoints, run)
            pool = self._pools.setdefault(pool.name, pool)
            policy = self._policies[key] = ServedPolicy(
                run, pool, protocol, self.router, self._server, self._watch, self._clock
            )
        return policy

    async def score(self, endpoints: Sequence[str], request: ScoreRequest) -> npt.NDArray[np.float32]:
        pool = self._fixed_pool(endpoints)
        self._pools.setdefault(pool.name, pool)
        self._watch.start()
        try:
            async with timeout(request.timeout_s):
                return await scored(request, pool, self.router, self._server)
        except TimeoutError as error:
            raise PolicyFailure(
                f"{pool.name} returned no logprobs within {request.timeout_s:g} s.", kind="timeout", retryable=True
            ) from error

    async def close(self) -> None:
        """Close every connection; this ends open requests and stops their engines."""
        await self._watch.stop()
        for follower in self._followers.values():
            await follower.stop()
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _follower(self, run: str, endpoints: Sequence[str], ask: ListServers) -> ServerListPoller:
        follower = self._followers.get(run)
        if follower is None:
            pool = ManagedPool(run, [base_url(address) for address in endpoints], self._clock)
            follower = self._followers[run] = ServerListPoller(run, pool, ask, lambda: self._heard(pool), self._clock)
        return follower

    def _pool(self, endpoints: Sequence[str], run: str) -> ServerPool:
        if run in self._followers:
            return self._followers[run].pool
        return self._fixed_pool(endpoints)

    def _fixed_pool(self, endpoints: Sequence[str]) -> ServerPool:
        addresses = list(dict.fromkeys(base_url(address) for address in endpoints or self._default_endpoints))
        if not any(addresses):
            raise PolicyFailure(
                "The policy has no endpoint.",
                hint="Set policy.endpoints in the run spec, or start the worker with --policy-endpoint.",
                kind="no-endpoint",
                retryable=False,
            )
        return FixedPool(addresses)

    def _heard(self, pool: ManagedPool) -> None:
        for address in pool.ejected():
            if address in self._servers:
                self._servers[address].give_up("server-ejected")
        self._tidy()

    def _tidy(self) -> None:
        """Forget servers that no policy uses any more and that have no open request."""
        known = set().union(*(pool.all_addresses() for pool in self._pools.values()))
        self.router.forget(known)
        for address in [name for name in self._servers if name not in known and name not in self.router.servers]:
            self._servers.pop(address).close_connections()

    def stats(self) -> dict[str, float]:
        """Requests and failures of each server so far. Safe to call from any thread."""
        counts: dict[str, float] = {}
        for server in list(self.router.servers.values()):
            counts[f"policy_requests {server.address}"] = float(server.requests)
            counts[f"policy_failures {server.address}"] = float(server.failures)
        return counts

    def _server(self, address: str) -> PolicyServerClient:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = PolicyServerClient(address, self._clock)
        return server


class ServedPolicy:
    """One policy behind a pool of servers. ``run``: the run that owns the weights; empty for any."""

    def __init__(
        self,
        run: str,
        pool: ServerPool,
        protocol: AnyProtocol,
        router: ServerRouter,
        server: Callable[[str], PolicyServerClient],
        watch: ServerProber,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._pool = pool
        self._protocol: AnyProtocol = protocol
        self._router = router
        self._server = server
        self._watch = watch
        self._clock = clock

    async def sample(self, request: SampleRequest) -> Sample:
        turn = TurnSampling(request, self._pool, self._clock)
        deadline = Deadline(request.timeout_s, turn.paused_s)
        try:
            async with deadline:
                return await self._sample(turn, deadline)
        except TimeoutError as error:
            raise turn.named(turn.overdue()) from error
        except PolicyFailure as failure:
            turn.named(failure)
            raise

    async def _sample(self, turn: TurnSampling, deadline: Deadline) -> Sample:
        while True:
            address = await self._take(turn)
            try:
                part = await self._ask(turn, address, deadline)
            except PolicyFailure as failure:
                await self._recover(turn, address, failure)
                continue
            whole = turn.add(part)
            if whole is not None:
                return whole
            if turn.interruptions >= MAX_INTERRUPTIONS:
                raise PolicyFailure(
                    f"The engine aborted the turn {turn.interruptions} times.", kind="aborted", retryable=True
                )
            if not part.token_ids:
                await turn.pause(BACKOFF_S)

    async def _take(self, turn: TurnSampling) -> str:
        """Choose the server to ask next; waits until one is available."""
        request = turn.request
        while True:
            candidates = turn.untried(self._pool.addresses())
            address = self._router.choose(
                candidates, policy=self._pool.name, group=request.group, episode=request.episode
            )
            if address is not None:
                return address
            if turn.failure is not None and self._pool.addresses():
                raise turn.failure  # every server has failed this turn
            await turn.wait_for_a_server()

    async def _ask(self, turn: TurnSampling, address: str, deadline: Deadline) -> Sample:
        """Try one server, and report the result to the router."""
        router = self._router
        server = self._server(address)
        asked = turn.request
        name, version = self._pool.adapter(address, asked.adapter) if asked.adapter else ("", None)
        request, request_id = turn.begin(address)
        if name:
            request = msgspec.structs.replace(request, model=name)
        router.sent(address)
        self._watch.start()
        try:
            sample = await server.sample(
                request,
                protocol=self._protocol,
                request_id=request_id,
                movable=lambda: self._others(turn, address),
                # An adapter's name at the server contains its run and version; the base may belong to any run.
                run="" if asked.adapter or asked.frozen else self._run,
            )
            if version is not None:  # the requested name contains the version
                sample = msgspec.structs.replace(sample, versions=one_version(len(sample.token_ids), version))
            turn.check(sample)
        except PolicyFailure as failure:
            if failure.kind == "unknown-model" and (request.adapter or request.frozen):
                failure.kind, failure.retryable = (
                    "adapter-not-loaded",
                    True,
                )  # it is loading, or was replaced
            if failure.kind in NOT_THE_SERVERS | NOT_ITS_HEALTH:
                router.released(address)
            else:
                router.failed(address, str(failure), at_once=failure.kind == "connection-refused")
            raise
        except BaseException:
            if deadline.expired:
                turn.late = address
                router.failed(address, f"No answer within {turn.request.timeout_s:g} s.")
            else:
                router.released(address)
            raise
        finally:
            turn.end()
        router.answered(address)
        return sample

    async def _recover(self, turn: TurnSampling, address: str, failure: PolicyFailure) -> None:
        """Prepare another try, or raise the failure."""
        turn.failure = failure
        if failure.kind in NOT_THE_SERVERS:
            raise failure
        if self._others(turn, address):
            turn.tried.add(address)
        elif failure.kind in NO_ANSWER or failure.kind == "adapter-not-loaded":
            turn.silences += 1
            if turn.silences == MAX_TRIES:
                raise failure
            await turn.pause(BACKOFF_S * 2 ** (turn.silences - 1))
        elif failure.kind == "rate-limited":
            turn.refusals += 1
            await turn.pause(min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** min(turn.refusals, 16)))
        else:
            raise failure

    def _others(self, turn: TurnSampling, address: str) -> bool:
        """Return whether a server is in that this turn has not tried."""
        return any(other != address and self._router.is_in(other) for other in turn.untried(self._pool.addresses()))
