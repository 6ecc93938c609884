"""uvicorn's HTTP protocol, with fewer copies of what is received.

* A body that comes in one part is handed on as the parser made it, without a copy.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class ReceivingProtocol(HttpToolsProtocol):
    """uvicorn adds what it receives to a ``bytearray``, and makes bytes of that: two copies."""

    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            self.cycle.body = b""  # type: ignore[assignment]  # adding to no bytes copies nothing
        super().on_body(body)
