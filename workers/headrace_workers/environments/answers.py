r"""Finds the answer in what a policy wrote.

* The last ``\boxed{...}`` counts; braces inside it are matched.
* Text is data: no length and no nesting makes reading it slow or raises.
"""

from __future__ import annotations

import re

FORMAT_ERROR = -0.1
"""Reward of an action in which no answer can be found. It ends the episode, as in GEM."""

_MARK = re.compile(r"\\boxed\s{0,8}\{|[{}]")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` that is closed, stripped; None if there is none.

    >>> last_boxed(r"First \boxed{1}, no: \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    open_marks: list[re.Match[str]] = []
    start, end = -1, -1
    for mark in _MARK.finditer(text):
        if mark.group() != "}":
            open_marks.append(mark)
        elif open_marks:
            opened = open_marks.pop()
            if opened.group() != "{" and opened.end() > start:
                start, end = opened.end(), mark.start()
    return text[start:end].strip() if start >= 0 else None
