"""The worker as a process: event loop, signals, exit code.

* SIGTERM and SIGINT stop it gracefully; a second one makes it return its attempts at once.
* Its soft limit of descriptors is raised to the hard one: every slot may have a connection to a policy server.
* It exits with 0 if every record was submitted and the worker had no defect, else with 1.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Sequence

import uvloop

from headrace.common.ids import new_id
from headrace.environment import registered
from headrace.server.descriptors import raise_descriptor_limit
from headrace_workers.episode import EnvironmentProcesses, EnvironmentThreads, EpisodeTools
from headrace_workers.policies import PolicySource, ServedPolicies, load_in_process_policy
from headrace_workers.sandboxes import WorkerSandbox
from headrace_workers.worker.connection import EpochFence, OrchestratorConnection
from headrace_workers.worker.logs import logger
from headrace_workers.worker.worker import Worker, WorkerSettings

YOUNG_OBJECTS = 50_000
"""Allocations between collections of young objects. Records have no cycles, so little is collected; the default of 700
costs about 5 % of a busy worker's time."""


def run_worker(settings: WorkerSettings, *, policy_endpoints: Sequence[str] = (), policy: str = "") -> int:
    """Run a worker until it is stopped; return its exit code. ``policy``: ``module:factory`` of an in-process one."""
    raise_descriptor_limit()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    return uvloop.run(_run(settings, policy_endpoints, policy))


async def _run(settings: WorkerSettings, policy_endpoints: Sequence[str], policy: str) -> int:
    connection = OrchestratorConnection(
        settings.orchestrator, worker=settings.name, token=settings.token, fence=EpochFence()
    )
    policies: PolicySource = (
        load_in_process_policy(policy)
        if policy
        else ServedPolicies(
            default_endpoints=policy_endpoints,
            clock=time.monotonic,
            list_servers=connection.servers,
        )
    )
    tools = EpisodeTools(
        worker=settings.name,
        policies=policies,
        threads=EnvironmentThreads(time.monotonic),
        clock=time.monotonic,
        new_id=new_id,
        sandbox=WorkerSandbox(settings.sandbox),
        processes=EnvironmentProcesses(settings.imports),
    )
    worker = Worker(settings, tools)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    logger().info(
        "worker starts",
        worker=settings.name,
        pool=settings.pool,
        slots=settings.slots,
        environments=len(registered()),
    )
    try:
        ended_well = await worker.run()
    finally:
        await tools.sandbox.close()
        await tools.calls.close()
        await tools.processes.close()
        await policies.close()
        await connection.close()
        tools.threads.close()
    logger().info("worker ends", worker=settings.name, ended_well=ended_well)
    return 0 if ended_well else 1
