"""An in-process policy for worker processes of tests: ``tests.workers.null_policy:make``."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from headrace_workers.policies import SampleRequest
from tests.workers.fakes import say


class _Null:
    async def _never(self) -> Any:
        await asyncio.Event().wait()

    def sample(self, request: SampleRequest) -> Any:
        return self._never() if os.environ.get("NULL_POLICY_HANGS") else say("5")


def make() -> _Null:
    return _Null()
