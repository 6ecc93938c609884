from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.fork_server import ForkServer
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

Run = Callable[..., Awaitable[ExecResult]]
"""Runs Python code: ``code``, and by name ``stdin``, ``files`` and fields of ``Limits``."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of Docker use the daemon of this session, which is made before the check for leftovers begins."""
    for item in items:
        if isinstance(item, pytest.Function) and _is_about_docker(item):
            item.fixturenames = ["docker", *(name for name in item.fixturenames if name != "docker")]


@pytest.fixture(autouse=True)
def _docker_is_ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if _is_about_docker(request.node):
        served = request.getfixturevalue("docker")
        monkeypatch.setenv("DOCKER_HOST", served.daemon.host)
        monkeypatch.setenv("HEADRACE_DOCKER_IMAGE", served.python)


def _is_about_docker(item: pytest.Item) -> bool:
    return any(mark.args == ("docker",) for mark in item.iter_markers("component"))


@pytest.fixture
async def fresh() -> AsyncIterator[BubblewrapRuntime]:
    runtime = BubblewrapRuntime()
    yield runtime
    await runtime.close()


@pytest.fixture
async def sandbox(fresh: BubblewrapRuntime) -> Sandbox:
    """A persistent sandbox."""
    return await fresh.open(Template(files={"given/x.txt": b"given"}), 300.0)


@pytest.fixture
async def forked() -> AsyncIterator[ForkServer]:
    server = ForkServer()
    yield server
    await server.close()


@pytest.fixture(params=["fresh", "forked"])
async def run(request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    """Runs a program in a fresh sandbox, and in a fork of a warm interpreter."""
    runtime: Any = BubblewrapRuntime() if request.param == "fresh" else ForkServer()

    async def run_code(code: str, *, stdin: bytes = b"", files: dict[str, bytes] | None = None, **limits: Any) -> Any:
        bounds = Limits(**{"wall_s": 20.0, **limits})
        if isinstance(runtime, ForkServer):
            return await runtime.run(PythonProgram(code=code, stdin=stdin, files=files or {}), bounds)
        return await runtime.run(
            SandboxCommand(
                arguments=["/usr/bin/python3", "-I", "main.py"],
                stdin=stdin,
                files={"main.py": code.encode(), **(files or {})},
            ),
            bounds,
        )

    yield run_code
    await runtime.close()
