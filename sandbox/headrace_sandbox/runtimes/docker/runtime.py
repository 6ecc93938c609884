"""The runtime named ``docker``: containers of a Docker daemon, or of Podman's socket, hardened.

* A program runs in a container of its own, or in a persistent one, always as a user without rights.
* The template names the image, else the setting HEADRACE_DOCKER_IMAGE; it is not pulled, and never replaced by
  another.
* ``run`` takes any image that has the command. Persistent sandboxes need ``sh`` and ``sleep`` in the image, and Python
  programs need Python.
* Where the image has ``sleep``, a container ends itself at its expiry; ``sweep`` removes the containers of a killed
  supervisor.
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
from headrace_sandbox.host.supervisor import state_folder, this_supervisor
from headrace_sandbox.host.tasks import run_to_completion
from headrace_sandbox.result import ExecResult, Isolation, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template, check_room, check_ttl
from headrace_sandbox.runtimes.docker.container import DockerContainer, container_result, container_unkillable
from headrace_sandbox.runtimes.docker.container_settings import (
    DOCKER_FOLDER,
    OWNER,
    PODMAN_FOLDER,
    DaemonSettings,
    DockerImage,
    container_settings,
    is_abandoned,
    seccomp_profile,
)
from headrace_sandbox.runtimes.docker.daemon import Daemon
from headrace_sandbox.runtimes.docker.exec_programs import (
    ExecProgram,
    check_size,
    files_not_written,
    program_variables,
    program_with_files,
    require_program,
    unpacking_program,
)
from headrace_sandbox.runtimes.docker.sandbox import WRITE_LIMITS, DockerSandbox

SETTING = "HEADRACE_DOCKER_IMAGE"

USED_PROGRAMS = ("sh", "sleep", "python3", "bash", "tar")
"""Programs of an image that this runtime uses."""

INSPECT_SCRIPT = 'for name; do command -v "$name" >/dev/null && echo "$name"; done; true'

INSPECT_LIMITS = Limits(wall_s=60.0, memory_bytes=64 << 20, disk_bytes=1 << 20)

SPARE_S = 120.0
"""Time of a container for one call beyond its program's limit: for making it, and for killing the program."""

LIMITS_BY_ABILITY = {
    "MemoryLimit": "memory_bytes",
    "PidsLimit": "pids",
    "CpuCfsQuota": "cpus",
}
"""The daemon's reported abilities, and the limits that they enforce."""


class DockerRuntime:
    """The runtime. ``host``: the daemon's address, else DOCKER_HOST; ``image``: for templates that name none."""

    name = "docker"
    _images: ClassVar[dict[str, DockerImage]] = {}
    """Inspected images by id, which names the content: the result of an inspection holds for ever."""

    def __init__(self, host: str | None = None, image: str | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``, ``daemon-unreachable``, ``bad-address`` or ``no-filter``."""
        self._daemon = Daemon(host)
        self._image = image or os.environ.get(SETTING)
        self._inspect_lock = asyncio.Lock()
        self._settings = DaemonSettings(
            processors=int(self._daemon.info.get("NCPU") or 1),
            filter=_seccomp_option(self._daemon),
            folder=PODMAN_FOLDER if self._daemon.is_podman else DOCKER_FOLDER,
            rlimits=_rlimits(self._daemon),
        )
        self._sandboxes: set[DockerSandbox] = set()
        self._unkillable: list[DockerContainer] = []
        self.isolation = _isolation(self._daemon)

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in a container of its own. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        check_room(command.files, limits)
        image = await self._inspected_image(None)
        if not image.takes_execs:
            return await self._run_alone(image, command, limits, started_at)
        check_size(command.arguments, command.environment)
        async with self._container(image, limits) as container:
            await container.start()
            program = ExecProgram(command.arguments, command.stdin)
            if command.files and "python3" in image.programs:
                program = program_with_files(command.files, command.arguments)
                program = program._replace(stdin=program.stdin + command.stdin)
            elif command.files:
                require_program(image, "tar", "files")
                write_outcome = await container.run(unpacking_program(command.files), WRITE_LIMITS, [container.kill])
                if write_outcome.returncode != 0:
                    raise files_not_written(write_outcome.streams.stderr.text)
            return await self._result(container, program, command.environment, limits, started_at)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a container of its own. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        check_room(program.files, limits)
        check_size([], program.environment)
        image = await self._inspected_image(None)
        require_program(image, "python3", "Python programs")
        exec_program = program_with_files(program.files, program.arguments, program.code)
        exec_program = exec_program._replace(stdin=exec_program.stdin + program.stdin)
        async with self._container(image, limits) as container:
            await container.start()
            return await self._result(container, exec_program, program.environment, limits, started_at)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A persistent container. Raises SandboxFailure; ``image-unfit`` where the image has no ``sh`` or ``sleep``."""
        check_ttl(ttl_s)
        check_room(template.files, template.limits)
        image = await self._inspected_image(template.image)
        for program in ("sh", "sleep"):
            require_program(image, program, "persistent sandboxes")

        def make_container(left_s: float) -> DockerContainer:
            config = container_settings(image, template.limits, left_s, self._settings)
            return DockerContainer(self._daemon, config, left_s)

        sandbox = DockerSandbox(make_container, image, template, self.isolation, ttl_s, self._unkillable.append)
        await sandbox.start()
        self._sandboxes = {sandbox, *(opened for opened in self._sandboxes if not opened.is_closed)}
        return sandbox

    async def sweep(self) -> int:
        """Remove the containers that have expired or whose supervisor is dead; returns their number. Raises
        SandboxFailure."""
        containers = await self._daemon.call(lambda client: client.containers(all=True, filters={"label": OWNER}))
        abandoned = [entry["Id"] for entry in containers if is_abandoned(entry["Labels"] or {}, time.time())]
        for id_ in abandoned:
            container = DockerContainer(self._daemon, {}, 0.0)
            container.name = id_
            await container.remove()
        return len(abandoned)

    async def close(self) -> None:
        """End everything that it runs, and remove everything that it keeps. Raises SandboxFailure if something is
        left."""
        closed = await asyncio.gather(*(sandbox.close() for sandbox in self._sandboxes), return_exceptions=True)
        unkillable, self._unkillable = self._unkillable, []
        removed = await asyncio.gather(*(container.remove() for container in unkillable), return_exceptions=True)
        self._daemon.close()
        for end in (*closed, *removed):
            if isinstance(end, BaseException):
                raise end

    async def _inspected_image(self, name: str | None) -> DockerImage:
        """An image with the programs in it, which are inspected once."""
        image_name = name or self._image
        if not image_name:
            raise SandboxFailure(
                "No image was named.",
                hint=f"Name one in the template, or for all templates in the setting {SETTING}.",
                kind="no-image",
                retryable=False,
            )
        async with self._inspect_lock:
            reply = await self._daemon.call(lambda client: client.inspect_image(image_name))
            if reply["Id"] not in self._images:
                volumes = tuple((reply.get("Config") or {}).get("Volumes") or ())
                self._images[reply["Id"]] = await self._inspect(DockerImage(reply["Id"], volumes, frozenset()))
        return self._images[reply["Id"]]

    async def _inspect(self, image: DockerImage) -> DockerImage:
        command = ["sh", "-c", INSPECT_SCRIPT, "sh", *USED_PROGRAMS]
        async with self._container(image, INSPECT_LIMITS, command) as container:
            outcome = await container.run_only(b"", INSPECT_LIMITS)
        programs = outcome.streams.stdout.text.split() if outcome.returncode == 0 else []
        return image._replace(programs=frozenset(programs) & frozenset(USED_PROGRAMS))

    async def _run_alone(
        self, image: DockerImage, command: SandboxCommand, limits: Limits, started_at: float
    ) -> ExecResult:
        """Run a command as the only program of a container, whose image could not wait for others."""
        if command.files:
            require_program(image, "sh", "files")
        check_size(command.arguments, command.environment)
        async with self._container(
            image, limits, command.arguments, program_variables(command.environment)
        ) as container:
            return container_result(
                container, await container.run_only(command.stdin, limits), started_at, self.isolation
            )

    async def _result(
        self,
        container: DockerContainer,
        program: ExecProgram,
        variables: Mapping[str, str],
        limits: Limits,
        started_at: float,
    ) -> ExecResult:
        program = program._replace(variables=program_variables(variables))
        outcome = await container.run(program, limits, [container.kill])
        return container_result(container, outcome._replace(lost=None), started_at, self.isolation)

    @contextlib.asynccontextmanager
    async def _container(
        self, image: DockerImage, limits: Limits, command: Sequence[str] | None = None, variables: Sequence[str] = ()
    ) -> AsyncIterator[DockerContainer]:
        """A container for one call."""
        config = container_settings(image, limits, limits.whole_s + SPARE_S, self._settings, command)
        container = DockerContainer(self._daemon, {**config, "Env": list(variables)}, limits.whole_s + SPARE_S)
        try:
            await container.make()
            yield container
        except SandboxFailure as failure:
            if failure.kind == "unkillable":
                self._unkillable.append(container)  # removing it would delay this call once more
            raise
        finally:
            if container not in self._unkillable and not await run_to_completion(container.remove()):
                self._unkillable.append(container)
                raise container_unkillable()


def _seccomp_option(daemon: Daemon) -> str:
    """The system-call filter as the daemon accepts it: Docker takes the text, Podman the path of a file on its own
    machine, which must be this one."""
    text = json.dumps(seccomp_profile())
    if not daemon.is_podman:
        return text
    path = state_folder() / f"filter-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        incomplete = path.with_suffix(f".{this_supervisor()}")
        incomplete.write_text(text)
        incomplete.replace(path)
    return str(path)


def _rlimits(daemon: Daemon) -> dict[str, int]:
    """Rlimits that all containers share. Podman would raise its limit of a user's processes, which fails on some
    machines; this is its own limit, far above that of all sandboxes together."""
    return {"nproc": 1 << 15} if daemon.is_podman else {}


def _isolation(daemon: Daemon) -> Isolation:
    """The isolation that the daemon reports. Raises SandboxFailure ``no-filter`` if it filters no system calls."""
    if not any("seccomp" in option for option in daemon.info.get("SecurityOptions") or ()):
        raise SandboxFailure(
            "The Docker daemon has no system-call filter.",
            hint="It was built, or its kernel was, without seccomp; use another one.",
            kind="no-filter",
            retryable=False,
        )
    active = ["wall_s", "output_bytes", "disk_bytes", "file_bytes", "open_files"]
    active += [limit for ability, limit in LIMITS_BY_ABILITY.items() if daemon.info.get(ability)]
    versions = {"docker": daemon.version, "kernel": str(daemon.info.get("KernelVersion"))}
    return Isolation(runtime="docker", versions=versions, active=active)
