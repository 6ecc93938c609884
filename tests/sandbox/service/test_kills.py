"""A sandbox service that is killed at random moments under load.

* None of its programs survives: its clean-up process removes them at once.
* If the clean-up process is killed too, programs end at their time limits, and the next start removes the rest.
* Clients that wait for an answer get a retryable failure, and no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.client import ServiceRuntime, client_of
from headrace_sandbox.host.cgroups.cgroup import PARENT, ROOT
from headrace_sandbox.host.processes import list_pids
from headrace_sandbox.host.supervisor import SUPERVISOR_VARIABLE, state_folder
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from tests.sandbox.service.serving import Process

pytestmark = pytest.mark.component("bubblewrap")

ROUNDS = int(os.environ.get("HEADRACE_SANDBOX_KILLS", "8"))
"""`make chaos` kills more often."""

TTL_S = 6.0
"""The lifetime of leases, and the time limit of programs."""

LIMITS = Limits(wall_s=TTL_S, memory_bytes=32 << 20)

SEED = int(os.environ.get("HEADRACE_SANDBOX_SEED", "0")) or secrets.randbits(32)


def processes(pid: int, mark: str) -> list[str]:
    """The processes of a service and of its programs, whatever their parents are."""
    remains = []
    for other in list_pids():
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{other}")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            holds = f"{SUPERVISOR_VARIABLE}={pid}-".encode() in (folder / "environ").read_bytes()
            if holds or mark in command:
                remains.append(f"{other}: {command[:100]}")
    return remains


def programs(mark: str) -> int:
    """The number of running programs with this name."""
    remains = 0
    for pid in list_pids():
        with contextlib.suppress(OSError):
            remains += Path(f"/proc/{pid}/cmdline").read_bytes().startswith(mark.encode())
    return remains


def groups(pid: int) -> list[Path]:
    """The control groups of a service."""
    remains: list[Path] = []
    for parent in (ROOT / PARENT, *ROOT.glob(f"*/{PARENT}")):
        with contextlib.suppress(OSError):
            remains += [parent / name for name in os.listdir(parent) if name.startswith(f"{pid}-")]
    return remains


def remains_of(pid: int, mark: str) -> list[str]:
    """Everything that remains of a killed service."""
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f"{pid}-" in line]
    folders = [str(path) for path in state_folder().glob(f"*/{pid}-*")]
    return [*processes(pid, mark), *map(str, groups(pid)), *mounts, *folders]


def cleanup_process_of(pid: int) -> int:
    """The process id of a service's clean-up process."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"headrace_sandbox.host.cleanup_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("it has none")


class Load:
    """Clients that keep a service busy. Programs with the mark are endless."""

    def __init__(self, client: ServiceRuntime, mark: str) -> None:
        self._client = client
        self._mark = mark
        self.answers: list[ExecResult | SandboxFailure] = []
        self.endless: list[ExecResult | SandboxFailure] = []

    async def run(self) -> None:
        """Run until the service has ended."""
        await asyncio.gather(
            *(self._one(kind) for kind in (self._short, self._program, self._lease, self._session) * 2)
        )

    async def _one(self, kind: Callable[[], Any]) -> None:
        while not self.endless or not isinstance(self.endless[-1], SandboxFailure):
            try:
                await kind()
            except SandboxFailure as failure:
                self.answers.append(failure)
                return

    async def _short(self) -> None:
        self.answers.append(await self._client.run_code(PythonProgram(code="print(1)"), LIMITS))

    async def _program(self) -> None:
        await self._never_ends(self._client.run(self._command(), LIMITS))

    async def _lease(self) -> None:
        sandbox = await self._client.open(Template(limits=LIMITS), TTL_S)
        await sandbox.write("x", b"x")
        await self._never_ends(sandbox.run(self._command(), LIMITS))

    async def _session(self) -> None:
        sandbox = await self._client.open(Template(limits=LIMITS), TTL_S)
        session = await sandbox.session("bash")
        self.answers.append(await session.run(f"(exec -a {self._mark} sleep 300) &", LIMITS))
        await self._never_ends(session.run(f"(exec -a {self._mark} sleep 300)", LIMITS))

    async def _never_ends(self, call: Any) -> None:
        try:
            self.endless.append(await call)
        except SandboxFailure as failure:
            self.endless.append(failure)
            raise

    def _command(self) -> SandboxCommand:
        script = "setsid bash -c 'exec -a $0 sleep 300' $0 & exec -a $0 sleep 300"
        return SandboxCommand(arguments=["bash", "-c", script, self._mark])


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s"


async def eventually(holds: Callable[[], object], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.05)


@pytest.mark.timeout(60 + 20 * ROUNDS)
async def test_nothing_outlives_a_service_that_is_killed_at_random_moments_under_load(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_sandbox.client.RECONNECT_S", 0.0)
    chance = random.Random(SEED)
    before: tuple[int, str] | None = None
    kinds: set[str] = set()
    for number in range(ROUNDS):
        mark = f"killed{secrets.token_hex(6)}"
        process = await asyncio.to_thread(Process, socket_path, "--running", "8", "--memory-mib", "2048")
        try:
            if before is not None:
                assert remains_of(*before) == [], f"after the next start (seed {SEED})"
            client = client_of(process.address, wait_s=TTL_S)
            load = Load(client, mark)
            loading = asyncio.create_task(load.run())
            await asyncio.wait({loading}, timeout=chance.uniform(0.0, 0.7))
            has_cleanup = number % 3 != 2
            if not has_cleanup:
                os.kill(cleanup_process_of(process.pid), signal.SIGKILL)
        finally:
            await asyncio.to_thread(process.kill)
        async with asyncio.timeout(30):
            await loading
        await client.close()
        assert all(isinstance(answer, SandboxFailure) and answer.retryable for answer in load.endless), load.endless
        failures = [answer for answer in load.answers if isinstance(answer, SandboxFailure)]
        assert failures
        kinds |= {failure.kind for failure in failures}
        before = process.pid, mark
        if has_cleanup:
            await eventually(lambda pid=process.pid, mark=mark: not remains_of(pid, mark), 10.0)
        else:
            await eventually(lambda mark=mark: not programs(mark), TTL_S + 2.0)
    last = await asyncio.to_thread(Process, socket_path)
    assert before is not None
    assert remains_of(*before) == []
    assert await asyncio.to_thread(last.stop) == 0
    assert remains_of(last.pid, "no such mark") == []
    assert not socket_path.exists()
    assert kinds <= {"service-lost", "service-unreachable", "lease-over"}, kinds


async def test_sigterm_stops_the_service_in_order_and_it_exits_with_0(socket_path: Path) -> None:
    mark = f"stopped{secrets.token_hex(6)}"
    process = await asyncio.to_thread(Process, socket_path, "--grace-s", "1", "--warm", "1")
    client = client_of(process.address, wait_s=TTL_S)
    load = Load(client, mark)
    loading = asyncio.create_task(load.run())
    await eventually(lambda: programs(mark), 20.0)
    assert await asyncio.to_thread(process.stop) == 0
    assert remains_of(process.pid, mark) == []
    await loading
    await client.close()
