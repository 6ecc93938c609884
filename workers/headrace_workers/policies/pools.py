"""The servers of one policy: which of them take requests now, and how long they were paused.

* A fixed pool is what a spec or a command line names; all of its servers take requests, and none is ever paused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol


class Pool(Protocol):
    """The servers of a policy."""

    @property
    def name(self) -> str:
        """Tells the pool apart from others."""
        ...

    def addresses(self) -> Sequence[str]:
        """The servers that take requests now."""
        ...

    def paused_s(self, address: str) -> float:
        """Seconds that a server was paused for new weights so far."""
        ...

    def held_s(self) -> float:
        """Seconds in which no server took requests since some were paused for new weights."""
        ...

    async def changed(self) -> None:
        """Wait until ``addresses`` may be other ones."""
        ...

    def why(self) -> str:
        """Why no server takes requests."""
        ...


class FixedPool:
    """Servers that stay as they are."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.name = " ".join(addresses)
        self._addresses = list(addresses)

    def addresses(self) -> Sequence[str]:
        return self._addresses

    def paused_s(self, address: str) -> float:
        return 0.0

    def held_s(self) -> float:
        return 0.0

    async def changed(self) -> None:
        await asyncio.Event().wait()

    def why(self) -> str:
        return ""
