"""Exceptions of environments as text: the type, the message and the last frames.

* The text is Unicode and bounded: the middle of a long message is left out.
"""

from __future__ import annotations

import traceback

from headrace_workers.unicode_text import as_unicode

LAST_FRAMES = 3
"""Frames of a traceback in a failure: enough to find the line, short enough to store."""

MAX_MESSAGE = 2000
"""Limit on characters of an error's message. A message may contain whatever a policy wrote."""


def describe_error(error: BaseException) -> str:
    """Format an error with its type, its message and the last frames of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-LAST_FRAMES:]
    places = [f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in reversed(frames)]
    text = as_unicode(f"{type(error).__name__}: {shortened(_text_of(error))}")
    return f"{text} [at {' < '.join(places)}]" if places else text


def shortened(message: str) -> str:
    """Leave out the middle of a long message."""
    if len(message) <= MAX_MESSAGE:
        return message
    part = MAX_MESSAGE // 2
    return f"{message[:part]} [… {len(message) - 2 * part} characters …] {message[-part:]}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - raised by the error's own code; it is described without its text
        return f"(its message cannot be formatted: {type(another).__name__})"
