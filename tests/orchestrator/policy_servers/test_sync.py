"""Weight syncs during running episodes: no episode is lost, and every recorded version is true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from headrace.wire import messages
from tests.orchestrator.policy_servers.deployment import SLOTS, deployment
from tests.orchestrator.policy_servers.doubles import get


async def weights(address: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.get(f"{address}/weights") as answer:
        return await answer.read()


@pytest.mark.parametrize(("order", "pause"), [("together", "keep"), ("rolling", "wait"), ("together", "abort")])
async def test_ten_updates_under_load_lose_no_episode_and_every_turn_records_its_true_version(
    tmp_path: Path, order: str, pause: str
) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await deployed.create_run(sync={"order": order, "pause": pause})
        await deployed.until_played(4)
        for n in range(1, 11):
            await deployed.announce(n)
            await deployed.until_served(n)
            await deployed.until_played(2)
        await deployed.until_played(SLOTS + 2)
        assert {"0.0", "0.10"} <= await deployed.check_truth()
        assert (await deployed.servers()).skipped == []


async def test_the_newest_run_with_weights_loads_a_shared_server_and_an_older_run_leaves_it_alone(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, servers=1) as (deployed, _, _):
        await deployed.create_run()
        await deployed.announce(1)
        await deployed.until_served(1)
        spec = {"name": "newer", "environments": [{"id": "test:Echo"}], "policy": {"endpoints": deployed.addresses}}
        await deployed.api.ask("POST", "/v1/runs", spec, status=201)
        newer = messages.VersionRequest(version="0.2", weights=deployed.write(2))
        await deployed.api.ask("POST", "/v1/runs/newer/version", newer)
        (server,) = (await deployed.until(lambda servers: all(s.state == "ejected" for s in servers.values()))).servers
        assert server.reason == "run newer loads its weights into it"
        async with asyncio.timeout(20):
            while (await get(server.address, "/weight_info"))["weight_version"] != "newer@0.2":
                await asyncio.sleep(0.02)
        await deployed.api.ask("POST", "/v1/runs/newer/close")
        await deployed.until_served(1)


async def test_weights_of_another_run_are_not_a_version_of_a_run_that_announced_none(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, servers=1, slow_s=0.2) as (deployed, _, _):
        (address,) = deployed.addresses
        first = await weights(address)
        await deployed.create_run()
        await deployed.until_played(SLOTS)  # more are running, and their turns continue after the pause
        spec = {"name": "newer", "pool": "empty", "environments": [{"id": "test:Echo"}]}
        await deployed.api.ask("POST", "/v1/runs", {**spec, "policy": {"endpoints": deployed.addresses}}, status=201)
        newer = messages.VersionRequest(version="0.1", weights=deployed.write(1))
        await deployed.api.ask("POST", "/v1/runs/newer/version", newer)
        await deployed.until(lambda servers: all(server.state == "ejected" for server in servers.values()))
        async with asyncio.timeout(20):
            while await weights(address) == first:
                await asyncio.sleep(0.02)
        await deployed.api.ask("POST", "/v1/runs/newer/close")
        await deployed.until(lambda servers: all("holds weights of run newer" in s.reason for s in servers.values()))
        headers = {"x-weight-version": "0.0"}
        async with aiohttp.ClientSession() as learner, learner.post(f"{address}/weights", data=first, headers=headers):
            pass
        await deployed.until_served(0)
        await deployed.until_played(SLOTS)
        assert await deployed.check_truth() == {"0.0"}


async def test_weights_of_another_run_with_the_same_version_are_replaced(tmp_path: Path) -> None:
    async with deployment(tmp_path, servers=1) as (deployed, _, _):
        await deployed.create_run()
        await deployed.announce(1)
        await deployed.until_served(1)
        first = await weights(deployed.addresses[0])
        spec = {"name": "newer", "environments": [{"id": "test:Echo"}], "policy": {"endpoints": deployed.addresses}}
        await deployed.api.ask("POST", "/v1/runs", spec, status=201)
        newer = messages.VersionRequest(version="0.1", weights=deployed.write(2))
        await deployed.api.ask("POST", "/v1/runs/newer/version", newer)
        async with asyncio.timeout(20):
            while await weights(deployed.addresses[0]) == first:
                await asyncio.sleep(0.02)
        await deployed.api.ask("POST", "/v1/runs/newer/close")
        async with asyncio.timeout(20):
            while await weights(deployed.addresses[0]) != first:
                await asyncio.sleep(0.02)
        await deployed.until_served(1)


async def test_weight_syncs_are_in_the_metrics(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await deployed.create_run()
        await deployed.announce(1)
        await deployed.until_served(1)
        await deployed.announce(2, messages.Weights(path="nowhere"))
        await deployed.until_said("failed")
        async with deployed.api.session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert 'headrace_weight_sync_seconds_count{run="run"} 2.0' in lines
        assert 'headrace_run_policy_servers{run="run",state="serving"} 2.0' in lines
        assert any(line.startswith('headrace_weight_sync_failures_total{kind="weights-missing"') for line in lines)
