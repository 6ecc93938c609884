"""When a worker or a learner counts as silent.

* A worker not heard of for half a minute is silent.
* A learner that holds no batch is silent once a batch lease has passed without a word.
"""

from __future__ import annotations

from headrace.runspec import RunSpec
from headrace.wire.messages import RunStatus, WorkerStatus

SILENT_S = 30.0
"""Workers speak every few seconds, also when they have nothing to do; after this long one has probably ended."""

_BATCH_LEASE_S: float = RunSpec.model_fields["batch_lease_s"].default


def is_silent(worker: WorkerStatus) -> bool:
    """Whether the worker has not been heard of for too long to call it well."""
    return worker.seen_s > SILENT_S


def learner_is_silent(run: RunStatus) -> bool:
    """Whether what the run's learner said last is too old to be true still. One that waits or holds a batch is there:
    both end by themselves when it is not."""
    if run.learner_waiting or run.batches_open:
        return False
    lease_s: float = run.spec.get("batch_lease_s", _BATCH_LEASE_S)
    return run.learner_doing_s > lease_s
