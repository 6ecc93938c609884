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
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

from headrace.errors import SandboxFailure
from headrace_sandbox.host import owner
from headrace_sandbox.host.watch import to_the_end
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template, check_room, check_ttl
from headrace_sandbox.runtimes.docker import container as made
from headrace_sandbox.runtimes.docker.container import Image
from headrace_sandbox.runtimes.docker.daemon import Daemon
from headrace_sandbox.runtimes.docker.exec import Brought, Container, told, unkillable
from headrace_sandbox.runtimes.docker.guest_files import begin, check_size, not_put, require, unpack, variables
from headrace_sandbox.runtimes.docker.persistent import PUT_LIMITS, DockerSandbox

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
    _images: ClassVar[dict[str, Image]] = {}
    """By id, which stands for the content: what was found in an image holds for ever."""

    def __init__(self, host: str | None = None, image: str | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``, ``daemon-unreachable``, ``bad-address`` or ``no-filter``."""
        self._daemon = Daemon(host)
        self._image = image or os.environ.get(SETTING)
        self._looking = asyncio.Lock()
        self._given = made.Given(
            processors=int(self._daemon.info.get("NCPU") or 1),
            filter=_filter(self._daemon),
            folder=made.PODMANS_FOLDER if self._daemon.is_podman else made.OWN_FOLDER,
            rlimits=_rlimits(self._daemon),
        )
        self._opened: set[DockerSandbox] = set()
        self._stuck: list[Container] = []
        self.isolation = _isolation(self._daemon)

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run a command in a container of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        check_room(command.files, limits)
        image = await self._known(None)
        if not image.is_kept:
            return await self._run_alone(image, command, limits, begun_at)
        check_size(command.arguments, command.environment)
        async with self._container(image, limits) as container:
            await container.start()
            brought = Brought(command.arguments, command.stdin)
            if command.files and "python3" in image.programs:
                brought = begin(command.files, command.arguments)
                brought = brought._replace(stdin=brought.stdin + command.stdin)
            elif command.files:
                require(image, "tar", "files")
                put = await container.run(unpack(command.files), PUT_LIMITS, [container.kill])
                if put.returncode != 0:
                    raise not_put(put)
            return await self._result(container, brought, command.environment, limits, begun_at)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a container of its own. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        check_room(program.files, limits)
        check_size([], program.environment)
        image = await self._known(None)
        require(image, "python3", "Python programs")
        brought = begin(program.files, program.arguments, program.code)
        brought = brought._replace(stdin=brought.stdin + program.stdin)
        async with self._container(image, limits) as container:
            await container.start()
            return await self._result(container, brought, program.environment, limits, begun_at)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A container that lives on. Raises SandboxFailure; ``image-unfit`` where the image has no ``sh`` and
        ``sleep``."""
        check_ttl(ttl_s)
        check_room(template.files, template.limits)
        image = await self._known(template.image)
        for program in ("sh", "sleep"):
            require(image, program, "sandboxes that live on")

        def make(left_s: float) -> Container:
            config = made.settings(image, template.limits, left_s, self._given)
            return Container(self._daemon, config, left_s)

        sandbox = DockerSandbox(make, image, template, self.isolation, ttl_s, self._stuck.append)
        await sandbox.start()
        self._opened = {sandbox, *(opened for opened in self._opened if not opened.is_closed)}
        return sandbox

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
        """End everything that it runs, and remove what it keeps. Raises SandboxFailure where something is left."""
        closed = await asyncio.gather(*(sandbox.close() for sandbox in self._opened), return_exceptions=True)
        stuck, self._stuck = self._stuck, []
        removed = await asyncio.gather(*(container.remove() for container in stuck), return_exceptions=True)
        self._daemon.close()
        for end in (*closed, *removed):
            if isinstance(end, BaseException):
                raise end

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
        async with self._container(image, LOOK_LIMITS, command) as container:
            ended = await container.run_only(b"", LOOK_LIMITS)
        programs = ended.seen.stdout.text.split() if ended.returncode == 0 else []
        return image._replace(programs=frozenset(programs) & frozenset(LOOKED_FOR))

    async def _run_alone(self, image: Image, command: Command, limits: Limits, begun_at: float) -> ExecResult:
        """In an image that has nothing else to keep it or to wait: the program is all of its container."""
        if command.files:
            require(image, "sh", "files")
        check_size(command.arguments, command.environment)
        async with self._container(image, limits, command.arguments, variables(command.environment)) as container:
            return told(container, await container.run_only(command.stdin, limits), begun_at, self.isolation)

    async def _result(
        self, container: Container, brought: Brought, given: Mapping[str, str], limits: Limits, begun_at: float
    ) -> ExecResult:
        ended = await container.run(brought._replace(variables=variables(given)), limits, [container.kill])
        return told(container, ended._replace(lost=None), begun_at, self.isolation)

    @contextlib.asynccontextmanager
    async def _container(
        self, image: Image, limits: Limits, command: Sequence[str] | None = None, given: Sequence[str] = ()
    ) -> AsyncIterator[Container]:
        """A container for one call."""
        config = made.settings(image, limits, limits.wall_s + SPARE_S, self._given, command)
        container = Container(self._daemon, {**config, "Env": list(given)}, limits.wall_s + SPARE_S)
        try:
            await container.make()
            yield container
        except SandboxFailure as failure:
            if failure.kind == "unkillable":
                self._stuck.append(container)  # waiting for it would hold up this call once more
            raise
        finally:
            if container not in self._stuck and not await to_the_end(container.remove()):
                self._stuck.append(container)
                raise unkillable()


def _filter(daemon: Daemon) -> str:
    """The filter of system calls: Docker takes the text, Podman a file on its own machine, which this one must be."""
    text = json.dumps(made.profile())
    if not daemon.is_podman:
        return text
    path = owner.state_folder() / f"filter-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        written = path.with_suffix(f".{owner.me()}")
        written.write_text(text)
        written.replace(path)
    return str(path)


def _rlimits(daemon: Daemon) -> dict[str, int]:
    """Podman raises the number of processes of a user, which it may not do everywhere. This is what it has itself, and
    far above what the programs of all sandboxes together may have."""
    return {"nproc": 1 << 15} if daemon.is_podman else {}


def _isolation(daemon: Daemon) -> Isolation:
    """What isolates, as the daemon says. Raises SandboxFailure ``no-filter`` where it filters no system calls."""
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
