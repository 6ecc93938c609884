"""G12 and the real vLLM: a tiny vision model (examples/tiny_vision_model.py) on its own server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from examples.tiny_vision_model import IMAGE, IMAGE_TOKENS
from headrace.assets import AssetData, Image
from headrace.trajectory import ContentPart, Segment, Trajectory
from headrace.validation import validate
from headrace_workers.episode import EpisodeRun
from headrace_workers.policies import ServedPolicies
from headrace_workers.policies.images import data_url, png
from headrace_workers.policy_check.cli import check_server
from tests.vllm.server import TorchLogprobs, Vllm
from tests.workers.fakes import assignment, plan, tools

pytestmark = [pytest.mark.component("vllm"), pytest.mark.timeout(900)]

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)

CLOSE = 1e-3
"""Largest difference between two computations of a token's logprob, one by a forward pass of transformers."""


class Album:
    """Shows a picture each turn. With their texts, the first prompt and what each later turn adds are as long: 20
    tokens beside the image's."""

    blocking = False

    def __init__(self, *pictures: Any) -> None:
        self.pictures, self.turn = pictures, 0

    def look(self) -> list[Any]:
        # Later turns add the two tokens that end the answer before them.
        return [ContentPart(type="text", text="." if self.turn else "Now"), self.pictures[self.turn]]

    def reset(self, seed: int | None = None) -> Any:
        return self.look(), {}

    def step(self, action: str) -> Any:
        self.turn += 1
        return self.look(), 1.0, False, False, {}


def pixels(colour: tuple[int, int, int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((40, 60, 3), colour, np.uint8)


def picture(colour: tuple[int, int, int]) -> Image:
    return Image(data=pixels(colour))


async def play(server: tuple[str, Path], *pictures: Image, **limits: Any) -> tuple[Trajectory, dict[str, AssetData]]:
    """The record, valid, and the images that it names."""
    address, model = server
    its_tools = tools(None, lambda: Album(*pictures))
    its_tools.policies = ServedPolicies(default_endpoints=[address], clock=time.monotonic)
    policy = {"renderer": "template", "tokenizer": str(model)}
    episode = EpisodeRun(its_tools, assignment(), plan(policy=policy, limits=limits, sampling={"max_tokens": 10}))
    try:
        record = await episode.run()
    finally:
        await its_tools.policies.close()
        its_tools.threads.close()
    validate(record)
    return record, episode.assets


async def asked_again(server: tuple[str, Path], segment: Segment, assets: dict[str, AssetData], end: int) -> Any:
    """The engine's answer to the segment's first ``end`` tokens, with one token for each image."""
    tokens, sent, last = segment.token_ids.tolist(), list[int](), 0
    shown = [item for item in segment.placeholders if item.end <= end]
    for item in shown:
        sent += [*tokens[last : item.start], IMAGE]
        last = item.end
    body = {
        "model": "policy",
        "token_ids": [*sent, *tokens[last:end]],
        "content_parts": [{"type": "image_url", "url": data_url(assets[item.asset])} for item in shown],
        "sampling_params": {"max_tokens": 1},
        "return_token_ids": True,
    }
    async with aiohttp.ClientSession() as session:
        status, answer = await Vllm(session, *server).post("/inference/v1/generate", body)
    assert status == 200, answer
    return answer


async def test_g12_prompts_and_placeholders_are_those_of_the_engine_and_have_the_recorded_lengths(
    vision_server: tuple[str, Path], torch_logprobs: TorchLogprobs
) -> None:
    encoded = Image(data=png(pixels(GREEN)), media_type="image/png")
    shown = [picture(RED), encoded, picture(BLUE), picture(RED)]
    record, assets = await play(vision_server, *shown, max_context_tokens=300)
    assert (record.status, record.stop_reason) == ("truncated", "max_tokens")
    (segment,) = record.segments
    assert [turn.start for turn in segment.turns] == [84, 178, 272]
    tokens = segment.token_ids.tolist()
    assert tokens.count(IMAGE) == 3 * IMAGE_TOKENS
    for number, turn in enumerate(segment.turns, start=1):
        answer = await asked_again(vision_server, segment, assets, turn.end)
        assert answer["prompt_token_ids"] == tokens[: turn.end]
        ranges = [(item["offset"], item["offset"] + item["length"]) for item in answer["mm_placeholders"]["image"]]
        assert ranges == [(item.start, item.end) for item in segment.placeholders[:number]]
        assert all(tokens[start:end] == [IMAGE] * IMAGE_TOKENS for start, end in ranges)
    told = torch_logprobs(vision_server[1], tokens, images=[png(pixels(colour)) for colour in (RED, GREEN, BLUE)])
    sampled = segment.sampled == 1
    np.testing.assert_allclose(segment.logprobs[sampled], np.array([0.0, *told])[sampled], rtol=0, atol=CLOSE)


async def test_the_output_depends_on_the_content_of_an_image(vision_server: tuple[str, Path]) -> None:
    segments = []
    for colour in (RED, GREEN, RED):
        record, _ = await play(vision_server, *[picture(colour)] * 2, max_turns=1)
        segments += record.segments
    first, other, again = segments
    assert first.token_ids[:84].tolist() == other.token_ids[:84].tolist()
    assert first.token_ids.tolist() == again.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, again.logprobs, rtol=0, atol=CLOSE)
    # Of the same prompt ids: the first token, or how likely it is, is another.
    assert first.token_ids[84] != other.token_ids[84] or abs(first.logprobs[84] - other.logprobs[84]) > 10 * CLOSE


async def test_every_check_of_a_policy_server_passes_including_the_one_with_an_image(
    vision_server: tuple[str, Path],
) -> None:
    address, model = vision_server
    asked = {"renderer": "template", "tokenizer": str(model)}
    found = {item.check: item for item in await check_server(address, asked, tolerance=0.01, timeout_s=120.0)}
    del found["stop string"]  # the model may say nothing that has letters
    assert {name: item.status for name, item in found.items()} == dict.fromkeys(found, "PASS"), found
    assert str(IMAGE_TOKENS) in str(found["image"])
