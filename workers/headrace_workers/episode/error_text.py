"""Exceptions of environments as text: the type, the message and the last frames."""

from __future__ import annotations

import traceback

LAST_FRAMES = 3
"""Frames of a traceback in a failure: enough to find the line, short enough to store."""


def describe_error(error: BaseException) -> str:
    """Format an error with its type, its message and the last frames of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-LAST_FRAMES:]
    places = [f"{frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno})" for frame in reversed(frames)]
    text = f"{type(error).__name__}: {_text_of(error)}".encode(errors="replace").decode()
    return f"{text} [at {' < '.join(places)}]" if places else text


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - raised by the error's own code; it is described without its text
        return f"(its message cannot be formatted: {type(another).__name__})"
