"""G13: a server whose load of weights failed must not take requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import WeightsDamaged, WeightsDoNotFit, WeightsMissing
from headrace.trajectory import Version
from headrace.wire import messages
from headrace_workers.tiny_policy.weight_updates import write_folder
from tests.orchestrator.policy_servers.deployment import SLOTS, Deployment, Tap, cut_short, deployment, weights_of
from tests.orchestrator.policy_servers.doubles import get, post
from tests.orchestrator.serving import Process

LEASE_S = 3.0


async def run_at_version_7(deployed: Deployment, lease_s: float = LEASE_S) -> None:
    await deployed.create_run(sync={"pause_lease_s": lease_s})
    await deployed.announce(7)
    await deployed.until_served(7)
    await deployed.until_played(2)


async def recovers(deployed: Deployment, n: int) -> set[str]:
    """Announce intact weights and wait until all servers serve them; returns the versions of all turns."""
    await deployed.announce(n)
    await deployed.until_served(n)
    await deployed.until_played(SLOTS + 2)  # episodes that were running may have earlier versions
    for address in deployed.addresses:
        assert (await get(address, "/is_paused"))["is_paused"] is False
    return await deployed.check_truth()


def misshapen(folder: Path) -> messages.Weights:
    write_folder(folder, weights_of(Version(0, 8))[:-1])
    return messages.Weights(path=str(folder))


async def test_g13_damaged_files_are_found_before_any_server_is_paused(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await run_at_version_7(deployed)
        paused = [server.paused_s for server in (await deployed.servers()).servers]
        damages = [
            (8, messages.Weights(path=str(tmp_path / "nowhere")), "does not exist", WeightsMissing),
            (9, cut_short(deployed.write(9)), "cut short", WeightsDamaged),
            (10, misshapen(tmp_path / "misshapen"), "has shape", WeightsDoNotFit),
        ]
        for n, weights, problem, error in damages:
            await deployed.announce(n, weights)
            reason = await deployed.until_said(f"weight sync of version 0.{n} failed")
            assert (reason.code, reason.facts["kind"]) == ("weight-sync", error.code)
            assert problem in reason.message
            await deployed.until_played(2)
            reply = await deployed.servers()
            assert {(server.state, server.version) for server in reply.servers} == {("serving", "0.7")}
            assert problem in reply.sync
        assert [server.paused_s for server in (await deployed.servers()).servers] == paused
        assert await recovers(deployed, 11) <= {"0.0", "0.7", "0.11"}
        assert (await deployed.servers()).skipped == ["0.8", "0.9", "0.10"]


async def test_g13_a_server_whose_load_fails_is_ejected_while_the_other_serves_the_new_version(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await run_at_version_7(deployed)
        good, bad = deployed.addresses
        for n, fault in ((8, "fail"), (9, "mixed")):
            await post(bad, "/misbehave", {"load": fault})
            await deployed.announce(n)
            await deployed.until(
                lambda servers, n=n: (servers[good].state, servers[good].version) == ("serving", f"0.{n}")
            )
            reply = await deployed.until(lambda servers: servers[bad].state == "ejected")
            assert "its weights are unknown" in reply.servers[1].reason
            await deployed.until_said(f"weight sync of version 0.{n} failed")
            assert (await get(bad, "/is_paused"))["is_paused"] is True
            await deployed.until_played(2)
            await post(bad, "/misbehave", {"slow_s": 0.02})
            await deployed.until_served(n)
        assert await recovers(deployed, 10) <= {"0.0", "0.7", "0.8", "0.9", "0.10"}


async def test_g13_a_server_that_answers_too_late_is_ejected_and_recovers(tmp_path: Path) -> None:
    async with deployment(tmp_path) as (deployed, _, _):
        await run_at_version_7(deployed)
        good, late = deployed.addresses
        await post(late, "/misbehave", {"load": "late", "load_s": LEASE_S + 0.5, "load_times": 1, "slow_s": 0.02})
        await deployed.announce(8)
        await deployed.until(lambda servers: (servers[good].state, servers[good].version) == ("serving", "0.8"))
        await deployed.until(lambda servers: servers[late].state == "ejected")
        await deployed.until_played(2)
        await deployed.until_served(8)
        await recovers(deployed, 9)


PHASES = ["headrace_check", "/pause", "/update_weight_version", "headrace_load", "/resume"]


async def test_g13_an_orchestrator_killed_in_any_phase_of_an_update_finishes_it_after_a_restart(
    tmp_path: Path,
) -> None:
    async with deployment(tmp_path, tapped=True) as (deployed, taps, orchestrator):
        await run_at_version_7(deployed, lease_s=300.0)  # no pause lease ends during the test
        for n, phase in enumerate(PHASES, 8):
            await killed_at(phase, n, taps[0], deployed, orchestrator)
            await deployed.until_served(n)
            await deployed.until_played(2)
        assert {"0.7", "0.13"} <= await recovers(deployed, 13)


async def killed_at(phase: str, n: int, tap: Tap, deployed: Deployment, orchestrator: Process) -> None:
    """Announce version n, kill the orchestrator when this call reaches the first server, and restart it."""
    reached, released = asyncio.Event(), asyncio.Event()

    async def hold(what: str) -> None:
        if what == phase and not reached.is_set():
            reached.set()
            await released.wait()

    tap.hook = hold
    await deployed.announce(n)
    await asyncio.wait_for(reached.wait(), 20)
    await asyncio.to_thread(orchestrator.kill)
    tap.hook = None
    released.set()
    await asyncio.to_thread(orchestrator.start, port=int(deployed.url.rsplit(":", 1)[1]))


@contextmanager
def learner(deployed: Deployment, code: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A learner process that runs ``code`` with its client, and then keeps running."""
    program = f"import signal, sys, headrace\nclient = headrace.Client(sys.argv[1])\n{code}\nsignal.pause()"
    process = subprocess.Popen([sys.executable, "-c", program, deployed.url, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


async def test_g13_an_update_continues_when_the_learner_is_killed_during_it(tmp_path: Path) -> None:
    async with deployment(tmp_path, tapped=True) as (deployed, taps, _):
        await run_at_version_7(deployed)
        weights = deployed.write(8)
        reached, released = asyncio.Event(), asyncio.Event()

        async def hold(what: str) -> None:
            if what == "headrace_load":
                reached.set()
                await released.wait()

        taps[0].hook = hold
        with learner(deployed, "client.announce('run', '0.8', weights=sys.argv[2])", weights.path) as process:
            await asyncio.wait_for(reached.wait(), 20)
            process.kill()
        released.set()
        await deployed.until_served(8)
        await deployed.until_played(2)
        await deployed.check_truth()
