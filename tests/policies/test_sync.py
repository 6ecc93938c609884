"""Weights of new versions get into policy servers under running episodes: none is lost, and versions are true."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.policies.plant import plant


@pytest.mark.parametrize(("order", "pause"), [("together", "keep"), ("rolling", "wait"), ("together", "abort")])
async def test_ten_updates_under_load_lose_no_episode_and_every_turn_says_what_sampled_it(
    tmp_path: Path, order: str, pause: str
) -> None:
    async with plant(tmp_path) as (made, _, _):
        await made.create_run(sync={"order": order, "pause": pause})
        await made.until_played(4)
        for n in range(1, 11):
            await made.announce(n)
            await made.until_served(n)
            await made.until_played(2)
        versions = await made.check_truth()
        assert {f"0.{n}" for n in (0, 5, 10)} <= versions
        assert (await made.servers()).skipped == []
