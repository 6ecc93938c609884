"""Child process of the call server: runs calls one after another, each within its memory limit.

* The kernel enforces the memory limit of a call, for that call only.
* A child that came near its memory limit reports that it must not be reused.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
from typing import Any

NICENESS = 5
"""Lower priority than the worker."""

NEAR_LIMIT_SHARE = 0.9
"""Share of the memory limit above which a call counts as out of memory: an allocation beyond it may have failed
silently."""


def serve_calls(requests: int, answers: int) -> None:
    """Run calls until the request pipe closes."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as output:
        for line in lines:
            output.write(encode_answer(run_call(json.loads(line))) + b"\n")
            output.flush()


def encode_answer(answer: dict[str, Any]) -> bytes:
    """Encode an answer as JSON, or an error if its value is not JSON-serializable."""
    try:
        return json.dumps(answer).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps({"raised": f"{type(error).__name__}: {error}", "last": True}).encode()


def run_call(call: dict[str, Any]) -> dict[str, Any]:
    """Run one call and return its answer. ``last`` is true if this process must not be reused."""
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
    except BaseException as error:  # noqa: BLE001 - reported to the caller
        return {"raised": f"{type(error).__name__}: {error}", "last": True}
    if peak_bytes() > NEAR_LIMIT_SHARE * memory_bytes:
        return {"exhausted": "memory", "last": True}
    return {"value": value, "last": False}


def peak_bytes() -> int:
    """Peak address space of this process, as its memory limit counts it."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmPeak:"):
                return int(line.split()[1]) << 10
    return 0
