"""The worker process: lease, run, submit, heartbeat."""

from headrace_workers.worker.worker import Worker, WorkerSettings

__all__ = ["Worker", "WorkerSettings"]
