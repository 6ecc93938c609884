"""The settings of our containers, as the daemon's API takes them. Pure: no calls in here.

* No network, a read-only root, scratch folders in bounded memory, no capability, no new privilege, the system-call
  filter that every runtime has, no mount of this machine, no log.
* Memory, processes and processors are bounded for all of its programs together; it has no swap.
* Process 1 ends at the container's expiry, or when its supervisor is gone, and so ends the container. It has another
  user than the programs, which can neither stop nor end it.
* Its labels name its supervisor and its expiry, so that a later supervisor can remove what a killed one left.
"""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace_sandbox.host import seccomp
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.host.supervisor import is_dead, parse_supervisor, this_supervisor
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.shared.exec_result import INODES

USER = "1000:1000"
"""The user of programs."""

INIT_USER = "65532:65532"
"""The user of process 1."""

WAIT_SCRIPT = '{ sleep "$1"; kill $$; } & read -r _'
"""The shell script under Docker's init: it ends at the container's expiry, or at the end of an input that the
supervisor holds open."""

OWN_PIDS = 4
"""Processes of an idle container: Docker's init, and the shells and the ``sleep`` of the script."""

SPARE_PIDS = OWN_PIDS + 2
"""Processes beyond a program's limit: the container's own, the shell that waits for the program, and one that kills
it."""

_first_processor = itertools.count()

OWNER, BOOT, EXPIRES = "headrace.supervisor", "headrace.boot", "headrace.expires"
"""Labels: the supervisor that made it, the boot of its machine, and the expiry (seconds since 1970)."""

MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore", "/proc/keys",
    "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware",
    "/sys/devices/virtual/powercap",
)  # fmt: skip
"""Files that describe this machine: Docker's own list, and a few more."""


def is_abandoned(labels: Mapping[str, str], now: float) -> bool:
    """True for a container of ours that no supervisor will end: it has expired, or its supervisor is dead. For a
    supervisor on another machine only the expiry counts."""
    supervisor = parse_supervisor(labels.get(OWNER, ""))
    if supervisor is None:
        return False
    expires = labels.get(EXPIRES, "")
    is_expired = expires.isdecimal() and int(expires) < now
    return is_expired or (labels.get(BOOT) == boot_id() and is_dead(supervisor))


def boot_id() -> str:
    """The id of this boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class DockerImage(NamedTuple):
    """An image. ``volumes``: folders that it declares to be on disk; here they are in memory. ``programs``: its
    programs among those used here."""

    id: str
    volumes: tuple[str, ...]
    programs: frozenset[str]

    @property
    def takes_execs(self) -> bool:
        """True if its containers can stay alive and wait for programs, which then start by exec."""
        return {"sh", "sleep"} <= self.programs


class DaemonSettings(NamedTuple):
    """The settings that all containers of a daemon share. ``processors``: their number. ``filter``: the system-call
    filter in the form that the daemon accepts. ``folder``: options of a folder in memory, without its size.
    ``rlimits``: by name, those that do not depend on the sandbox."""

    processors: int
    filter: str
    folder: str
    rlimits: Mapping[str, int]


DOCKER_FOLDER = f"nr_inodes={INODES},uid=1000,gid=1000,mode=0700"

PODMAN_FOLDER = "mode=1777,notmpcopyup"
"""Podman accepts neither a number of files nor an owner: only memory bounds the number of files. Without the second
option it would copy the image's folder, owner included."""


def container_settings(
    image: DockerImage, limits: Limits, ttl_s: float, daemon: DaemonSettings, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """The settings of a container that waits for programs by exec, or of one for this command alone. The latter does
    not end itself at its expiry."""
    scratch = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},{daemon.folder}"
    folders = {SCRATCH: scratch, "/tmp": scratch, "/dev/shm": scratch, **dict.fromkeys(image.volumes, scratch)}
    alone = command is not None
    return {
        "Image": image.id,
        "Cmd": list(command or ["sh", "-c", WAIT_SCRIPT, "sh", str(math.ceil(ttl_s))]),
        "Entrypoint": [],
        "User": USER if alone else INIT_USER,
        "WorkingDir": SCRATCH if alone else "/",
        "Hostname": "sandbox",
        "NetworkDisabled": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": alone,
        "AttachStderr": alone,
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": {OWNER: str(this_supervisor()), BOOT: boot_id(), EXPIRES: f"{time.time() + ttl_s:.0f}"},
        "HostConfig": {
            "NetworkMode": "none",
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "ReadonlyRootfs": True,
            "Tmpfs": folders,
            "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes,
            "PidsLimit": limits.pids + SPARE_PIDS,
            # The daemon refuses a larger number, which would not bound anything.
            "NanoCpus": round(min(limits.cpus, daemon.processors) * 1e9),
            "CpusetCpus": _next_processors(math.ceil(limits.cpus), daemon.processors),
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges", f"seccomp={daemon.filter}"],
            "MaskedPaths": list(MASKED),
            "Init": True,
            "LogConfig": {"Type": "none"},
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in {
                    "nofile": limits.open_files,
                    "fsize": limits.file_bytes,
                    "core": 0,
                    **daemon.rlimits,
                }.items()
            ],
        },
    }


def _next_processors(count: int, processors: int) -> str:
    """A set of ``count`` processors, so that a program counts the right number; each container gets the next ones."""
    if count >= processors:
        return ""
    first = next(_first_processor)
    return ",".join(str((first + number) % processors) for number in range(count))


def seccomp_profile(machine: str = "") -> dict[str, Any]:
    """The filter of ``host/seccomp.py`` in Docker's format. Raises SandboxFailure ``no-filter``."""
    table = seccomp.require_table(machine)
    mknods = [("mknodat", 2), *([("mknod", 1)] if len(table.mknods) > 1 else [])]
    last = max(seccomp.FAMILIES)
    sockets = ["socket", "socketpair"]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [f"SCMP_ARCH_{(machine or platform.machine()).upper()}"],
        "syscalls": [
            _refuse(sorted(table.refused), "EPERM"),
            _refuse(["clone3"], "ENOSYS"),
            *(
                _refuse(["clone"], "EPERM", 0, 1 << bit, "SCMP_CMP_MASKED_EQ", 1 << bit)
                for bit in range(32)
                if seccomp.CLONE_NEW >> bit & 1
            ),
            *(
                _refuse(sockets, "EAFNOSUPPORT", 0, family, "SCMP_CMP_EQ")
                for family in range(last)
                if family not in seccomp.FAMILIES
            ),
            _refuse(sockets, "EAFNOSUPPORT", 0, last, "SCMP_CMP_GT"),
            *(
                _refuse([name], "EPERM", position, seccomp.S_IFMT, "SCMP_CMP_MASKED_EQ", kind)
                for name, position in mknods
                for kind in (seccomp.S_IFCHR, seccomp.S_IFBLK)
            ),
        ],
    }


_ERRNO = {"EPERM": 1, "ENOSYS": 38, "EAFNOSUPPORT": 97}
"""Linux's numbers on both architectures."""


def _refuse(
    names: list[str], error: str, index: int = -1, value: int = 0, how: str = "", two: int = 0
) -> dict[str, Any]:
    arguments = [] if index < 0 else [{"index": index, "value": value, "valueTwo": two, "op": how}]
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": _ERRNO[error], "args": arguments}
