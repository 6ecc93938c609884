r"""Extraction of the answer from a policy's text.

* The last ``\boxed{...}`` counts, with matched braces inside; for code, the last closed fenced block.
* Text of any length and nesting is parsed in linear time, without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from headrace.environment import Step

FORMAT_ERROR = -0.1
"""Reward of an action without an answer. It ends the episode, as in GEM."""

_MARK = re.compile(r"\\boxed\s{0,8}\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` that is closed, stripped; None if there is none.

    >>> last_boxed(r"First \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    if "\\boxed" not in text:
        return None
    open_marks: list[re.Match[str]] = []
    start, end = -1, -1
    for mark in _MARK.finditer(text):
        if mark.group() != "}":
            open_marks.append(mark)
        elif open_marks:
            open_mark = open_marks.pop()
            if open_mark.group() != "{" and open_mark.end() > start:
                start, end = open_mark.end(), mark.start()
    return text[start:end].strip() if start >= 0 else None


def final_step(observation: str, outcome: str, reward: float) -> Step:
    """Make the last step of a single-turn episode; ``outcome`` names the reward part."""
    return Step(observation, reward, True, False, {"outcome": outcome, "reward_parts": {outcome: reward}})


class Block(NamedTuple):
    """A fenced block. ``language``: the first word after its opening fence. ``end``: the position after the block."""

    language: str
    content: str
    end: int


def fenced_blocks(text: str) -> Iterator[Block]:
    r"""Yield the closed fenced blocks of a text, in order.

    >>> list(fenced_blocks("First:\n```python\nprint(1)\n```\nDone."))
    [Block(language='python', content='print(1)\n', end=30)]
    """
    start, language, position = -1, "", 0
    for line in text.split("\n"):
        stripped, after = line.strip(), position + len(line) + 1
        if start < 0 and stripped.startswith("```") and "`" not in stripped[3:]:
            start, language = after, stripped[3:].strip().partition(" ")[0]
        elif start >= 0 and stripped == "```":
            yield Block(language, text[start:position], after - 1)
            start = -1
        position = after


def last_block(text: str) -> str | None:
    """The content of the last fenced block that is closed; None if there is none."""
    block = None
    for block in fenced_blocks(text):  # noqa: B007 - only the last one is used
        pass
    return None if block is None else block.content
