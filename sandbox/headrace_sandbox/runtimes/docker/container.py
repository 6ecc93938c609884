"""What a container of ours is made of; no calls in here.

* No network, a root that is read-only, scratch folders in bounded memory, no capability, no new privilege, the filter
  of system calls that every runtime has, no mount of this machine, no log.
* Memory, processes and processors are bounded for all that runs in it together; there is no swap.
* Process 1 ends when the time of life does, or when its supervisor is gone, and so ends the container. It is of another
  user than the programs are: they can neither stop nor end it.
* Its labels say whose it is and until when, so that another one can remove what a killed supervisor left.
"""

from __future__ import annotations

import itertools
import math
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace_sandbox.host import owner, seccomp
from headrace_sandbox.host.bwrap import SCRATCH
from headrace_sandbox.result import Limits

USER = "1000:1000"
"""Of programs."""

KEEPER = "65532:65532"
"""Of process 1."""

KEEP = '{ sleep "$1"; kill $$; } & read -r _'
"""What Docker's init waits for: the time of life, or the end of an input that the supervisor holds."""

KEEPER_PIDS = 4
"""Docker's init, and the shells and the ``sleep`` of that."""

SPARE_PIDS = KEEPER_PIDS + 2
"""More processes than a program may have: the keepers, the shell that waits for it, and one that ends it."""

_first_processor = itertools.count()

INODES = 10_000
"""Most files of a scratch folder: empty ones take no bytes of it, but memory of the kernel."""

OWNER, BOOT, EXPIRES = "headrace.supervisor", "headrace.boot", "headrace.expires"
"""Labels: which process made it, in which start of which machine, and when its time of life ends (seconds since
1970)."""

MASKED = (
    "/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore", "/proc/keys",
    "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/firmware",
    "/sys/devices/virtual/powercap",
)  # fmt: skip
"""What tells of this machine. Docker's own list, and a few more."""


def is_abandoned(labels: Mapping[str, str], now: float) -> bool:
    """Whether a container of these labels is one of ours that nobody will end: its time is over, or its supervisor is
    dead. Of a supervisor on another machine only the time counts."""
    maker = owner.named(labels.get(OWNER, ""))
    if maker is None:
        return False
    expires = labels.get(EXPIRES, "")
    is_over = expires.isdecimal() and int(expires) < now
    return is_over or (labels.get(BOOT) == boot() and owner.is_dead(maker))


def boot() -> str:
    """This start of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Image(NamedTuple):
    """An image. ``volumes``: folders that it wants on disk; they are in memory here. ``programs``: which it has of
    those that are used."""

    id: str
    volumes: tuple[str, ...]
    programs: frozenset[str]

    @property
    def is_kept(self) -> bool:
        """Whether programs can come in by exec: something keeps it alive, and something waits for them."""
        return {"sh", "sleep"} <= self.programs


class Given(NamedTuple):
    """What is the same for all containers of a daemon. ``processors``: how many it has. ``filter``: that of system
    calls, as it wants to be told. ``folder``: options of a folder in memory, beside its size. ``rlimits``: by name,
    those that are of no sandbox."""

    processors: int
    filter: str
    folder: str
    rlimits: Mapping[str, int]


OWN_FOLDER = f"nr_inodes={INODES},uid=1000,gid=1000,mode=0700"

PODMANS_FOLDER = "mode=1777,notmpcopyup"
"""Podman takes neither a number of files nor an owner: only memory bounds how many there are. It would copy what the
image has there, owner included."""


def settings(
    image: Image, limits: Limits, ttl_s: float, given: Given, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """What the daemon is asked for: a container that lives on and takes programs by exec, or one for this command
    alone. Of the latter only its maker knows when its time is over."""
    scratch = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},{given.folder}"
    folders = {SCRATCH: scratch, "/tmp": scratch, "/dev/shm": scratch, **dict.fromkeys(image.volumes, scratch)}
    alone = command is not None
    return {
        "Image": image.id,
        "Cmd": list(command or ["sh", "-c", KEEP, "sh", str(math.ceil(ttl_s))]),
        "Entrypoint": [],
        "User": USER if alone else KEEPER,
        "WorkingDir": SCRATCH if alone else "/",
        "Hostname": "sandbox",
        "NetworkDisabled": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": alone,
        "AttachStderr": alone,
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": {OWNER: str(owner.me()), BOOT: boot(), EXPIRES: f"{time.time() + ttl_s:.0f}"},
        "HostConfig": {
            "NetworkMode": "none",
            "IpcMode": "none",
            "CgroupnsMode": "private",
            "ReadonlyRootfs": True,
            "Tmpfs": folders,
            "Memory": limits.memory_bytes,
            "MemorySwap": limits.memory_bytes,
            "PidsLimit": limits.pids + SPARE_PIDS,
            "NanoCpus": round(min(limits.cpus, given.processors) * 1e9),  # more is refused, and is no bound
            "CpusetCpus": _some(math.ceil(limits.cpus), given.processors),
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges", f"seccomp={given.filter}"],
            "MaskedPaths": list(MASKED),
            "Init": True,
            "LogConfig": {"Type": "none"},
            "Ulimits": [
                {"Name": name, "Soft": value, "Hard": value}
                for name, value in {
                    "nofile": limits.open_files,
                    "fsize": limits.file_bytes,
                    "core": 0,
                    **given.rlimits,
                }.items()
            ],
        },
    }


def _some(count: int, processors: int) -> str:
    """So many processors, so that a program which counts them counts right; the next container gets the next ones."""
    if count >= processors:
        return ""
    first = next(_first_processor)
    return ",".join(str((first + number) % processors) for number in range(count))


def profile(machine: str = "") -> dict[str, Any]:
    """The filter of ``seccomp``, as Docker takes it. Raises SandboxFailure ``no-filter``."""
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
"""As Linux has them, on both architectures."""


def _refuse(
    names: list[str], error: str, index: int = -1, value: int = 0, how: str = "", two: int = 0
) -> dict[str, Any]:
    arguments = [] if index < 0 else [{"index": index, "value": value, "valueTwo": two, "op": how}]
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": _ERRNO[error], "args": arguments}
