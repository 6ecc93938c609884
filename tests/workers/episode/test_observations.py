"""Observations are stored as they were returned, even if the environment changes its objects later."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.assets import Image, decode_array
from headrace.environment import Step
from headrace.trajectory import ContentPart, Trajectory
from headrace.validation import validate
from tests.workers.fakes import OneTurn, Script, Turns, failure_of, play, play_with_assets, say


def _g19_reused() -> Any:
    class Reuses(OneTurn):
        def __init__(self) -> None:
            self.parts: list[ContentPart] = []
            self.info: dict[str, Any] = {}

        def reset(self, seed: int | None = None) -> Any:
            self.parts.clear()
            self.info.clear()
            return self.parts, self.info

        def step(self, action: str) -> Any:
            word = "abc"[len(self.parts)]
            self.parts.append(ContentPart(type="text", text=word))
            self.info["seen"] = self.info.get("seen", "") + word
            return self.parts, 1.0, len(self.parts) == 3, False, self.info

    return Reuses


def _g19_shared() -> Any:
    class Shares(OneTurn):
        parts: ClassVar[list[ContentPart]] = []

        def reset(self, seed: int | None = None) -> Any:
            self.parts.clear()
            return self.parts, {}

        def step(self, action: str) -> Any:
            self.parts.append(ContentPart(type="text", text="abc"[len(self.parts)]))
            return self.parts, 1.0, len(self.parts) == 3, False, {"seen": "".join(part.text for part in self.parts)}

    return Shares


def _seen(record: Trajectory) -> list[str]:
    observations = [message.content for message in record.messages if message.role == "user"]
    return ["".join(part.text for part in content) for content in observations if isinstance(content, list)]


async def test_G19_objects_that_the_environment_reuses_do_not_change_stored_values() -> None:  # noqa: N802
    record = await play(Script(say("x")), _g19_reused())
    validate(record)
    assert _seen(record) == ["", "a", "ab", "abc"]
    assert record.infos == [{}, {"seen": "a"}, {"seen": "ab"}, {"seen": "abc"}]


def _g19_buffer(text: str) -> Any:
    """Draws into one buffer and returns it each turn; the value of its pixels is 1, 2, 3."""

    class Draws(OneTurn):
        def __init__(self) -> None:
            self.buffer = np.zeros((4, 6, 3), np.uint8)

        def reset(self, seed: int | None = None) -> Any:
            self.buffer[:] = 0
            return "Look.", {}

        def step(self, action: str) -> Any:
            self.buffer += 1
            drawn = int(self.buffer[0, 0, 0])
            parts = [ContentPart(type="text", text=f"{drawn}:"), Image(data=self.buffer, text=text)]
            return parts, 1.0, drawn == 3, False, {}

    return Draws


async def test_G19_three_images_in_one_buffer_have_three_hashes() -> None:  # noqa: N802
    record, assets = await play_with_assets(Script(say("x")), _g19_buffer("<image>"))
    shown = [message.content[1].asset for message in record.messages if isinstance(message.content, list)]
    assert len(set(shown)) == 3
    assert [asset.name for asset in record.assets] == shown == list(assets)
    assert [int(decode_array(assets[name].data)[0, 0, 0]) for name in shown] == [1, 2, 3]
    assert b"1:<image>" in bytes(id_ for id_ in record.segments[0].token_ids.tolist() if id_ < 256)


async def test_images_are_copied_where_the_environment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    encoded = Image.encoded

    def noted(image: Image) -> Any:
        threads.add(threading.current_thread())
        return encoded(image)

    monkeypatch.setattr(Image, "encoded", noted)

    class Blocks(_g19_buffer("<image>")):  # type: ignore[misc]
        blocking = True

    record, _ = await play_with_assets(Script(say("x")), Blocks, clock=time.monotonic)
    assert len(record.assets) == 3
    assert threads
    assert threading.main_thread() not in threads


async def test_several_agents_are_shown_images_of_their_own() -> None:
    class Two:
        agents: ClassVar = ["a", "b"]

        def __init__(self) -> None:
            self.due: str | None = "a"

        def next_agent(self) -> str | None:
            return self.due

        def reset(self, seed: int | None = None) -> Any:
            return {name: [Image(data=name.encode(), media_type="image/png", text=name)] for name in self.agents}, {}

        def step(self, action: str) -> Any:
            over = self.due == "b"
            self.due = None if over else "b"
            ended = dict.fromkeys(self.agents, over)
            return {}, dict.fromkeys(self.agents, 1.0), ended, dict.fromkeys(self.agents, False), {}

    record, assets = await play_with_assets(Script(say("x")), Two)
    assert record.status == "finished"
    assert [asset.data for asset in assets.values()] == [b"a", b"b"]


async def test_an_image_shown_twice_is_kept_once() -> None:
    class Shows(Turns):
        def step(self, action: str) -> Any:
            return Step(*super().step(action))._replace(
                observation=[Image(data=b"x", media_type="image/png", text=".")]
            )

    record, assets = await play_with_assets(Script(say("x")), Shows)
    assert [asset.size_bytes for asset in record.assets] == [1]
    assert len(assets) == 1


async def test_an_image_without_a_text_is_refused_where_the_policy_reads_text_only_and_is_stored_all_the_same() -> None:
    record, assets = await play_with_assets(Script(say("x")), _g19_buffer(""))
    assert failure_of(record) == ("infrastructure", "image-without-text", False)
    assert len(record.segments[0].turns) == len(assets) == 1


async def test_an_image_that_no_engine_has_processed_is_omitted_from_a_truncated_row() -> None:
    record, _ = await play_with_assets(Script(say("x")), _g19_buffer(""), limits={"max_turns": 1})
    assert record.status == "truncated"
    assert len(record.segments[0].token_ids) == record.segments[0].turns[-1].end
    assert len(record.assets) == 1


async def test_more_images_than_an_episode_may_show_are_the_environments_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace_workers.episode.runner.MAX_ASSET_BYTES", 300)
    record, assets = await play_with_assets(Script(say("x")), _g19_buffer("."))
    assert failure_of(record) == ("environment", "assets-too-large", False)
    assert len(record.assets) == len(assets) == 1


async def test_G19_a_list_shared_by_two_instances_is_stored_as_each_step_gave_it() -> None:  # noqa: N802
    shared = _g19_shared()
    first = await play(Script(say("x")), shared)
    second = await play(Script(say("x")), shared)
    assert _seen(first) == _seen(second) == ["", "a", "ab", "abc"]
    assert first.infos == second.infos


async def test_arrays_have_the_schemas_types() -> None:
    segment = (await play(Script(say("x")), OneTurn)).segments[0]
    assert (segment.token_ids.dtype, segment.logprobs.dtype, segment.sampled.dtype) == (np.int32, np.float32, np.uint8)
