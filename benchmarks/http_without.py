"""An orchestrator without one part of its HTTP protocol, to compare with (``benchmarks.bench_http``).

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
"""So much may wait in the transport before an application waits: what one by one needs to be fast."""


def without_direct() -> None:
    """Every request gets a task, and is answered in two messages."""
    OrchestratorApp.direct = lambda self, scope: None  # type: ignore[method-assign]


def without_body_parts() -> None:
    """The buffers of a body are sent one by one."""
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
    """The kernel decides how much is on its way."""
    uvicorn_protocol._bound_send_buffer = lambda transport: None


PARTS = {"direct": without_direct, "body-parts": without_body_parts, "send-buffer": without_send_buffer}

if __name__ == "__main__":
    PARTS[sys.argv.pop(1)]()
    main()
