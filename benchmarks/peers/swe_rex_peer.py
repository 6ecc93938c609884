"""SWE-ReX on this machine: the runtime of its server, called directly instead of over the network."""

from __future__ import annotations

import asyncio
import logging

from protocol import serve
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

PRINT = "/usr/bin/python3 -c 'print(1)'"


def main() -> None:
    logging.disable(logging.CRITICAL)
    loop = asyncio.new_event_loop()
    runtime = LocalRuntime()
    loop.run_until_complete(runtime.create_session(CreateBashSessionRequest()))

    def execute() -> dict[str, float]:
        answer = loop.run_until_complete(runtime.execute(Command(command=["/usr/bin/python3", "-c", "print(1)"])))
        assert answer.stdout == "1\n"
        return {"ok": 1.0}

    def session() -> dict[str, float]:
        answer = loop.run_until_complete(runtime.run_in_session(BashAction(command=PRINT)))
        assert answer.output.strip() == "1"
        return {"ok": 1.0}

    serve({"execute": execute, "session": session})
    loop.run_until_complete(runtime.close())


if __name__ == "__main__":
    main()
