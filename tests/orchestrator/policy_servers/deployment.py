"""A deployment for tests: an orchestrator, doubles that load weights, and a worker that plays on them.

The weights of each version are derived from its number, so a test can check which weights sampled a stored record.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from headrace.trajectory import Segment, Trajectory, Version
from headrace.wire import codec, messages
from headrace_workers.tiny_policy.model import SIZE, Floats, Model, neutral_weights
from headrace_workers.tiny_policy.weight_updates import FILE, write_folder
from tests.e2e.processes import Processes
from tests.orchestrator.policy_servers.doubles import double, post
from tests.orchestrator.serving import Api, Process

SERVERS = "/v1/runs/run/servers"

SLOTS = 4
"""Default number of concurrent episodes of the worker."""


def weights_of(version: Version) -> Floats:
    """The weights of a version in these tests."""
    if version == Version(0, 0):
        return neutral_weights()
    return np.random.default_rng(version.n).normal(scale=0.5, size=SIZE)


class Tap:
    """A proxy in front of a double that records requests. ``hook`` may delay a request."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.hook: Callable[[str], Awaitable[None]] | None = None
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        what = request.path
        if what == "/collective_rpc":
            what = json.loads(body)["method"]
        self.requests.append(what)
        if self.hook is not None:
            await self.hook(what)
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, f"{self.behind}{request.rel_url}", data=body) as response,
        ):
            return web.Response(body=await response.read(), status=response.status, content_type=response.content_type)


@asynccontextmanager
async def tap(behind: str) -> AsyncIterator[tuple[Tap, str]]:
    """Run a tap in front of a double; yields it and its address."""
    proxy = Tap(behind)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.2)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield proxy, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Deployment:
    """A running deployment. ``addresses`` are those of the doubles, or of the taps in front of them."""

    def __init__(self, url: str, api: Api, folder: Path, addresses: list[str]) -> None:
        self.url = url
        self.api = api
        self.folder = folder
        self.addresses = addresses

    async def create_run(self, **fields: Any) -> None:
        """Create a run that never waits for its learner."""
        sync = {"pause_lease_s": 4.0, **fields.pop("sync", {})}
        defaults: dict[str, Any] = {
            "environments": [{"id": "game:GuessTheNumber-v0-easy"}],
            "group_size": 2,
            "batch_size": 16,
            "max_staleness": 200,
            "policy": {"endpoints": self.addresses, "sync": sync, **fields.pop("policy", {})},
            "sampling": {"max_tokens": 32},
        }
        await self.api.create_run(**{**defaults, **fields})

    def write(self, n: int) -> messages.Weights:
        """Write the weights of a version."""
        path = self.folder / f"version-{n}"
        write_folder(path, weights_of(Version(0, n)))
        return messages.Weights(path=str(path))

    async def announce(self, n: int, weights: messages.Weights | None = None) -> None:
        """Write the weights of a version, and announce it."""
        body = messages.VersionRequest(version=f"0.{n}", weights=weights or self.write(n))
        await self.api.ask("POST", "/v1/runs/run/version", body)

    async def servers(self, **query: Any) -> messages.PolicyServersReply:
        fields = "&".join(f"{name}={value}" for name, value in query.items())
        return msgspec.convert(await self.api.ask("GET", f"{SERVERS}?{fields}"), messages.PolicyServersReply)

    async def until(
        self, enough: Callable[[dict[str, messages.PolicyServerStatus]], bool], within_s: float = 30
    ) -> messages.PolicyServersReply:
        """Wait until the servers satisfy ``enough``."""
        end = time.monotonic() + within_s
        reply = await self.servers()
        while not enough({server.address: server for server in reply.servers}):
            assert time.monotonic() < end, reply
            reply = await self.servers(revision=reply.revision, wait_s=1)
        return reply

    async def until_served(self, n: int) -> None:
        """Wait until all servers serve a version."""
        await self.until(lambda servers: all((s.state, s.version) == ("serving", f"0.{n}") for s in servers.values()))

    async def until_said(self, text: str, within_s: float = 20) -> messages.Reason:
        """Wait until a reason of the run contains a text."""
        end = time.monotonic() + within_s
        while True:
            reasons = msgspec.convert((await self.api.ask("GET", "/v1/runs/run"))["reasons"], list[messages.Reason])
            for reason in reasons:
                if text in reason.message:
                    return reason
            assert time.monotonic() < end, reasons
            await asyncio.sleep(0.05)

    async def records(self) -> list[Trajectory]:
        """All stored trajectories."""
        records, before = [], ""
        while True:
            page = await self.api.ask("GET", f"/v1/runs/run/trajectories?limit=1000{before and f'&before={before}'}")
            for line in page["trajectories"]:
                async with self.api.session.get(f"/v1/trajectories/{line['id']}") as response:
                    records.append(codec.decode(await response.read()))
            before = page.get("next", "")
            if not before:
                return records

    async def until_played(self, count: int, within_s: float = 60) -> None:
        """Wait until ``count`` more episodes have ended."""

        async def ended() -> int:
            return sum((await self.api.ask("GET", "/v1/runs/run"))["episodes"].values())

        target, end = await ended() + count, time.monotonic() + within_s
        while await ended() < target:
            assert time.monotonic() < end, await self.api.ask("GET", "/v1/runs/run")
            await asyncio.sleep(0.05)

    async def check_truth(
        self, weights: Callable[[Segment, Version], Floats] = lambda segment, version: weights_of(version)
    ) -> set[str]:
        """Check that no episode failed, and that the recorded weights sampled each turn; returns the versions."""
        records = await self.records()
        versions: set[str] = set()
        for record in records:
            assert record.status in ("finished", "truncated"), (record.status, record.failure)
            for segment in record.segments:
                for turn in segment.turns:
                    version = next(run.version for run in segment.versions if run.end >= turn.end)
                    versions.add(str(version))
                    prompt, sampled = segment.token_ids[: turn.start], segment.token_ids[turn.start : turn.end]
                    expected = Model(weights(segment, version)).log_prob(prompt.tolist(), sampled.tolist())
                    recorded = float(segment.logprobs[turn.start : turn.end].sum())
                    assert abs(recorded - expected) < 1e-3, (
                        f"a turn of {record.id} was not sampled by version {version}"
                    )
        return versions


def cut_short(weights: messages.Weights) -> messages.Weights:
    """Truncate the file of weights to half its size."""
    path = Path(weights.path) / FILE
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return weights


@asynccontextmanager
async def deployment(
    tmp_path: Path,
    *,
    servers: int = 2,
    slots: int = SLOTS,
    tapped: bool = False,
    slow_s: float = 0.02,
    imports: Sequence[str] = (),
) -> AsyncIterator[tuple[Deployment, list[Tap], Process]]:
    """Run doubles in this event loop, an orchestrator process, and a worker process."""
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(double()) for _ in range(servers)]
        for address in addresses:
            await post(address, "/misbehave", {"slow_s": slow_s})
        taps: list[Tap] = []
        if tapped:
            pairs = [await stack.enter_async_context(tap(address)) for address in addresses]
            taps, addresses = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        deployed, orchestrator = await stack.enter_async_context(working(tmp_path, addresses, slots, imports))
        yield deployed, taps, orchestrator


@asynccontextmanager
async def working(
    tmp_path: Path, addresses: list[str], slots: int, imports: Sequence[str] = ()
) -> AsyncIterator[tuple[Deployment, Process]]:
    """Run an orchestrator process, and a worker process that imports ``imports``."""
    orchestrator = Process(tmp_path / "data")
    async with AsyncExitStack() as stack:
        stack.callback(orchestrator.end)
        base = await asyncio.to_thread(orchestrator.start)
        session = await stack.enter_async_context(aiohttp.ClientSession(base))
        processes = stack.enter_context(Processes(tmp_path / "logs"))
        imported = [part for module in imports for part in ("--import", module)]
        processes.add(
            "worker",
            *("-m", "headrace_workers", "--orchestrator", base, "--name", "w", "--slots", str(slots), *imported),
        ).start()
        yield Deployment(base, Api(session), tmp_path, addresses), orchestrator
