"""Validation of images and their placeholder tokens (G12)."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.assets import make_asset
from headrace.errors import PlaceholdersDoNotMatch
from headrace.trajectory import ContentPart, Message, Placeholder, Trajectory
from headrace.validation import validate
from tests.builders import make_segment, make_trajectory, replace_segment

IMAGE, WIDTH = 258, 64
"""The placeholder token, and the number of them for an image."""

TEXT, ANSWER = 20, 10
ASSETS = [make_asset(f"picture {number}".encode(), "image/png").entry for number in range(3)]
BLOCK = TEXT + WIDTH + ANSWER
"""Tokens of a turn: text, an image, an action."""


def shown(names: list[str], ranges: list[Placeholder]) -> Trajectory:
    """An episode of one turn for each name: 20 tokens of text, an image of 64, an action of 10."""
    spans = [(k * BLOCK + TEXT + WIDTH, (k + 1) * BLOCK) for k in range(len(names))]
    segment = make_segment(spans=spans, length=len(names) * BLOCK)
    tokens = (np.arange(len(names) * BLOCK) % 250).astype(np.int32)
    for k in range(len(names)):
        tokens[k * BLOCK + TEXT : k * BLOCK + TEXT + WIDTH] = IMAGE
    messages = []
    for turn, name in enumerate(names):
        look = [ContentPart(type="text", text="Look."), ContentPart(type="image", asset=name)]
        messages.append(Message(role="user", content=look, agent="agent"))
        messages.append(Message(role="assistant", content="seen", agent="agent", turn=turn))
    assets = [asset for asset in ASSETS if asset.name in names]
    trajectory = make_trajectory(rewards=[0.0] * len(names), assets=assets, messages=messages, segments=[segment])
    return replace_segment(trajectory, token_ids=tokens, placeholders=ranges)


def ranges_of(names: list[str]) -> list[Placeholder]:
    return [Placeholder(k * BLOCK + TEXT, k * BLOCK + TEXT + WIDTH, name) for k, name in enumerate(names)]


NAMES = [asset.name for asset in ASSETS]
WHOLE = ranges_of(NAMES)


def test_one_range_for_each_image_is_valid() -> None:
    validate(shown(NAMES, WHOLE))


def test_the_same_image_twice_is_one_asset_with_two_ranges() -> None:
    twice = [NAMES[0], NAMES[0]]
    trajectory = shown(twice, ranges_of(twice))
    assert len(trajectory.assets) == 1
    validate(trajectory)


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        (WHOLE[:2], "was shown asset .* 1 times, and its segment has 0"),
        ([*WHOLE[:2], Placeholder(WHOLE[2].start, WHOLE[2].end - 1, NAMES[2])], "does not hold all tokens"),
        ([*WHOLE[:2], Placeholder(WHOLE[2].start, 3 * BLOCK + 1, NAMES[2])], "end by"),
        ([*WHOLE[:2], Placeholder(WHOLE[2].start, WHOLE[2].end + 1, NAMES[2])], "covers sampled positions"),
        ([WHOLE[0], Placeholder(WHOLE[0].end - 1, WHOLE[1].end, NAMES[1]), WHOLE[2]], "start at"),
    ],
    ids=["an image without a range", "63 of 64", "past the end", "over an answer", "two that overlap"],
)
def test_images_and_ranges_that_disagree_are_refused(ranges: list[Placeholder], problem: str) -> None:
    with pytest.raises(PlaceholdersDoNotMatch, match=problem) as caught:
        validate(shown(NAMES, ranges))
    assert caught.value.code == "placeholders-do-not-match"
