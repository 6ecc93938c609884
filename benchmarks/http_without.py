"""Orchestrator without one optimization of its HTTP protocol, for ``benchmarks.bench_http``.

python -m benchmarks.http_without direct|body-parts|send-buffer orchestrator --data FOLDER ...
"""

from __future__ import annotations

import sys
from typing import Any

from headrace.server import uvicorn_protocol
from headrace.server.uvicorn_protocol import BodyParts, HttpProtocol
from headrace_orchestrator.api.app import OrchestratorApp
from headrace_orchestrator.cli import main

WRITE_BUFFER_BYTES = 4 << 20
"""Limit of the transport's write buffer: sending buffers one by one is fast only with a large one."""


def without_direct() -> None:
    """Run a task for every request, and answer in two messages."""
    OrchestratorApp.direct = lambda self, scope: None  # type: ignore[method-assign]


def without_body_parts() -> None:
    """Send the buffers of a body one by one."""
    call, connection_made = OrchestratorApp.__call__, HttpProtocol.connection_made

    async def app(self: OrchestratorApp, scope: Any, receive: Any, send: Any) -> None:
        async def one_by_one(message: Any) -> None:
            body = message.get("body")
            if not isinstance(body, BodyParts):
                await send(message)
                return
            for buffer in body.buffers:
                await send({**message, "body": buffer})

        await call(self, scope, receive, one_by_one)

    def connect(self: HttpProtocol, transport: Any) -> None:
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        connection_made(self, transport)

    OrchestratorApp.__call__ = app  # type: ignore[method-assign]
    HttpProtocol.connection_made = connect  # type: ignore[method-assign]


def without_send_buffer() -> None:
    """Leave the size of the send buffer to the kernel."""
    uvicorn_protocol._bound_send_buffer = lambda transport: None


REMOVALS = {"direct": without_direct, "body-parts": without_body_parts, "send-buffer": without_send_buffer}

if __name__ == "__main__":
    REMOVALS[sys.argv.pop(1)]()
    main()
