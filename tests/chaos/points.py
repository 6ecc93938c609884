"""Named points of a process at which it can be made to die, as by SIGKILL.

* A process dies at one chosen point, at its n-th pass there; it is killed by the system and runs no line after it.
* What is around a function is two points, before and after it, so that n chooses between them.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

PR_SET_PDEATHSIG = 1
"""Of ``prctl``: a process gets a signal when whoever started it dies."""


def die() -> None:
    """The end of this process, now."""
    os.kill(os.getpid(), signal.SIGKILL)


class Points:
    """``phase`` names the points that are armed; the process dies at the pass number ``passes`` (from 1), by ``die``,
    which may take others with it."""

    def __init__(self, phase: str = "", passes: int = 1, die: Callable[[], None] = die) -> None:
        self.die = die
        self._phase = phase
        self._left = passes

    def is_due(self, phase: str) -> bool:
        """Count a pass; whether it is the one to die at."""
        if phase != self._phase:
            return False
        self._left -= 1
        return self._left == 0

    def here(self, phase: str) -> None:
        """A pass of a point."""
        if self.is_due(phase):
            self.die()

    def around(self, owner: Any, name: str, phase: str) -> None:
        """Make the start and the end of a function points of the phase."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.here(phase)
            result = original(*args, **kwargs)
            self.here(phase)
            return result

        setattr(owner, name, watched)

    def around_async(self, owner: Any, name: str, phase: str) -> None:
        """The same for a coroutine function."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            self.here(phase)
            result = await original(*args, **kwargs)
            self.here(phase)
            return result

        setattr(owner, name, watched)
