"""Cache of the plans of a worker's runs.

* A run's spec is fetched once and kept.
* A plan reads files and the model hub on a thread; episodes continue meanwhile.
* While the orchestrator is unavailable, an attempt waits for its spec; a refused request for it is a failure.
"""

from __future__ import annotations

import asyncio

from headrace.errors import InfrastructureFailure, RequestError, ServiceError
from headrace_workers.episode import RunPlan, make_plan
from headrace_workers.worker.backoff import Backoff
from headrace_workers.worker.connection import OrchestratorConnection


class RunPlans:
    """Plans by run."""

    def __init__(self, connection: OrchestratorConnection) -> None:
        self._connection = connection
        self._plans: dict[str, RunPlan] = {}
        self._fetching: dict[str, asyncio.Lock] = {}

    def get(self, run: str) -> RunPlan | None:
        """Return the plan of a run, if it is cached."""
        return self._plans.get(run)

    async def fetch(self, run: str) -> RunPlan:
        """Return the plan of a run, fetched if needed. Raises InfrastructureFailure."""
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
                    f"The spec of run {run!r} cannot be fetched: {error}", kind="no-run-spec", retryable=True
                ) from error
            except ServiceError as error:
                await backoff.pause(error)
            else:
                return await asyncio.to_thread(make_plan, spec)
