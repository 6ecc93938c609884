"""Logprobs of an episode's rows under the scorer policies of its run.

* Every row is scored by every scorer after the episode has ended, concurrently.
* A score is an asset of the row, f32[n], named in ``Segment.arrays`` as ``logprobs.NAME``.
* A failing scorer fails the episode: layer ``policy``, with its name in the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from headrace.assets import AssetData, encode_array
from headrace.errors import PolicyFailure
from headrace.runspec import ScorerSpec
from headrace.trajectory import Segment
from headrace_workers.policies.base import PolicySource, ScoreRequest

PREFIX = "logprobs."
"""Prefix of the array name of a scorer."""


async def score_rows(
    segments: list[Segment],
    scorers: Mapping[str, ScorerSpec],
    policies: PolicySource,
    *,
    attempt: str,
    timeout_s: float,
) -> tuple[list[Segment], list[AssetData]]:
    """Score the segments; return them with the scores as assets. Raises PolicyFailure.

    ``attempt`` is part of the ids of requests; ``timeout_s`` limits each request.
    """
    requests = [
        (position, name)
        for position, segment in enumerate(segments)
        if segment.train and segment.turns
        for name in scorers
    ]

    async def score(position: int, name: str) -> AssetData:
        scorer = scorers[name]
        request = ScoreRequest(
            id=f"{attempt}-{name}-{position}",
            model=scorer.model,
            token_ids=segments[position].token_ids.tolist(),
            timeout_s=timeout_s,
        )
        try:
            return encode_array(await policies.score(scorer.endpoints, request))
        except PolicyFailure as failure:
            raise PolicyFailure(
                f"Scorer {name!r}, row {position}: {failure}", kind=failure.kind, retryable=failure.retryable
            ) from failure

    results = await asyncio.gather(*(score(*row) for row in requests), return_exceptions=True)
    assets = [result for result in results if not isinstance(result, BaseException)]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    arrays: dict[int, dict[str, str]] = {}
    for (position, name), asset in zip(requests, assets, strict=True):
        arrays.setdefault(position, {})[PREFIX + name] = asset.name
    scored = [
        msgspec.structs.replace(segment, arrays={**segment.arrays, **arrays[position]})
        if position in arrays
        else segment
        for position, segment in enumerate(segments)
    ]
    return scored, assets
