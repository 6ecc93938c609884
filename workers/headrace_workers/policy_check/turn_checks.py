"""Checks of whole turns through the worker's own client: two turns where the second prompt extends the first answer,
and a turn with an image for vision models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.assets import AssetData, encode_array
from headrace.errors import EpisodeFailure
from headrace.trajectory import ContentPart, Message, Sampling
from headrace_workers.policies import Sample, SampleRequest, check_sample
from headrace_workers.policy_check.findings import CheckFailed, CheckSkipped
from headrace_workers.policy_check.target import MORE, QUESTION, TOKENS, CheckTarget
from headrace_workers.renderers import AssistantTurn, CurrentSegment

PIXELS = 64
"""Height and width of the test image: larger than the patches of any model."""


async def turns(subject: CheckTarget) -> str:
    """Sample two turns through the worker's own client; the second prompt extends the first answer."""
    first = subject.renderer.start([QUESTION])
    sample = await _sample(subject, first.new_ids, 0)
    reply = AssistantTurn(sample.token_ids, subject.renderer.parse(sample.token_ids))
    segment = CurrentSegment([*first.new_ids, *sample.token_ids], len(first.new_ids), [QUESTION, reply], first.text)
    extension = subject.renderer.extend(segment, [MORE])
    prompt = [*segment.token_ids, *extension.new_ids] if extension is not None else None
    await _sample(subject, prompt or subject.renderer.start([*segment.conversation, MORE]).new_ids, 1)
    if extension is not None:
        return "two turns in one segment"
    return "two turns in two segments: this template renders sampled tokens differently"


async def image(subject: CheckTarget) -> str:
    """Check that the server accepts an image, and its answer reports the image's tokens."""
    if subject.renderer.image_token_id is None:
        raise CheckSkipped("the renderer supports text only")
    pixels = encode_array(np.zeros((PIXELS, PIXELS, 3), np.uint8))
    parts = [ContentPart(type="image", asset=pixels.name), ContentPart(type="text", text="What do you see?")]
    prompt = subject.renderer.start([Message(role="user", content=parts)]).new_ids
    sample = await _sample(subject, prompt, 0, [pixels])
    if sample.seen is None:
        raise CheckFailed("the answer does not report the tokens of the image", "Serve with vLLM's generate route.")
    ((start, end),) = sample.seen.images
    return f"an image of {PIXELS} × {PIXELS} pixels has {end - start} tokens"


async def _sample(subject: CheckTarget, prompt: list[int], turn: int, images: Sequence[AssetData] = ()) -> Sample:
    vocab_size = subject.renderer.tokenizer.vocab_size
    request = SampleRequest(
        id=f"check-{turn}",
        group="check",
        episode="check",
        model=subject.server.model,
        prompt=prompt,
        images=images,
        sampling=Sampling(seed=turn),
        max_tokens=TOKENS,
        stop=(),
        stop_token_ids=subject.renderer.stop_token_ids,
        timeout_s=120.0,
        vocab_size=vocab_size,
    )
    try:
        sample = await subject.policies.at([subject.server.address]).sample(request)
        check_sample(sample, vocab_size, TOKENS)
    except EpisodeFailure as failure:
        raise CheckFailed(f"turn {turn}: {failure.kind}: {failure.detail}", failure.hint) from failure
    return sample
