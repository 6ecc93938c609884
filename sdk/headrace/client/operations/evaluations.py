"""Operations on evaluations."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headrace.client.operations.groups import TaskLike, plain_task
from headrace.client.operations.retries import RetryingOperations
from headrace.client.requests import Operation
from headrace.wire import messages


class EvaluationOperations(RetryingOperations):
    def evaluation(self, run: str, evaluation: str, wait_s: float = 0.0) -> Operation[messages.EvaluationReply]:
        """The state of an evaluation; waits up to ``wait_s`` for its end. Raises UnknownEvaluation."""
        return self.poll(messages.EvaluationReply, "runs", run, "evaluations", evaluation, wait_s=wait_s)

    def evaluate(
        self,
        run: str,
        tasks: Sequence[TaskLike],
        *,
        episodes_per_task: int = 1,
        version: str = "",
        temperature: float | None = None,
        deadline_s: float = 600.0,
        key: str = "",
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Operation[messages.EvaluationReply]:
        """Run episodes outside of training, pinned to a version (default: the current one).

        ``temperature`` 0 is greedy; None is the run's. The service cancels unfinished episodes after ``deadline_s``.
        ``key`` becomes the evaluation's id; default: a new one. A call with the key of an earlier one, as after a
        restart, gets that evaluation. With ``wait`` this returns when the evaluation is finished, or after
        ``timeout_s``: then check ``finished``.
        """
        body = messages.EvaluationRequest(
            tasks=[plain_task(task) for task in tasks],
            episodes_per_task=episodes_per_task,
            version=version,
            temperature=temperature,
            deadline_s=deadline_s,
            key=key or uuid.uuid4().hex,
        )
        deadline = None if timeout_s is None else self.clock() + timeout_s
        reply = yield from self.post(messages.EvaluationReply, "runs", run, "evaluations", body=body, key=body.key)
        while wait and not reply.finished:
            sent_at = self.clock()
            if deadline is not None and sent_at >= deadline:
                break
            wait_s = self.poll_s if deadline is None else min(self.poll_s, deadline - sent_at)
            reply = yield from self.evaluation(run, reply.evaluation, wait_s)
            if not reply.finished:
                yield from self.delay_next_poll(sent_at, wait_s)
        return reply
