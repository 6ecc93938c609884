"""Parser of tool calls and thinking in an action's text, in the form common to models without their own family.

* Thinking is the text before ``</think>``; content follows, up to the first call.
* A call is JSON with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``.
* A call that cannot be parsed is kept with its text and an error; no call is dropped.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.environment import Action, Call

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


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
    except ValueError as error:
        return Call(text=content.strip(), error=f"the call is not JSON: {error}")
    return read_call(content.strip(), value)


def read_call(text: str, value: Any) -> Call:
    """Make a call from its decoded JSON."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call(text=text, error="the call names no function")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(text=text, name=name, error="the arguments are not a JSON object")
    return Call(text=text, name=name, arguments=arguments)
