"""Crash points: named places in a process at which it can be killed, as by SIGKILL.

* A process dies at one chosen crash point, at its n-th pass; the system kills it, and it runs no line after it.
* A wrapped function has two crash points, before and after the call, so that n chooses between them.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
"""Option of ``prctl``: the process gets a signal when its parent dies."""


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class CrashPoints:
    """The crash points of a process. Those of ``phase`` are armed: pass number ``passes`` (from 1) calls ``die``, which
    may kill other processes too."""

    def __init__(self, phase: str = "", passes: int = 1, die: Callable[[], None] = die) -> None:
        self.die = die
        self._phase = phase
        self._left = passes

    def is_due(self, phase: str) -> bool:
        """Count a pass; returns True if it is the one to die at."""
        if phase != self._phase:
            return False
        self._left -= 1
        return self._left == 0

    def reach(self, phase: str) -> None:
        """Pass a crash point."""
        if self.is_due(phase):
            self.die()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Make the start and the end of a function crash points of the phase."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.reach(phase)
            result = original(*args, **kwargs)
            self.reach(phase)
            return result

        setattr(owner, name, watched)

    def wrap_async(self, owner: Any, name: str, phase: str) -> None:
        """Like ``wrap``, for a coroutine function."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            self.reach(phase)
            result = await original(*args, **kwargs)
            self.reach(phase)
            return result

        setattr(owner, name, watched)
