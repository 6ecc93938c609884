"""G12: images and their placeholder tokens agree, in every prompt and in the record. This runs against the recorded
protocol of vLLM's generate route; tests/vllm/test_images.py uses the real one."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from headrace.assets import Image, encode_array
from headrace.environment import Action
from headrace.runspec import PolicySpec
from headrace.trajectory import ContentPart, Message, Placeholder, Tokenizer, Trajectory
from headrace.validation import validate
from headrace_workers.episode import EpisodeRun
from headrace_workers.policies import ServedPolicies
from headrace_workers.policies.images import png
from headrace_workers.policy_check import CheckedServer, CheckTarget, turn_checks
from headrace_workers.renderers import AssistantTurn, ConversationItem, CurrentSegment, Prompt, Tools, make_renderer
from tests.workers.fakes import assignment, failure_of, plan, tools
from tests.workers.models import make_model
from tests.workers.vision_engine import IMAGE, VisionEngine, serving_vision

TEXT = [1] * 20


class Twenty:
    """Renderer that encodes each message as twenty text tokens and one token per image."""

    tokenizer = Tokenizer(name="twenty", fingerprint="0" * 64, vocab_size=10)
    stop_token_ids = (2,)
    image_token_id: int | None = IMAGE

    def start(self, conversation: Sequence[ConversationItem], tools: Tools = ()) -> Prompt:
        ids: list[int] = []
        images: list[str] = []
        for item in conversation:
            if isinstance(item, AssistantTurn):
                ids += item.token_ids
                continue
            shown = [part.asset for part in item.content if isinstance(part, ContentPart) and part.type == "image"]
            ids += [*TEXT, *[IMAGE] * len(shown)]
            images += shown
        return Prompt(ids, images=images)

    def extend(self, standing: CurrentSegment, new_messages: Sequence[Message]) -> Prompt:
        return self.start(new_messages)

    def parse(self, sampled_ids: Sequence[int]) -> str:
        return "ok"

    def action(self, sampled_ids: Sequence[int], text: str) -> Action:
        return Action(text, content=text)

    def encode(self, text: str) -> list[int]:
        return [1]

    def count_control_tokens(self, value: Message | Tools) -> int:
        return 0


class Album:
    """Environment that shows an image each turn, from ``shown``; ``edit`` replaces the history after turn 1."""

    blocking = False

    def __init__(self, shown: Sequence[int], edit: list[dict[str, Any]] | None = None) -> None:
        self.shown, self.edit, self.turn = shown, edit, 0

    def look(self) -> list[Any]:
        number = self.shown[min(self.turn, len(self.shown) - 1)]
        return [ContentPart(type="text", text="Look:"), Image(data=bytes([number]), media_type="image/png")]

    def reset(self, seed: int | None = None) -> Any:
        return self.look(), {}

    def step(self, action: str) -> Any:
        self.turn += 1
        info = {"history": self.edit} if self.turn == 1 and self.edit is not None else {}
        return self.look(), 1.0, False, self.turn == 4, info


async def play(engine: VisionEngine, environment: Album, **limits: Any) -> Trajectory:
    its_tools = tools(None, lambda: environment)
    async with serving_vision(engine):
        its_tools.policies = ServedPolicies(default_endpoints=[engine.url], clock=time.monotonic)
        spec = dataclasses.replace(plan(limits=limits, sampling={"max_tokens": 10}), renderer=Twenty())
        try:
            record = await EpisodeRun(its_tools, assignment(), spec).run()
        finally:
            await its_tools.policies.close()
            its_tools.threads.close()
    validate(record)
    return record


async def test_g12_prompts_have_the_recorded_lengths_and_oversized_ones_are_never_sent() -> None:
    engine = VisionEngine()
    record = await play(engine, Album([1, 2, 3, 4]), max_context_tokens=300)
    (segment,) = record.segments
    assert [len(prompt) for prompt in engine.seen] == [84, 178, 272]
    assert [turn.start for turn in segment.turns] == [84, 178, 272]
    tokens = segment.token_ids.tolist()
    for prompt, turn in zip(engine.seen, segment.turns, strict=True):
        assert tokens[: turn.start] == prompt  # nothing is truncated on the left
    assert [prompt.count(IMAGE) for prompt in engine.prompts] == [1, 2, 3]  # expanded once, by the engine
    assert engine.images == [[b"\1"], [b"\1", b"\2"], [b"\1", b"\2", b"\3"]]
    shown = [asset.name for asset in record.assets]
    assert [list(item) for item in map(_fields, segment.placeholders)] == [
        [20, 84, shown[0]],
        [114, 178, shown[1]],
        [208, 272, shown[2]],
    ]
    assert (record.status, record.stop_reason) == ("truncated", "max_tokens")
    assert segment.turns[-1].truncated


async def test_g12_an_image_whose_tokens_exceed_the_context_truncates_the_episode() -> None:
    record = await play(VisionEngine(64, 500), Album([1, 2]), max_context_tokens=300)
    assert (record.status, record.stop_reason) == ("truncated", "max_tokens")
    assert len(record.segments[0].turns) == 1


async def test_g12_the_same_image_twice_is_one_asset_with_two_ranges() -> None:
    record = await play(VisionEngine(), Album([1, 1]), max_context_tokens=200)
    placeholders = record.segments[0].placeholders
    assert [item.asset for item in placeholders] == [record.assets[0].name] * 2
    assert len(record.assets) == 1


async def test_g12_a_history_edit_that_drops_an_image_starts_a_segment_with_its_own_ranges() -> None:
    edited = Album([1, 2, 3, 4], edit=[{"role": "user", "content": "Forget that."}])
    record = await play(VisionEngine(), edited, max_turns=3)
    first, second = record.segments
    assert [item.start for item in first.placeholders] == [20]
    assert [item.start for item in second.placeholders] == [50]
    assert {item.asset for item in first.placeholders}.isdisjoint(item.asset for item in second.placeholders)


async def test_g12_an_engine_that_encodes_an_image_differently_than_before_fails_the_episode() -> None:
    record = await play(VisionEngine(drift=1), Album([1, 2]))
    assert failure_of(record) == ("policy", "images-changed", False)
    assert len(record.segments[0].turns) == 1


async def test_g12_a_sampled_image_token_does_not_count_as_an_image() -> None:
    record = await play(VisionEngine(answer=[3, IMAGE]), Album([1, 2]))
    assert failure_of(record) == ("policy", "stray-image-token", False)
    assert len(record.segments[0].turns) == 1


async def test_a_server_without_image_support_is_named() -> None:
    record = await play(VisionEngine(generate=False), Album([1]))
    assert failure_of(record) == ("policy", "images-not-taken", False)


async def test_the_check_of_a_server_reports_the_tokens_of_an_image() -> None:
    async with serving_vision(VisionEngine(17)) as engine, aiohttp.ClientSession() as session:
        policies = ServedPolicies(default_endpoints=[engine.url], clock=time.monotonic)
        target = CheckTarget(
            server=CheckedServer(session, engine.url, "policy", 10.0),
            renderer=Twenty(),
            encode=lambda text: [1],
            decode=lambda ids: "",
            policies=policies,
            tolerance=0.1,
            sampling_defaults={},
        )
        try:
            assert await turn_checks.image(target) == "an image of 64 × 64 pixels has 17 tokens"
        finally:
            await policies.close()
    assert engine.images[0][0].startswith(b"\x89PNG")


def test_pixels_are_sent_as_a_lossless_png() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    encoded = png(pixels)
    assert encoded.startswith(b"\x89PNG\r\n\x1a\n")
    assert encoded[16:26] == b"\0\0\0\3\0\0\0\2\x08\2"  # width, height, depth, RGB
    start = encoded.index(b"IDAT") + 4
    rows = zlib.decompress(encoded[start:])
    assert rows == b"".join(b"\0" + row.tobytes() for row in pixels)


VISION = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.content is string %}{{ m.content }}{%- else %}{%- for p in m.content %}
{{- '<|endoftext|>' if p.type == 'image' else p.text }}{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""
"""Chat template that shows an image as the token <|endoftext|>."""


@pytest.mark.parametrize("sees", [True, False])
def test_images_are_shown_if_the_model_has_an_image_token_otherwise_their_substitute_text(
    tmp_path: Path, sees: bool
) -> None:
    folder = make_model(tmp_path, VISION)
    plain = make_renderer(PolicySpec(renderer="template", tokenizer=str(folder)))
    token = plain._tokenizer.convert_tokens_to_ids("<|endoftext|>")  # type: ignore[attr-defined]
    if sees:
        (folder / "config.json").write_text(f'{{"image_token_id": {token}}}')
    renderer = make_renderer(PolicySpec(renderer="template", tokenizer=str(folder)))
    asset = encode_array(np.zeros((2, 2), np.uint8))
    parts = [ContentPart(type="text", text="Look:"), ContentPart(type="image", asset=asset.name, text="<board>")]
    prompt = renderer.start([Message(role="user", content=parts)])
    assert renderer.image_token_id == (token if sees else None)
    assert list(prompt.images) == ([asset.name] if sees else [])
    assert prompt.new_ids.count(token) == sees
    assert ("<board>" in prompt.text) == (not sees)


def _fields(item: Placeholder) -> tuple[int, int, str]:
    return item.start, item.end, item.asset
