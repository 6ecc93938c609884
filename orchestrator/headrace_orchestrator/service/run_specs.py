"""Specs of runs as bytes: as a learner sends them, and as they are kept in memory.

* A spec above ``MAX_SPEC_BYTES`` is refused before it is read.
* A spec may be read and encoded in a thread: that of a long list takes a good part of a second.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.bounds import MAX_SPEC_BYTES
from headrace.errors import InvalidRequest, InvalidRunSpec
from headrace.runspec import RunSpec, parse_run_spec


def read_new_spec(body: bytes) -> RunSpec:
    """Parse the spec of a new run. Raises InvalidRunSpec, and InvalidRequest if it is not a JSON object."""
    if len(body) > MAX_SPEC_BYTES:
        raise InvalidRunSpec(
            f"The run spec has {len(body)} bytes; allowed are {MAX_SPEC_BYTES}.",
            hint="Submit the tasks of a longer list as groups, in several requests (`Client.submit_groups`).",
            max_bytes=MAX_SPEC_BYTES,
        )
    try:
        value = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not a run spec: {error}.", hint="/docs shows its schema.") from error
    return parse_run_spec(value)


def plain_spec(encoded: bytes, *, tasks: bool) -> dict[str, Any]:
    """A spec as plain values; ``tasks``: with its fixed list."""
    spec: dict[str, Any] = msgspec.msgpack.decode(encoded)
    if not tasks and spec.get("tasks") is not None:
        spec["tasks"] = []
    return spec
