"""Built-in environments, by id.

* Importing this package registers them; the distribution's entry points do the same without an import.
* A factory is named as text, so nothing heavy is imported before its first environment is made.
"""

from __future__ import annotations

from headrace.environment import register, registered

BUILT_IN: dict[str, str] = {
    "code:Basics-v0": "headrace_workers.environments.code:basics",
    "code:Rows-v0": "headrace_workers.environments.code:CodeProblems",
    "game:GuessTheNumber-v0": "headrace_workers.environments.guess_the_number:GuessTheNumber",
    "game:GuessTheNumber-v0-easy": "headrace_workers.environments.guess_the_number:easy",
    "game:GuessTheNumber-v0-hard": "headrace_workers.environments.guess_the_number:hard",
    "game:GuessTheNumber-v0-random": "headrace_workers.environments.guess_the_number:RandomGuessTheNumber",
    "game:Nim-v0": "headrace_workers.environments.nim:Nim",
    "math:Arithmetic-v0": "headrace_workers.environments.arithmetic:Arithmetic",
    "math:Basics-v0": "headrace_workers.environments.math_problems:basics",
    "math:Rows-v0": "headrace_workers.environments.math_problems:MathProblems",
    "python:*": "headrace_workers.environments.python_tool:PythonTool",
    "rg:*": "headrace_workers.environments.reasoning_gym:ReasoningGym",
}
"""Factories by id. ``python:*`` and ``rg:*`` are families: the text after the colon is the factory's first argument."""

_known = set(registered())
for _id, _factory in BUILT_IN.items():
    if _id not in _known:
        register(_id, _factory)
