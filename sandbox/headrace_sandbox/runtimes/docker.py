"""The runtime named ``docker``: containers of a Docker daemon, or of Podman's socket, hardened.

* A program runs in a container of its own, or in one that lives on, always as a user that may do nothing.
* The template names the image, else the setting HEADRACE_DOCKER_IMAGE; nothing is pulled, and nothing else takes its
  place.
* ``run`` takes any image that has the command. What lives on needs ``sh`` and ``sleep`` in the image, and Python what
  runs Python.
* Where the image has ``sleep``, a container ends by itself when its time of life is over; ``sweep`` removes what a
  killed supervisor left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes import docker_container as made
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template, checked_path, not_offered
from headrace_sandbox.runtimes.docker_container import Image
from headrace_sandbox.runtimes.docker_daemon import Daemon
from headrace_sandbox.runtimes.docker_exec import Container, Ended, environment
from headrace_sandbox.runtimes.docker_files import begin, put, require
from headrace_sandbox.runtimes.verdicts import result_of
from headrace_sandbox.supervise import Verdict

SETTING = "HEADRACE_DOCKER_IMAGE"

LOOKED_FOR = ("sh", "sleep", "python3", "bash", "tar")
"""Programs of an image that matter here."""

LOOK = 'for name; do command -v "$name" >/dev/null && echo "$name"; done; true'

LOOK_LIMITS = Limits(wall_s=60.0, memory_bytes=64 << 20, disk_bytes=1 << 20)

SPARE_S = 120.0
"""So much longer than its program may run lives the container of one call: for making and for killing it."""

ACTIVE = {
    "MemoryLimit": "memory_bytes",
    "PidsLimit": "pids",
    "CpuCfsQuota": "cpus",
}
"""What the daemon says that it can bound, and the limits that this enforces."""


class Docker:
    """The runtime. ``host``: the daemon's address, else DOCKER_HOST; ``image``: for templates that name none."""

    name = "docker"

    def __init__(self, host: str | None = None, image: str | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``, ``daemon-unreachable``, ``bad-address`` or ``no-filter``."""
        self._daemon = Daemon(host)
        self._image = image or os.environ.get(SETTING)
        self._images: dict[str, Image] = {}
        self._looking = asyncio.Lock()
        self.isolation = _isolation(self._daemon)

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a container of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        check(command.files)
        image = await self._known(None)
        if not image.is_kept:
            return await self._run_alone(image, command, limits, begun_at)
        async with self._container(made.settings(image, limits, limits.wall_s + SPARE_S), limits.wall_s) as container:
            await container.start()
            if command.files and "python3" in image.programs:
                arguments, stdin = begin(command.files, command.arguments, command.stdin)
            else:
                await put(container, image, command.files)
                arguments, stdin = list(command.arguments), command.stdin
            return await self._result(container, arguments, stdin, command.environment, limits, begun_at)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a container of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        check(program.files)
        image = await self._known(None)
        require(image, "python3")
        arguments, stdin = begin(program.files, program.arguments, program.stdin, program.code)
        async with self._container(made.settings(image, limits, limits.wall_s + SPARE_S), limits.wall_s) as container:
            await container.start()
            return await self._result(container, arguments, stdin, program.environment, limits, begun_at)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Not offered yet."""
        raise not_offered(self.name, "sandboxes that live on")

    async def sweep(self) -> int:
        """Remove the containers whose time is over or whose supervisor is gone; gives how many there were. Raises
        SandboxFailure."""
        found = await self._daemon.call(lambda client: client.containers(all=True, filters={"label": made.OWNER}))
        gone = [entry["Id"] for entry in found if made.is_abandoned(entry["Labels"] or {}, time.time())]
        for id_ in gone:
            container = Container(self._daemon, {}, 0.0)
            container.name = id_
            await container.remove()
        return len(gone)

    async def close(self) -> None:
        """End everything that it runs, and remove what it keeps."""
        self._daemon.close()

    async def _known(self, name: str | None) -> Image:
        """An image, and what is in it; found out once, by looking."""
        wanted = name or self._image
        if not wanted:
            raise SandboxFailure(
                "No image was named.",
                hint=f"Name one in the template, or for all templates in the setting {SETTING}.",
                kind="no-image",
                retryable=False,
            )
        async with self._looking:
            found = await self._daemon.call(lambda client: client.inspect_image(wanted))
            if found["Id"] not in self._images:
                volumes = tuple((found.get("Config") or {}).get("Volumes") or ())
                self._images[found["Id"]] = await self._looked(Image(found["Id"], volumes, frozenset()))
        return self._images[found["Id"]]

    async def _looked(self, image: Image) -> Image:
        command = ["sh", "-c", LOOK, "sh", *LOOKED_FOR]
        config = made.settings(image, LOOK_LIMITS, LOOK_LIMITS.wall_s, command)
        async with self._container(config, LOOK_LIMITS.wall_s) as container:
            ended = await container.run_only(b"", LOOK_LIMITS)
        programs = ended.seen.stdout.text.split() if ended.returncode == 0 else []
        return image._replace(programs=frozenset(programs) & frozenset(LOOKED_FOR))

    async def _run_alone(self, image: Image, command: Command, limits: Limits, begun_at: float) -> ExecResult:
        """In an image that has nothing else to keep it or to wait: the program is all of its container."""
        if command.files:
            require(image, "sh")
        config = made.settings(image, limits, limits.wall_s + SPARE_S, command.arguments)
        config["Env"] = environment(command.environment)
        async with self._container(config, limits.wall_s) as container:
            return self._told(container, await container.run_only(command.stdin, limits), begun_at)

    async def _result(
        self,
        container: Container,
        arguments: Sequence[str],
        stdin: bytes,
        variables: Mapping[str, str],
        limits: Limits,
        begun_at: float,
    ) -> ExecResult:
        ended = await container.run(arguments, stdin, environment(variables), limits, only=True)
        return self._told(container, ended._replace(lost=None), begun_at)

    def _told(self, container: Container, ended: Ended, begun_at: float) -> ExecResult:
        return told(container, ended, begun_at, self.isolation)

    @contextlib.asynccontextmanager
    async def _container(self, config: dict[str, object], wall_s: float) -> AsyncIterator[Container]:
        container = Container(self._daemon, config, wall_s + SPARE_S)
        try:
            await container.make()
            yield container
        finally:
            await to_end(container.remove())


def told(container: Container, ended: Ended, begun_at: float, isolation: Isolation) -> ExecResult:
    """The result of a program that ended. Raises SandboxFailure ``sandbox-lost``."""
    seen = ended.seen
    if container.is_counted:
        isolation = msgspec.structs.replace(isolation, active=[*isolation.active, "cpu_s"])
    start_s = max(0.0, time.monotonic() - begun_at - seen.wall_s)
    verdict = Verdict(ended.returncode, seen.limit, seen.stdout, seen.stderr, seen.wall_s)
    return msgspec.structs.replace(result_of(verdict, ended.usage, start_s, isolation), lost=ended.lost)


def check(files: Mapping[str, bytes]) -> None:
    """Raises SandboxFailure ``bad-path``."""
    for path in files:
        checked_path(path)


async def to_end(work: Coroutine[Any, Any, None]) -> None:
    """Do it to its end, even if whoever waits for it is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _isolation(daemon: Daemon) -> Isolation:
    """What isolates, as the daemon says. Raises SandboxFailure ``no-filter`` where it filters no system calls."""
    made.profile()
    if not any("seccomp" in option for option in daemon.info.get("SecurityOptions") or ()):
        raise SandboxFailure(
            "The Docker daemon has no filter of system calls.",
            hint="It was built, or its kernel was, without seccomp; use another one.",
            kind="no-filter",
            retryable=False,
        )
    active = ["wall_s", "output_bytes", "disk_bytes", "file_bytes", "open_files"]
    active += [limit for ability, limit in ACTIVE.items() if daemon.info.get(ability)]
    versions = {"docker": daemon.version, "kernel": str(daemon.info.get("KernelVersion"))}
    return Isolation(runtime="docker", versions=versions, active=active)
