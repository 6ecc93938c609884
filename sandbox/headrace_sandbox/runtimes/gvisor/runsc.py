"""Starts runsc, gVisor's program: a kernel in user space with a first process, which is reached over its standard
input.

* Only the platform systrap: the others hang or are slow on some machines. Its only network is a loopback of its own; it
  has no socket, pipe or device of this machine.
* It inherits nothing from this process: no variable, no descriptor, no file except the system's, read-only.
* Its processes enter a control group before the first of them runs, and end with this process.
* Its processes and its folder carry the name of this supervisor, so that a later one removes them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import Cgroup
from headrace_sandbox.host.descriptors import popen_with_pipes
from headrace_sandbox.host.layout import SCRATCH, SYSTEM_FILES, USR_FOLDERS
from headrace_sandbox.host.processes import kill_all, kill_pidfd, list_pids
from headrace_sandbox.host.supervisor import SUPERVISOR_VARIABLE, owned_folder, this_supervisor

BUILT_RUNSC = Path(__file__).parents[4] / "build" / "parts" / "gvisor" / "usr" / "bin" / "runsc"
"""The program that ``make parts`` installs in a checkout."""

PLATFORM = "systrap"

FLAGS = (
    f"--platform={PLATFORM}",
    "--network=none",
    "--host-uds=none",
    "--host-fifo=none",
    "--ignore-cgroups",  # our own group bounds it
    "--directfs=false",  # a separate process opens files, not the kernel that serves programs
    "--file-access-mounts=exclusive",  # the system's files may be cached, because they do not change
)

CAPABILITIES = (
    "CAP_SYS_ADMIN",
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_DAC_OVERRIDE",
)
"""Capabilities of the first process in the sandbox's own kernel. They have no effect on this machine, and no program
has one."""

GUEST_OPEN_FILES = 1024
"""Most open descriptors of the first process and of programs."""

QUOTED_BYTES = 2000
"""The quoted length of runsc's messages when it failed."""

_numbers = itertools.count()


def find_runsc() -> Path:
    """The program runsc: from ``HEADRACE_RUNSC``, else ``make parts``, else PATH. Raises SandboxFailure
    ``runtime-missing``."""
    configured = os.environ.get("HEADRACE_RUNSC")
    if configured:
        candidates = [Path(configured)]
    else:
        on_path = shutil.which("runsc")
        candidates = [BUILT_RUNSC, *([Path(on_path)] if on_path else [])]
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise SandboxFailure(
        f"runsc is not installed{f' at {configured}' if configured else ''}.",
        hint="In a checkout: make parts. Elsewhere, install gVisor, and name its runsc in HEADRACE_RUNSC.",
        kind="runtime-missing",
        retryable=False,
    )


def read_version(runsc: Path) -> str:
    """The version that runsc reports. Raises SandboxFailure ``runtime-missing``."""
    try:
        printed = subprocess.run([runsc, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(
            f"{runsc} does not run: {error}.",
            hint="Is it of this architecture?",
            kind="runtime-missing",
            retryable=False,
        ) from error
    return printed.split()[2]


class Runsc:
    """Starts sandboxes. ``version`` is that of runsc. Keeps its files in a folder with this supervisor's name."""

    def __init__(self) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-folder``."""
        self._runsc = find_runsc()
        self.version = read_version(self._runsc)
        self._folder = owned_folder(f"gvisor-{next(_numbers)}")
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def start(self, image: str | None, arguments: Sequence[str], group: Cgroup) -> RunscProcess:
        """Start a sandbox whose first process has these arguments. Raises SandboxFailure."""
        folder = self._folder / f"{next(_numbers)}"
        try:
            folder.mkdir(parents=True, mode=0o700)
            root = self._system_root() if image is None else _checked_image(image)
            (folder / "config.json").write_text(json.dumps(_bundle_config(root, image is None, arguments)))
            return RunscProcess(self._command(folder, image), folder, group)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise sandbox_not_made(str(error)) from error

    def close(self) -> None:
        """Remove its folder. Every sandbox must have ended before."""
        self._remove()

    def _command(self, folder: Path, image: str | None) -> list[str]:
        own_user = () if os.geteuid() == 0 else ("--rootless",)
        return [
            *("/usr/bin/setpriv", "--pdeathsig", "KILL", "--"),
            *(str(self._runsc), f"--root={folder}/state", *FLAGS, *own_user),
            # The system's root has every mount point; an image gets them in memory, and is not changed.
            f"--overlay2={'none' if image is None else 'root:memory'}",
            *("run", f"--bundle={folder}", "sandbox"),
        ]

    def _system_root(self) -> Path:
        """The root of a sandbox without an image: mount points, and the few files that programs need."""
        root = self._folder / "root"
        if root.is_dir():
            return root
        incomplete = self._folder / "root-incomplete"
        for name in ("usr", "etc", "proc", "dev", SCRATCH[1:]):
            (incomplete / name).mkdir(parents=True)
        (incomplete / "tmp").symlink_to(SCRATCH[1:])
        for name in USR_FOLDERS:
            folder = Path("/", name)
            if folder.is_symlink():
                (incomplete / name).symlink_to(os.readlink(folder))
            elif folder.is_dir():
                (incomplete / name).mkdir()
        for path in map(Path, SYSTEM_FILES):
            if path.is_dir():
                shutil.copytree(path, incomplete / path.relative_to("/"), symlinks=True)
            elif path.exists():
                shutil.copyfile(path, incomplete / path.relative_to("/"))
        incomplete.rename(root)
        return root


class RunscProcess:
    """A running runsc with its sandbox. ``stdin`` and ``stdout`` are those of the first process inside; ``end`` becomes
    readable at its end."""

    def __init__(self, command: Sequence[str], folder: Path, group: Cgroup) -> None:
        self._folder = folder
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = popen_with_pipes(
            # The shell waits for a line until it is in its group.
            ["/bin/sh", "-c", 'read -r _ && exec "$@"', "sh", *command],
            env={SUPERVISOR_VARIABLE: str(this_supervisor())},
            stderr=self._stderr,
            start_new_session=True,
            cwd="/",
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.end = os.pidfd_open(self._process.pid)
        self._is_counted = group.usage().cpu_s is not None
        try:
            group.add(self._process.pid)
        except BaseException:
            self.close()
            raise
        os.write(self.stdin, b"\n")
        os.set_blocking(self.stdin, False)
        os.set_blocking(self.stdout, False)

    def kill(self) -> None:
        """Kill it, and with it everything that runs in it."""
        kill_pidfd(self.end)

    def returncode(self) -> int:
        """Wait for the end of runsc; returns its exit status."""
        return self._process.wait()

    def messages(self) -> str:
        """The end of the standard error of runsc and the first process."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - QUOTED_BYTES))
        return self._stderr.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End it, and remove its folder. Raises SandboxFailure ``unkillable``."""
        self.kill()
        self._process.wait()
        if not self._is_counted:  # then no group shows when its other processes, which end with runsc, are gone
            kill_all(lambda: _pids_with_state_in(self._folder))
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._stderr.close()
        os.close(self.end)
        shutil.rmtree(self._folder, ignore_errors=True)


def _pids_with_state_in(folder: Path) -> Iterator[int]:
    """Processes of runsc with their state in a folder."""
    mark = f"--root={folder}/".encode()
    for pid in list_pids():
        with contextlib.suppress(OSError):
            if any(part.startswith(mark) for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
                yield pid


def sandbox_not_made(message: str) -> SandboxFailure:
    """The failure of a sandbox that could not be made."""
    return SandboxFailure(
        f"gVisor could not make a sandbox: {message or 'it gave no reason'}",
        hint="`headrace sandbox doctor` tries it. The runsc of `make parts` is known to work; older ones fail on newer "
        "kernels.",
        kind="sandbox-not-made",
        retryable=True,
    )


def _checked_image(folder: str) -> Path:
    root = Path(folder)
    if not root.is_absolute() or not (root / "usr/bin/python3").exists():
        raise SandboxFailure(
            f"{folder} is not an image for gVisor.",
            hint="An image is the absolute path of a folder with the files of a system, including /usr/bin/python3.",
            kind="bad-image",
            retryable=False,
        )
    return root


def _bundle_config(root: Path, has_system: bool, arguments: Sequence[str]) -> Mapping[str, Any]:
    """The configuration of the first process and its mounts, in the format of the Open Container Initiative."""
    binds = [
        name
        for name in ("usr", *USR_FOLDERS)
        if has_system and (root / name).is_dir() and not (root / name).is_symlink()
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": str(root), "readonly": has_system},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(arguments),
            "env": ["PATH=/usr/bin:/bin", "LANG=C.UTF-8"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {kind: list(CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": GUEST_OPEN_FILES, "hard": GUEST_OPEN_FILES}],
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            *(
                {"destination": f"/{name}", "type": "bind", "source": f"/{name}", "options": ["ro", "rbind"]}
                for name in binds
            ),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
    }
