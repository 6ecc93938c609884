"""What a child of the server of bounded calls does: one call after the other, each in its bound of memory.

* What a call may take of memory is the kernel's bound, and holds for that call.
* A child that came near its bound says that it is not to be used again.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
from typing import Any

NICE = 5
"""Below the worker."""

ALMOST = 0.9
"""Of its memory: a call that took so much may have been refused more, and have hidden that."""


def work(requests: int, answers: int) -> None:
    """Carry calls out until there are no more."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as said:
        for line in lines:
            said.write(packed(carried_out(json.loads(line))) + b"\n")
            said.flush()


def packed(answer: dict[str, Any]) -> bytes:
    """An answer as JSON; of one that JSON cannot hold, why."""
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"raised": f"{type(error).__name__}: {error}", "last": True}).encode()


def carried_out(call: dict[str, Any]) -> dict[str, Any]:
    """What came of a call; with ``last``, whether this process is not to be used again."""
    memory_bytes: int = call["memory_bytes"]
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        module, _, name = call["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))
        try:
            value = function(*call["arguments"])
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    except MemoryError:
        return {"exhausted": "memory", "last": True}
    except RecursionError:
        return {"exhausted": "stack", "last": True}
    except BaseException as error:  # noqa: BLE001 - told to whoever asked
        return {"raised": f"{type(error).__name__}: {error}", "last": True}
    if peak_bytes() > ALMOST * memory_bytes:
        return {"exhausted": "memory", "last": True}
    return {"value": value, "last": False}


def peak_bytes() -> int:
    """The most memory that this process had, as its bound counts it."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmPeak:"):
                return int(line.split()[1]) << 10
    return 0
