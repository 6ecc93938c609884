"""Policies served over HTTP: each has several servers, and a turn goes to one of them.

* A failure that another server may not have is retried there, within the turn's deadline and under a new id.
* The same server is asked again only if it did not answer or was over its rate limit, a bounded number of times.
* No part of a refused answer is kept; a turn's sample comes from one try, or from the parts of a turn that the engine
  itself interrupted.
* Pauses for new weights do not count against the deadline; they are waiting time.
* Open requests of a server that fails its health probes, or is ejected, move to another server if one is available.
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
from headrace_workers.policies.logprobs import request_logprobs
from headrace_workers.policies.pausable_deadline import Deadline
from headrace_workers.policies.probes import ServerProber
from headrace_workers.policies.router import ServerRouter
from headrace_workers.policies.server_client import HEALTHY_FAILURES, NO_ANSWER, REQUEST_FAULTS, PolicyServerClient
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
"""Limit on parts of one turn. Weights change a few times during a long turn; an engine that aborts more often is
broken."""


class ServedPolicies:
    """All policy servers of a worker, behind one router.

    ``default_endpoints`` serve runs that name none. ``list_servers`` requests the servers of a run from the
    orchestrator; without it, those of the run's spec are used.
    """

    def __init__(
        self,
        *,
        default_endpoints: Sequence[str],
        clock: Callable[[], float],
        list_servers: ListServers | None = None,
    ) -> None:
        self._list_servers = list_servers
        self._pollers: dict[str, ServerListPoller] = {}
        self._default_endpoints = tuple(default_endpoints)
        self._clock = clock
        self._servers: dict[str, PolicyServerClient] = {}
        self._policies: dict[tuple[Any, ...], Policy] = {}
        self._pools: dict[str, ServerPool] = {}
        self.router = ServerRouter(clock)
        self._prober = ServerProber(self.router, self._server, clock)

    def at(self, endpoints: Sequence[str], *, run: str = "", protocol: AnyProtocol = "auto") -> Policy:
        if run and self._list_servers is not None:
            self._poller(run, endpoints, self._list_servers).note_turn()
        key = (tuple(endpoints), run, protocol)
        policy = self._policies.get(key)
        if policy is None:
            pool: ServerPool = self._pollers[run].pool if run in self._pollers else self._fixed_pool(endpoints)
            pool = self._pools.setdefault(pool.name, pool)
            policy = self._policies[key] = ServedPolicy(
                run, pool, protocol, self.router, self._server, self._prober, self._clock
            )
        return policy

    async def score(self, endpoints: Sequence[str], request: ScoreRequest) -> npt.NDArray[np.float32]:
        pool = self._fixed_pool(endpoints)
        self._pools.setdefault(pool.name, pool)
        self._prober.start()
        try:
            async with timeout(request.timeout_s):
                return await request_logprobs(request, pool, self.router, self._server)
        except TimeoutError as error:
            raise PolicyFailure(
                f"{pool.name} returned no logprobs within {request.timeout_s:g} s.", kind="timeout", retryable=True
            ) from error

    async def close(self) -> None:
        """Close every connection; this ends open requests, also at their engines."""
        await self._prober.stop()
        for poller in self._pollers.values():
            await poller.stop()
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    def _poller(self, run: str, endpoints: Sequence[str], ask: ListServers) -> ServerListPoller:
        poller = self._pollers.get(run)
        if poller is None:
            pool = ManagedPool(run, [base_url(address) for address in endpoints], self._clock)
            poller = self._pollers[run] = ServerListPoller(
                run, pool, ask, lambda: self._update_servers(pool), self._clock
            )
        return poller

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

    def _update_servers(self, pool: ManagedPool) -> None:
        for address in pool.ejected():
            if address in self._servers:
                self._servers[address].fail_open_requests("server-ejected")
        self._forget_unused()

    def _forget_unused(self) -> None:
        """Remove servers that no policy uses any more and that have no open request."""
        used = set().union(*(pool.all_addresses() for pool in self._pools.values()))
        self.router.forget_except(used)
        for address in [name for name in self._servers if name not in used and name not in self.router.servers]:
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
    """A policy behind a pool of servers. ``run``: the run that owns the weights; empty for any."""

    def __init__(
        self,
        run: str,
        pool: ServerPool,
        protocol: AnyProtocol,
        router: ServerRouter,
        server: Callable[[str], PolicyServerClient],
        prober: ServerProber,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._pool = pool
        self._protocol: AnyProtocol = protocol
        self._router = router
        self._server = server
        self._prober = prober
        self._clock = clock

    async def sample(self, request: SampleRequest) -> Sample:
        turn = TurnSampling(request, self._pool, self._clock)
        deadline = Deadline(request.timeout_s, turn.paused_s)
        try:
            async with deadline:
                return await self._sample(turn, deadline)
        except TimeoutError as error:
            raise turn.add_servers_to(turn.timeout_failure()) from error
        except PolicyFailure as failure:
            turn.add_servers_to(failure)
            raise

    async def _sample(self, turn: TurnSampling, deadline: Deadline) -> Sample:
        while True:
            address = await self._choose_server(turn)
            try:
                part = await self._try(turn, address, deadline)
            except PolicyFailure as failure:
                await self._recover(turn, address, failure)
                continue
            sample = turn.add(part)
            if sample is not None:
                return sample
            if turn.interruptions >= MAX_INTERRUPTIONS:
                raise PolicyFailure(
                    f"The engine aborted the turn {turn.interruptions} times.", kind="aborted", retryable=True
                )
            if not part.token_ids:
                await turn.pause(BACKOFF_S)

    async def _choose_server(self, turn: TurnSampling) -> str:
        """Choose the server of the next try; wait until one is available."""
        request = turn.request
        while True:
            candidates = turn.untried(self._pool.addresses())
            address = self._router.choose(
                candidates, policy=self._pool.name, group=request.group, episode=request.episode
            )
            if address is not None:
                return address
            if turn.failure is not None and self._pool.addresses():
                raise turn.failure  # every server has failed
            await turn.wait_for_a_server()

    async def _try(self, turn: TurnSampling, address: str, deadline: Deadline) -> Sample:
        """Try one server, and report the result to the router."""
        router = self._router
        server = self._server(address)
        adapter = turn.request.adapter
        name, version = self._pool.adapter(address, adapter) if adapter else ("", None)
        request, request_id = turn.begin(address)
        if name:
            request = msgspec.structs.replace(request, model=name)
        router.sent(address)
        self._prober.start()
        try:
            sample = await server.sample(
                request,
                protocol=self._protocol,
                request_id=request_id,
                can_move=lambda: self._has_other_server(turn, address),
                # An adapter's name at the server contains its run and version; the base may belong to any run.
                run="" if adapter or request.frozen else self._run,
            )
            if version is not None:  # the requested name contains the version
                sample = msgspec.structs.replace(sample, versions=one_version(len(sample.token_ids), version))
            turn.check(sample)
        except PolicyFailure as failure:
            if failure.kind == "unknown-model" and (request.adapter or request.frozen):
                failure.kind, failure.retryable = "adapter-not-loaded", True  # loading, or replaced meanwhile
            if failure.kind in REQUEST_FAULTS | HEALTHY_FAILURES:
                router.released(address)
            else:
                router.failed(address, str(failure), at_once=failure.kind == "connection-refused")
            raise
        except BaseException:
            if deadline.expired:
                turn.timed_out_at = address
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
        if failure.kind in REQUEST_FAULTS:
            raise failure
        if self._has_other_server(turn, address):
            turn.tried.add(address)
        elif failure.kind in NO_ANSWER or failure.kind == "adapter-not-loaded":
            turn.unanswered += 1
            if turn.unanswered == MAX_TRIES:
                raise failure
            await turn.pause(BACKOFF_S * 2 ** (turn.unanswered - 1))
        elif failure.kind == "rate-limited":
            turn.rate_limited += 1
            await turn.pause(min(LONGEST_BACKOFF_S, BACKOFF_S * 2 ** min(turn.rate_limited, 16)))
        else:
            raise failure

    def _has_other_server(self, turn: TurnSampling, address: str) -> bool:
        """Return True if another available server has not failed this turn."""
        return any(
            other != address and self._router.is_available(other) for other in turn.untried(self._pool.addresses())
        )
