"""Bounds of values that are accepted, so that whatever is accepted can be served, stored, exported and fetched.

* A value outside of its bounds is refused where it enters; data that an earlier version accepted are still read.
* Data in a record is nested so little, and of such types, that every format can hold it.
* A text is valid Unicode without control characters, so that it fits a line of a listing and every format.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

MAX_EXACT = 1 << 53
"""Largest size in bytes or tokens: a float64, and so every reader of JSON, holds it exactly."""

MAX_SPEC_BYTES = 8 << 20
"""Most bytes of a run spec as JSON: a list of some ten thousand tasks with their dataset rows. Reading it takes a
service less than a second, off its event loop."""

MAX_COUNT = (1 << 31) - 1
"""Largest count: the product of two counts fits in 63 bits."""

MIN_SECONDS, MAX_SECONDS = 1e-3, 1e9
"""Shortest and longest duration in seconds: one that a timer can tell from none, and 31 years."""

MIN_LEASE_S = 0.1
"""Shortest term of a lease in seconds: shorter ones cost an idle service more than its work."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
"""Bounds of a temperature other than 0: engines raise lower ones to 0.01, and above 100 every token is as likely."""

MAX_LABEL = 200
"""Most characters of a name or label."""

MAX_REFERENCE = 4096
"""Most characters of a path, an address or the name of a model: the longest path of the system."""

MAX_ENTRIES = 1000
"""Most entries of a list or map of names in a spec or a message."""

MAX_NESTING = 64
"""Deepest nesting of data for an environment: more than any real data, and safe for every JSON reader."""

MAX_RECORD_NESTING = 256
"""Deepest nesting of data in a record, which a policy may have written: every reader of JSON can read it."""

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_CONTROL_OR_LINE_BREAK = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def require_text(value: str, least: int = 1, most: int = MAX_LABEL, *, lines: bool = False) -> None:
    """Raise ValueError unless the text has ``least`` to ``most`` characters and no control character."""
    if not least <= len(value) <= most:
        raise ValueError(f"it has {len(value)} characters; allowed are {least} to {most}")
    if (_CONTROL if lines else _CONTROL_OR_LINE_BREAK).search(value):
        raise ValueError(f"{value[:MAX_LABEL]!r} has control characters or lone surrogates")


def require_plain(value: list[Any] | dict[str, Any], nesting: int) -> None:
    """Raise ValueError unless the value can be written as JSON and is at most that deep."""
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is not plain JSON data with integers of 64 bits: {error}") from error
    # Few brackets cannot be nested deeply; those inside of texts only cost a closer look.
    if text.count(b"[") + text.count(b"{") > nesting and _depth(value, nesting) > nesting:
        raise ValueError(f"it is nested deeper than {nesting} levels")


def _depth(value: Any, limit: int) -> int:
    """The depth of nested lists and dicts, counted up to one above the limit."""
    level, depth = [value], 0
    while level and depth <= limit:
        depth += 1
        inside = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [item for items in inside for item in items if isinstance(item, dict | list | tuple)]
    return depth
