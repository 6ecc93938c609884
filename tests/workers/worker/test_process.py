"""The worker as a real process, against a minimal orchestrator."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.errors import SetupError
from headrace.runspec import RunSpec
from headrace.trajectory import Task
from headrace_workers import cli
from headrace_workers.policies import load_in_process_policy
from tests.builders import make_id
from tests.workers.fakes import assignment
from tests.workers.orchestrator import Orchestrator, orchestrating

ROOT = Path(__file__).parents[3]
ARITHMETIC = Task(environment="math:Arithmetic-v0", seed=1)


@asynccontextmanager
async def process(stub: Orchestrator, *arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "headrace_workers", "--orchestrator", stub.url, *arguments]
    child = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]


async def ended(child: asyncio.subprocess.Process) -> tuple[int, list[dict[str, Any]]]:
    async with asyncio.timeout(30):
        _, stderr = await child.communicate()
    assert child.returncode is not None
    return child.returncode, [json.loads(line) for line in stderr.decode().splitlines()]


async def test_sigterm_exits_with_0_after_all_records_are_submitted_and_logs_are_json_lines() -> None:
    async with orchestrating() as stub:
        stub.token = "secret"
        stub.queue = [assignment(episode=make_id(number), task=ARITHMETIC) for number in range(3)]
        options = ("--policy", "tests.workers.null_policy:make", "--slots", "2", "--name", "w-1", "--pool", "p")
        async with process(stub, *options, HEADRACE_TOKEN="secret") as child:
            await stub.until(lambda: len(stub.records) == 3)
            child.send_signal(signal.SIGTERM)
            code, lines = await ended(child)
    assert code == 0
    assert [line["event"] for line in lines] == ["worker starts", "worker ends"]
    assert {record.provenance.worker for record in stub.records} == {"w-1"}
    assert {record.status for record in stub.records} == {"finished"}


async def test_its_soft_limit_of_descriptors_is_raised_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with orchestrating() as stub:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        try:
            async with process(stub, "--policy", "tests.workers.null_policy:make") as child:
                await stub.until(lambda: stub.leases)
                assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_second_sigterm_returns_attempts_at_once() -> None:
    async with orchestrating() as stub:
        stub.queue = [assignment(task=ARITHMETIC)]
        options = ("--policy", "tests.workers.null_policy:make", "--grace-s", "600")
        async with process(stub, *options, NULL_POLICY_HANGS="1") as child:
            await stub.until(lambda: any(beat.holding for beat in stub.heartbeats))
            child.send_signal(signal.SIGTERM)
            child.send_signal(signal.SIGTERM)
            asked = len(stub.heartbeats)
            await stub.until(lambda: len(stub.heartbeats) > asked or stub.returned)
            if child.returncode is None and not stub.returned:
                child.send_signal(signal.SIGTERM)  # the first two signals may have been delivered as one
            code, lines = await ended(child)
    assert code == 0
    assert [key.episode for key in stub.returned] == [assignment().episode]
    assert "returned attempts" in [line["event"] for line in lines]


HANGS = """
import threading
from headrace.environment import register

class Hangs:
    def reset(self, seed=None):
        return "", {}

    def step(self, action):
        threading.Event().wait()

register("test:Hangs", Hangs)
"""


async def test_too_many_hanging_calls_end_the_process_with_1_and_log_the_cause(tmp_path: Path) -> None:
    module = tmp_path / "hangs.py"
    module.write_text(HANGS)
    async with orchestrating() as stub:
        stub.spec = RunSpec(name="r", limits={"environment_timeout_s": 0.2})
        task = Task(environment="test:Hangs", seed=1)
        stub.queue = [assignment(episode=make_id(number), task=task) for number in range(64)]
        options = ("--policy", "tests.workers.null_policy:make", "--slots", "64", "--import", str(module))
        async with process(stub, *options) as child:
            code, lines = await ended(child)
    assert code == 1
    assert {record.failure.kind for record in stub.records if record.failure} == {"environment-timeout"}
    assert len(stub.records) == 64
    assert any(line["event"].startswith("too many environment calls hang") for line in lines)


def test_a_policy_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    for path in ("no_such_module:make", "tests.workers.null_policy:nothing", "json:JSONDecoder", ":x"):
        with pytest.raises(SetupError):
            load_in_process_policy(path)


def test_the_token_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("HEADRACE_TOKEN", "from-environment")
    assert cli.read_token(file) == "from-file"
    assert cli.read_token(None) == "from-environment"
    file.write_text("\n")
    with pytest.raises(SetupError, match="is empty"):
        cli.read_token(file)


def test_capabilities_are_the_named_and_the_installed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "EXTRAS", {"json": "json", "absent": "no_such_module"})
    assert cli.all_capabilities("gpu, tools,") == ("gpu", "json", "tools")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--orchestrator", "nonsense"),
        ("--orchestrator", "http://[::1"),
        ("--policy-endpoint", "127.0.0.1:8471"),
        ("--log-level", "loud"),
    ],
)
def test_invalid_settings_are_refused_at_the_start(option: str, value: str) -> None:
    refused = CliRunner().invoke(cli.worker, [option, value])
    assert refused.exit_code == 2
    assert value in refused.output


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(cli.worker, ["--help"])
    assert result.exit_code == 0
    for option in (
        "--orchestrator",
        "--slots",
        "--policy-endpoint",
        "--policy",
        "--pool",
        "--capabilities",
        "--sandbox",
        "--grace-s",
    ):
        assert option in result.output
