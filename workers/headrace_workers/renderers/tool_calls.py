"""Calls and thinking in the text of an action, in the form that most models without a family of their own use.

* Thinking is what stands before ``</think>``; what follows is content, up to the first call.
* A call is JSON with ``name`` and ``arguments`` between ``<tool_call>`` and ``</tool_call>``.
* A call that cannot be read is there with its text and with what is wrong; none is left out.
"""

from __future__ import annotations

import json
from typing import Any

from headrace.environment import Action, Call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINKS, THOUGHT = "<think>", "</think>"


def taken_apart(text: str, begun: str = "") -> Action:
    """The parts of an action. ``begun`` is what the prompt had begun for the policy, such as ``<think>``."""
    thinking, thought, rest = text.partition(THOUGHT)
    is_thinking = THINKS in begun or thinking.lstrip().startswith(THINKS)
    reasoning = thinking.lstrip().removeprefix(THINKS).strip("\n") if thought or is_thinking else ""
    if is_thinking and not thought:
        return Action(text, content="", reasoning=reasoning)
    content, *blocks = (rest if thought else text).split(OPEN)
    return Action(text, content=content.strip("\n"), reasoning=reasoning, calls=[_call(block) for block in blocks])


def _call(block: str) -> Call:
    said, closed, _ = block.partition(CLOSE)
    if not closed:
        return Call(text=said.strip(), error="the call is not closed")
    try:
        value = json.loads(said)
    except ValueError as error:
        return Call(text=said.strip(), error=f"the call is no JSON: {error}")
    return call_of(said.strip(), value)


def call_of(text: str, value: Any) -> Call:
    """The call that JSON stands for."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return Call(text=text, error="the call names no function")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(text=text, name=name, error="the arguments are no JSON object")
    return Call(text=text, name=name, arguments=arguments)
