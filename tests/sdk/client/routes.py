"""Routes of the client tests, and responses of the stub server."""

from __future__ import annotations

from typing import Any

from headrace.wire import messages

PULL = "POST /v1/runs/guess/pull"
DOING = "POST /v1/runs/guess/doing"
ACK = "POST /v1/runs/guess/batches/batch-1/ack"
COLLECTING = messages.Reason(code="collecting", message="3 of 8 groups are complete.")
EMPTY = messages.EmptyReply(epoch=1, reasons=[COLLECTING])
FINISHED = messages.EmptyReply(epoch=1, reasons=[messages.Reason(code="closed", message="Closed.")], finished=True)
SPEC: dict[str, Any] = {"name": "guess", "environments": [{"id": "game:GuessTheNumber-v0-hard"}]}


def run_status(**fields: Any) -> messages.RunStatus:
    defaults: dict[str, Any] = {
        "name": "guess",
        "state": "active",
        "version": "0.3",
        "spec": SPEC,
        "groups": messages.GroupCounts(),
        "credit": 0,
        "in_flight": 0,
        "queued": 0,
        "leased": 0,
        "episodes": {},
        "batches_acked": 0,
        "batches_open": 0,
        "learner_doing": "",
        "learner_doing_s": -1.0,
        "learner_waiting": False,
        "reasons": [],
    }
    return messages.RunStatus(**{**defaults, **fields})
