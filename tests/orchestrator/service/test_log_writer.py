"""The log writer process of an orchestrator that runs as its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from headrace.errors import DataDirectoryInUse
from headrace_orchestrator.buffer import data_directory
from headrace_orchestrator.buffer.data_directory import DataDirectory
from headrace_orchestrator.buffer.log.writer_process import SUPPORTED
from headrace_orchestrator.service.fsck.fsck import check
from tests.e2e.processes import answers, wait_for
from tests.orchestrator.buffer.test_log_writer_process import ENDS_S, Watched, descriptors
from tests.orchestrator.serving import Api, record_for, submission, until

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the log's writer has no process of its own here")


async def test_it_ends_with_the_orchestrator_and_nobody_can_take_the_directory_before(
    service: Service, data_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data_directory, "ENDED_OWNER_WAIT_S", 0.1)
    async with aiohttp.ClientSession(service.start()) as session:
        api = Api(session)
        await api.create_run()
        with Watched(service.writer) as writer:
            writer.send(signal.SIGSTOP)
            stored = asyncio.create_task(api.lease(free=4))
            await asyncio.sleep(0)
            service.kill()
            with pytest.raises(aiohttp.ClientError):
                await stored
            with pytest.raises(DataDirectoryInUse, match="still locked, though its last orchestrator, process"):
                DataDirectory.claim(data_dir)
            writer.send(signal.SIGCONT)
            writer.wait()
        DataDirectory.claim(data_dir).close()
    assert "Traceback" not in service.said


def test_a_restart_at_once_after_a_kill_works_and_nothing_acknowledged_is_lost(service: Service, data_dir: Path):
    async def scenario(name: str) -> None:
        async with aiohttp.ClientSession(service.start()) as session:
            await Api(session).create_run(name=name)
            assert {run["name"] for run in await Api(session).ask("GET", "/v1/runs")} == names[name]

    names = {"one": {"one"}, "two": {"one", "two"}}
    for name in names:
        asyncio.run(scenario(name))
        service.kill()
    assert "Traceback" not in service.said


def test_a_service_whose_writer_was_killed_before_its_first_batch_ends_with_a_status(service: Service):
    service.start()
    os.kill(service.writer, signal.SIGKILL)
    assert service.wait() == 1
    assert "the process that writes the log ended (SIGKILL)" in service.said


async def test_a_service_whose_writer_was_killed_tells_its_clients_and_ends_with_a_status(service: Service):
    async with aiohttp.ClientSession(service.start()) as session:
        api = Api(session)
        await api.create_run(max_concurrent=1)
        await api.lease(free=4)
        waiting = {"worker": "w", "slots": 1, "free": 1, "wait_s": 30}
        answer = asyncio.create_task(api.ask("POST", "/v1/worker/lease", waiting, status=503))
        await until(lambda: is_waiting(session))
        os.kill(service.writer, signal.SIGKILL)
        told = await answer
        assert "the process that writes the log ended (SIGKILL)" in told["detail"]
        assert "starts it anew" in told["hint"]
    assert service.wait() == 1
    assert "Traceback" not in service.said
    async with aiohttp.ClientSession(service.start()) as session:
        assert [run["name"] for run in await Api(session).ask("GET", "/v1/runs")] == ["run"]


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_all_processes_ends_the_orchestrator_gracefully(service: Service, data_dir: Path, name: int):
    async with aiohttp.ClientSession(service.start()) as session:
        api = Api(session)
        await api.create_run()
        await api.play(free=8)
        with Watched(service.writer) as writer:
            os.killpg(service.pid, name)
            assert service.wait() == 0
            writer.wait()
    assert "Traceback" not in service.said
    DataDirectory.claim(data_dir).close()
    report = check(data_dir)
    assert report.findings == []


def test_a_signal_to_all_processes_during_the_start_ends_it_gracefully(service: Service):
    service.begin()
    wait_for("the writer is there", lambda: bool(service.writers), every_s=0.001)
    os.killpg(service.pid, signal.SIGINT)
    assert service.wait() == 0
    assert "Traceback" not in service.said


def test_the_writer_has_only_the_descriptors_that_it_needs(service: Service, data_dir: Path):
    service.start()
    has = descriptors(service.writer)
    folder, said = str(data_dir), str(service.output)
    alone = [target for target in has if not target.startswith(("socket:", "/memfd:headrace-log"))]
    assert alone == sorted(["/dev/null", said, said, f"{folder}/log/00000001.log", f"{folder}/owner"])
    assert sum(target.startswith("socket:") for target in has) == 1
    assert service.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("/nonexistent/python",), "Error: The process that writes the log cannot be started: No such file"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "the process that writes the log ended (status 3)"),
    ],
    ids=["no such program", "it ends at once"],
)
def test_a_start_without_a_writer_ends_with_one_error_message(data_dir: Path, command: tuple[str, ...], sentence: str):
    code = (
        "import sys\n"
        "from headrace_orchestrator.buffer.log import writer_process\n"
        "from headrace_orchestrator.cli import main\n"
        f"writer_process.COMMAND = {command!r}\n"
        f"sys.argv[1:] = ['orchestrator', '--data', {str(data_dir)!r}, '--port', '0']\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 1
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
    DataDirectory.claim(data_dir).close()


def test_an_orchestrator_that_is_stopped_for_a_while_loses_nothing(service: Service, data_dir: Path):
    async def scenario() -> None:
        async with aiohttp.ClientSession(service.start()) as session:
            api = Api(session)
            await api.create_run()
            attempts = await api.lease(free=4)
            submitting = asyncio.create_task(api.submit(submission((a, record_for(a)) for a in attempts)))
            for number in (service.pid, service.writer):
                os.kill(number, signal.SIGSTOP)
            for number in (service.pid, service.writer):
                os.kill(number, signal.SIGCONT)
            assert {result.verdict for result in await submitting} == {"accepted"}

    asyncio.run(scenario())
    assert service.end(signal.SIGTERM) == 0
    assert check(data_dir).findings == []


# Helpers ----------------------------------------------------------------------------------------------------------


class Service:
    """An orchestrator in a process group of its own, as a shell starts it."""

    def __init__(self, data: Path, output: Path) -> None:
        self.data = data
        self.output = output
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        command = [
            sys.executable,
            "-m",
            "headrace_orchestrator.cli",
            "orchestrator",
            "--data",
            self.data,
            "--port",
            "0",
        ]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def start(self) -> str:
        """Start it; returns its address when it is ready."""
        (self.data / "address").unlink(missing_ok=True)
        self.begin()
        wait_for("the orchestrator is ready", lambda: self._is_ready() or self._has_ended())
        assert not self._has_ended(), self.said
        return (self.data / "address").read_text().strip()

    def _is_ready(self) -> bool:
        address = self.data / "address"
        return address.exists() and answers(f"{address.read_text().strip()}/readyz")

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def writers(self) -> list[int]:
        return children(self.pid)

    @property
    def writer(self) -> int:
        (pid,) = self.writers
        return pid

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(ENDS_S)

    def end(self, name: signal.Signals) -> int:
        os.kill(self.pid, name)
        return self.wait()

    def kill(self) -> None:
        assert self.end(signal.SIGKILL) == -signal.SIGKILL


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


@pytest.fixture
def service(data_dir: Path) -> Iterator[Service]:
    found = Service(data_dir, data_dir.parent / "said")
    yield found
    if not found._has_ended():
        found.kill()


async def is_waiting(session: aiohttp.ClientSession) -> bool:
    """True if a worker that asked for work has been heard."""
    async with session.get("/v1/status") as answer:
        return "w" in {worker["worker"] for worker in (await answer.json())["workers"]}
