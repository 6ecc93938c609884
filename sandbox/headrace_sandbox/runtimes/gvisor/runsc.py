"""Starts gVisor: a kernel of its own in user space, with one program in it that talks over its standard input.

* Only the platform systrap: the others hang or are slow on some machines. There is no network but a loopback of its
  own, and no socket, pipe or device of this machine.
* Nothing of this process reaches it: no variable, no descriptor, no file but those of the system, read-only.
* Its processes are in a control group before the first of them runs, and end with this process.
* Its processes and its folder carry the name of this supervisor, so that a later one removes what it left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import SandboxFailure
from headrace_sandbox.host.bwrap import OF_USR, SCRATCH, SYSTEM_FILES
from headrace_sandbox.host.cgroups import Cgroup
from headrace_sandbox.host.descriptors import piped
from headrace_sandbox.host.owner import VARIABLE, kill_all, me, pids, state_folder
from headrace_sandbox.host.reaper import FOLDERS

PART = Path(__file__).parents[4] / "build" / "parts" / "gvisor" / "usr" / "bin" / "runsc"
"""Where ``make parts`` puts it in a checkout."""

PLATFORM = "systrap"

FLAGS = (
    f"--platform={PLATFORM}",
    "--network=none",
    "--host-uds=none",
    "--host-fifo=none",
    "--ignore-cgroups",  # the group is ours, made before
    "--directfs=false",  # a process of its own opens files, not the kernel that programs talk to
    "--file-access-mounts=exclusive",  # what is read of the system is kept: it does not change
)

CAPABILITIES = (
    "CAP_SYS_ADMIN",
    "CAP_SETUID",
    "CAP_SETGID",
    "CAP_SETPCAP",
    "CAP_KILL",
    "CAP_DAC_OVERRIDE",
)
"""Of the first process, in the sandbox's own kernel: they mean nothing on this machine, and no program has one."""

GUEST_FILES = 1024
"""Most descriptors of the first process and of programs."""

QUOTED_BYTES = 2000
"""Of what runsc said when it failed."""

_numbers = itertools.count()


def find_runsc() -> Path:
    """The program: ``HEADRACE_RUNSC``, else of ``make parts``, else of PATH. Raises SandboxFailure
    ``runtime-missing``."""
    named = os.environ.get("HEADRACE_RUNSC")
    if named:
        candidates = [Path(named)]
    else:
        found = shutil.which("runsc")
        candidates = [PART, *([Path(found)] if found else [])]
    for path in candidates:
        if os.access(path, os.X_OK):
            return path
    raise SandboxFailure(
        f"There is no runsc{f' at {named}' if named else ''}.",
        hint="In a checkout: make parts. Elsewhere, install gVisor, and name its runsc in HEADRACE_RUNSC.",
        kind="runtime-missing",
        retryable=False,
    )


def version_of(runsc: Path) -> str:
    """Its version, as it says. Raises SandboxFailure ``runtime-missing``."""
    try:
        said = subprocess.run([runsc, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(
            f"{runsc} does not run: {error}.",
            hint="Is it of this architecture?",
            kind="runtime-missing",
            retryable=False,
        ) from error
    return said.split()[2]


class Runsc:
    """Starts sandboxes. ``version`` is that of runsc. ``folder`` is what this supervisor keeps."""

    def __init__(self) -> None:
        """Raises SandboxFailure ``runtime-missing`` or ``no-folder``."""
        self._runsc = find_runsc()
        self.version = version_of(self._runsc)
        self._folder = state_folder() / FOLDERS / f"{me()}-gvisor-{next(_numbers)}"
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def start(self, image: str | None, arguments: Sequence[str], group: Cgroup) -> Container:
        """Start a sandbox whose first process has these arguments. Raises SandboxFailure."""
        folder = self._folder / f"{next(_numbers)}"
        try:
            folder.mkdir(parents=True, mode=0o700)
            root = self._root() if image is None else _image(image)
            (folder / "config.json").write_text(json.dumps(_spec(root, image is None, arguments)))
            return Container(self._command(folder, image), folder, group)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise not_made(str(error)) from error

    def close(self) -> None:
        """Remove what is kept. Every sandbox has ended."""
        self._remove()

    def _command(self, folder: Path, image: str | None) -> list[str]:
        own_user = () if os.geteuid() == 0 else ("--rootless",)
        return [
            *("/usr/bin/setpriv", "--pdeathsig", "KILL", "--"),
            *(str(self._runsc), f"--root={folder}/state", *FLAGS, *own_user),
            # The system's root has all that is mounted on; an image gets it in memory, and is not changed.
            f"--overlay2={'none' if image is None else 'root:memory'}",
            *("run", f"--bundle={folder}", "sandbox"),
        ]

    def _root(self) -> Path:
        """The root of a sandbox: empty folders, what is mounted there, and the few files that programs need."""
        root = self._folder / "root"
        if root.is_dir():
            return root
        made = self._folder / "root-in-the-making"
        for name in ("usr", "etc", "proc", "dev", SCRATCH[1:]):
            (made / name).mkdir(parents=True)
        (made / "tmp").symlink_to(SCRATCH[1:])
        for name in OF_USR:
            folder = Path("/", name)
            if folder.is_symlink():
                (made / name).symlink_to(os.readlink(folder))
            elif folder.is_dir():
                (made / name).mkdir()
        for path in map(Path, SYSTEM_FILES):
            if path.is_dir():
                shutil.copytree(path, made / path.relative_to("/"), symlinks=True)
            elif path.exists():
                shutil.copyfile(path, made / path.relative_to("/"))
        made.rename(root)
        return root


class Container:
    """One that runs. ``stdin`` and ``stdout`` are those of its first process; ``end`` becomes readable when it has
    ended."""

    def __init__(self, command: Sequence[str], folder: Path, group: Cgroup) -> None:
        self._folder = folder
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the container
        self._process = piped(
            # It waits for a line until it is in its group.
            ["/bin/sh", "-c", 'read -r _ && exec "$@"', "sh", *command],
            env={VARIABLE: str(me())},
            stderr=self._said,
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
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.end, signal.SIGKILL)

    def returncode(self) -> int:
        """How runsc ended, once it has."""
        return self._process.wait()

    def said(self) -> str:
        """What runsc and the first process wrote for people to read."""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - QUOTED_BYTES))
        return self._said.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End it, and remove what is kept of it. Raises SandboxFailure ``unkillable``."""
        self.kill()
        self._process.wait()
        if not self._is_counted:  # then no group tells when the rest of it is gone, which ends with runsc
            kill_all(lambda: _running_in(self._folder))
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._said.close()
        os.close(self.end)
        shutil.rmtree(self._folder, ignore_errors=True)


def _running_in(folder: Path) -> Iterator[int]:
    """Processes of runsc that keep their state in a folder."""
    mark = f"--root={folder}/".encode()
    for pid in pids():
        with contextlib.suppress(OSError):
            if any(part.startswith(mark) for part in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")):
                yield pid


def not_made(said: str) -> SandboxFailure:
    """The failure of a sandbox that could not be made."""
    return SandboxFailure(
        f"gVisor could not make a sandbox: {said or 'it said nothing'}",
        hint="`headrace sandbox doctor` tries it. The runsc of `make parts` is known to work; older ones fail on newer "
        "kernels.",
        kind="sandbox-not-made",
        retryable=True,
    )


def _image(folder: str) -> Path:
    root = Path(folder)
    if not root.is_absolute() or not (root / "usr/bin/python3").exists():
        raise SandboxFailure(
            f"{folder} is no image for gVisor.",
            hint="It is the absolute path of a folder with the files of a system, with /usr/bin/python3 among them.",
            kind="bad-image",
            retryable=False,
        )
    return root


def _spec(root: Path, has_system: bool, arguments: Sequence[str]) -> Mapping[str, Any]:
    """What the first process is, and what it finds: the bundle of the Open Container Initiative."""
    binds = [
        name for name in ("usr", *OF_USR) if has_system and (root / name).is_dir() and not (root / name).is_symlink()
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
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": GUEST_FILES, "hard": GUEST_FILES}],
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
