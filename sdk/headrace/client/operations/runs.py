"""Operations on runs, the service and its workers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from headrace.client.operations.retries import RetryingOperations
from headrace.client.requests import ApiCall, Operation, request
from headrace.client.responses import read_nothing
from headrace.errors import RunExists
from headrace.runspec import RunSpec, parse_run_spec, read_run_spec
from headrace.wire import messages


class RunOperations(RetryingOperations):
    def create_run(self, spec: RunSpec | Mapping[str, Any], *, exist_ok: bool = False) -> Operation[messages.RunStatus]:
        """Create a run. With ``exist_ok`` it may exist with the same spec. Raises RunExists, InvalidRunSpec."""
        parsed = spec if isinstance(spec, RunSpec) else parse_run_spec(spec)
        body = parsed.model_dump(mode="json", exclude_unset=True)
        try:
            return (yield from self.post(messages.RunStatus, "runs", body=body))
        except RunExists as error:
            if not (exist_ok or error.extra.get("repeated")):
                raise
            existing = yield from self.run(parsed.name)
            other = read_run_spec(existing.spec)
            if other != parsed:
                fields = [name for name in type(parsed).model_fields if getattr(other, name) != getattr(parsed, name)]
                raise RunExists(
                    f"Run {parsed.name!r} exists with another spec: {', '.join(fields)} differ.",
                    hint="The spec of a run never changes: choose another name.",
                ) from error
            return existing

    def runs(self) -> Operation[list[messages.RunStatus]]:
        """The status of all runs."""
        return self.get(list[messages.RunStatus], "runs")

    def run(self, run: str) -> Operation[messages.RunStatus]:
        """The status of a run. Raises UnknownRun."""
        return self.get(messages.RunStatus, "runs", run)

    def close_run(self, run: str) -> Operation[None]:
        """Close a run: admit no more groups, and cancel the episodes that are queued or at workers."""
        return self.command("POST", "runs", run, "close")

    def status(self) -> Operation[messages.ServiceStatus]:
        """The status of the service, its runs and its workers."""
        return self.get(messages.ServiceStatus, "status")

    def drain_worker(self, worker: str) -> Operation[None]:
        """Drain a worker: it gets no new episodes, and exits when its current ones are over."""
        key = uuid.uuid4().hex
        drain = request("POST", "workers", worker, "drain", query={"key": key})
        return self.call(ApiCall(request=drain, read=read_nothing, key=key))
