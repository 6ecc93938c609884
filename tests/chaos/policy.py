"""The policy of chaos workers: a random number after a delay, with the version that the learner wrote last."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from headrace.trajectory import Version
from headrace_workers.policies import Sample, SampleRequest
from tests.workers.fakes import say


class Policy:
    """Answers arithmetic tasks at random, so that only some groups have different rewards."""

    def sample(self, request: SampleRequest) -> object:
        return self._answer()

    async def _answer(self) -> Sample:
        await asyncio.sleep(random.uniform(0, 2 * float(os.environ["CHAOS_TURN_S"])))
        file = Path(os.environ["CHAOS_VERSION"])
        version = Version.parse(file.read_text()) if file.exists() else Version(0, 0)
        return say(f"\\boxed{{{random.randrange(10)}}}" + " so it is" * random.randrange(30), version=version)


def make() -> Policy:
    return Policy()
