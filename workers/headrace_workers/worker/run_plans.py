"""The plans of the runs that a worker serves.

* A run's spec is fetched once and kept.
* What a plan reads of files and of the model hub it reads on a thread; episodes go on meanwhile.
* While the orchestrator is away, an attempt waits for its spec; what it cannot have is a failure with a kind.
"""

from __future__ import annotations

import asyncio

from headrace.errors import InfrastructureFailure, RequestError, ServiceError
from headrace_workers.episode import RunPlan, make_plan
from headrace_workers.worker.backoff import Backoff
from headrace_workers.worker.connection import OrchestratorConnection


class RunPlans:
    """RunPlans by run."""

    def __init__(self, connection: OrchestratorConnection) -> None:
        self._connection = connection
        self._plans: dict[str, RunPlan] = {}
        self._fetching: dict[str, asyncio.Lock] = {}

    def get(self, run: str) -> RunPlan | None:
        """The plan of a run that was served before."""
        return self._plans.get(run)

    async def fetch(self, run: str) -> RunPlan:
        """The plan of a run. Raises InfrastructureFailure."""
        async with self._fetching.setdefault(run, asyncio.Lock()):
            plan = self._plans.get(run)
            if plan is None:
                plan = self._plans[run] = await self._fetch(run)
            return plan

    async def _fetch(self, run: str) -> RunPlan:
        backoff = Backoff()
        while True:
            try:
                spec = await self._connection.run_spec(run)
            except RequestError as error:
                raise InfrastructureFailure(
                    f"The spec of run {run!r} cannot be had: {error}", kind="no-run-spec", retryable=True
                ) from error
            except ServiceError as error:
                await backoff.pause(error)
            else:
                return await asyncio.to_thread(make_plan, spec)
