"""Parser of tool calls and thinking in an action's text, in the form common to models without their own family.

* Thinking is the text before ``</think>``; content follows, up to the first call.
* A call is JSON with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``.
* A call that cannot be parsed is kept with its text and an error; no call is dropped.
* No text raises an error: whatever a policy writes is an action.
* The arguments of a readable call can be stored, compared and sent: their text is Unicode, their numbers are finite,
  and their nesting is bounded.
"""

from __future__ import annotations

import json
import math
from typing import Any

from headrace.environment import Action, Call
from headrace_workers.unicode_text import is_unicode

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

MAX_NESTING = 64
"""Limit on nested objects and lists in a call's arguments. Python's own limit depends on the depth of its stack."""

TOO_NESTED = f"the call has more than {MAX_NESTING} nested levels"


def parse_action(text: str, prefill: str = "") -> Action:
    """Parse the text of an action. ``prefill`` is the text that the prompt put before it, such as ``<think>``."""
    thinking, think_close, rest = text.partition(THINK_CLOSE)
    is_thinking = THINK_OPEN in prefill or thinking.lstrip().startswith(THINK_OPEN)
    reasoning = thinking.lstrip().removeprefix(THINK_OPEN).strip("\n") if think_close or is_thinking else ""
    if is_thinking and not think_close:
        return Action(text, content="", reasoning=reasoning)
    content, *blocks = (rest if think_close else text).split(CALL_OPEN)
    return Action(
        text, content=content.strip("\n"), reasoning=reasoning, calls=[_parse_call(block) for block in blocks]
    )


def _parse_call(block: str) -> Call:
    content, closed, _ = block.partition(CALL_CLOSE)
    if not closed:
        return Call(text=content.strip(), error="the call is not closed")
    try:
        value = json.loads(content)
    except RecursionError:
        return Call(text=content.strip(), error=TOO_NESTED)
    except ValueError as error:
        return Call(text=content.strip(), error=f"the call is not JSON: {error}")
    return read_call(content.strip(), value)


def read_call(text: str, value: Any) -> Call:
    """Make a call from its decoded JSON."""
    error = _unusable_part(value)
    if error:
        return Call(text=text, error=error)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call(text=text, error="the call names no function")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(text=text, name=name, error="the arguments are not a JSON object")
    return Call(text=text, name=name, arguments=arguments)


def _unusable_part(value: Any) -> str:
    """Say which part of decoded JSON no tool can use; empty if there is none. Python's parser accepts NaN, infinities,
    numbers that overflow, and lone surrogates."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING + 2:  # the call itself and its arguments are two levels
            return TOO_NESTED
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, float) and not math.isfinite(item):
                return f"the call contains the number {item}, which is not finite"
            elif isinstance(item, str) and not is_unicode(item):
                return "the call contains a lone surrogate, which is not Unicode"
        level = below
    return ""
