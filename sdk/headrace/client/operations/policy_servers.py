"""Operations on the policy servers of a run."""

from __future__ import annotations

from headrace.client.operations.retries import RetryingOperations
from headrace.client.requests import Operation
from headrace.errors import UnknownServer
from headrace.wire import messages


class PolicyServerOperations(RetryingOperations):
    def servers(
        self, run: str, *, revision: int | None = None, wait_s: float = 0.0
    ) -> Operation[messages.PolicyServersReply]:
        """The run's policy servers and their states.

        With the ``revision`` of an earlier reply it waits up to ``wait_s`` for a change.
        """
        return self.poll(messages.PolicyServersReply, "runs", run, "servers", wait_s=wait_s, revision=revision)

    def add_server(self, run: str, address: str) -> Operation[None]:
        """Add a policy server to the run, or end its drain."""
        return self.command("POST", "runs", run, "servers", body=messages.PolicyServerRequest(address=address))

    def drain_server(self, run: str, address: str) -> Operation[None]:
        """Drain a policy server: it finishes its requests and takes no new ones. Raises UnknownServer."""
        body = messages.PolicyServerRequest(address=address)
        return self.command("POST", "runs", run, "servers", "drain", body=body)

    def remove_server(self, run: str, address: str) -> Operation[None]:
        """Remove a policy server from the run. Raises UnknownServer."""
        try:
            yield from self.command(
                "DELETE", "runs", run, "servers", body=messages.PolicyServerRequest(address=address)
            )
        except UnknownServer as error:
            if not error.extra.get("repeated"):
                raise
