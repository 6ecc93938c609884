"""Rules for when a learner counts as silent.

* A learner without a batch that has sent nothing for a batch lease is silent.
"""

from __future__ import annotations

from headrace.runspec import RunSpec
from headrace.wire.messages import RunStatus

_BATCH_LEASE_S: float = RunSpec.model_fields["batch_lease_s"].default


def learner_is_silent(run: RunStatus) -> bool:
    """Return True if the last message of the run's learner is outdated. A learner that waits or has a batch is alive:
    otherwise its connection or its batch lease would end."""
    if run.learner_waiting or run.batches_open:
        return False
    lease_s: float = run.spec.get("batch_lease_s", _BATCH_LEASE_S)
    return run.learner_doing_s > lease_s
