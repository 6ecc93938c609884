"""Runtimes by name: those that come with Headrace, and others by the entry points ``headrace.runtimes``.

* A name that nobody has is refused, with the names that there are.
* ``process`` isolates nothing, and is made only where ``allow_unsafe`` says so.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from headrace.errors import SandboxFailure
from headrace_sandbox.runtimes.base import Runtime

GROUP = "headrace.runtimes"

UNSAFE = "process"
"""The runtime that isolates nothing."""


def runtime_names() -> list[str]:
    """The names of all runtimes, usable here or not."""
    return sorted({point.name for point in entry_points(group=GROUP)})


def make_runtime(name: str, *, allow_unsafe: bool = False) -> Runtime:
    """A runtime. Raises SandboxFailure ``unknown-runtime``, ``unsafe``, or why it cannot be used here."""
    if name == UNSAFE and not allow_unsafe:
        raise SandboxFailure(
            f"The runtime {name} isolates nothing: programs run as this user, with its files and its network.",
            hint="Choose another, or allow it with allow_unsafe=True (--allow-unsafe).",
            kind="unsafe",
            retryable=False,
        )
    for point in entry_points(group=GROUP, name=name):
        made: Runtime = point.load()()
        return made
    raise SandboxFailure(
        f"There is no runtime {name!r}.",
        hint=f"There are {', '.join(runtime_names())}.",
        kind="unknown-runtime",
        retryable=False,
    )
