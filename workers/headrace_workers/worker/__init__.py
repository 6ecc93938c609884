"""The worker process: leases attempts, runs episodes, submits records, sends heartbeats."""

from headrace_workers.worker.worker import Worker, WorkerSettings

__all__ = ["Worker", "WorkerSettings"]
