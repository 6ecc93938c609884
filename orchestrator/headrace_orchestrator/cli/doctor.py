"""``headrace doctor``: what this machine has, and what to do about what it lacks.

* Doctor ends with 1 if something failed, and says what to do.
* Doctor looks at the orchestrator.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import click
from rich.markup import escape

from headrace.client.sync_client import service_url
from headrace.errors import HeadraceError, Unavailable
from headrace_orchestrator.cli.address_options import data_option
from headrace_orchestrator.cli.output import (
    FAILED,
    connect,
    console,
    emit,
    json_option,
    on_terminal,
    service_options,
    shared,
)
from headrace_orchestrator.console.last_seen import is_silent

EXTRAS = {
    "async": ("aiohttp",),
    "worker": ("aiohttp", "structlog", "uvicorn"),
    "server": ("starlette", "uvicorn", "prometheus_client", "jinja2", "structlog", "google_crc32c"),
    "offline": ("google_crc32c",),
    "export": ("google_crc32c", "pyarrow"),
    "reasoning-gym": ("reasoning_gym",),
}
"""Modules that each extra brings."""

SYNCS = 20
SLOW_SYNC_S = 0.05
"""A group commit slower than this holds back submissions."""

FREE_BYTES = 1 << 30
"""Less free space than this is soon full of trajectories."""

SKEW_S = 5.0
"""Clocks further apart make times on the pages misleading; no decision depends on them."""

Verdict = Literal["ok", "warn", "fail"]


class Check(NamedTuple):
    """One line."""

    verdict: Verdict
    name: str
    found: str
    hint: str = ""


@click.command(short_help="Check this machine and the orchestrator.")
@data_option("Data directory.")
@click.option("--port", default=8470, show_default=True, type=click.IntRange(1, 65535), help="Port to look at.")
@service_options
@json_option
def doctor(data: Path, port: int, url: str | None, token: str | None) -> None:
    """Check this machine and the orchestrator; each line says what to do.

    \b
    Example:
      headrace doctor --data /var/lib/headrace --url http://127.0.0.1:8470
    """
    of_service = [*service_checks(url, token)]
    answers = of_service[0].verdict == "ok" and urlsplit(service_url(url)).port == port
    checks = [*local_checks(data, port, answers=answers), *of_service]
    if shared().json:
        emit([check._asdict() for check in checks])
    else:
        for check in checks:
            _print(check)
    if any(check.verdict == "fail" for check in checks):
        click.get_current_context().exit(FAILED)


def local_checks(data: Path, port: int, *, answers: bool = False) -> Iterator[Check]:
    """What this machine has. ``answers``: the orchestrator that was asked is the one at the port."""
    yield check_python(sys.version_info[:2])
    yield check_platform(sys.platform)
    yield from (check_extra(extra, modules) for extra, modules in EXTRAS.items())
    yield check_space(data)
    yield check_syncs(data)
    yield Check("ok", "port", f"{port}: the orchestrator has it") if answers else check_port(port)
    yield check_browser()


def check_python(version: tuple[int, ...]) -> Check:
    """Python 3.11 or newer."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        return Check("fail", "python", text, "Headrace needs Python 3.11 or newer.")
    return Check("ok", "python", text)


def check_platform(platform: str) -> Check:
    """Linux, where children die with their parent."""
    if platform != "linux":
        return Check("warn", "platform", platform, "Made for Linux; elsewhere children of a killed `up` stay behind.")
    return Check("ok", "platform", platform)


def check_extra(extra: str, modules: tuple[str, ...]) -> Check:
    """Whether all modules of an extra are there."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        return Check("warn", f"extra {extra}", f"lacks {', '.join(missing)}", f"pip install 'headrace[{extra}]'")
    return Check("ok", f"extra {extra}", "installed")


def check_space(data: Path) -> Check:
    """Free space where the data directory is or will be."""
    free = shutil.disk_usage(_existing(data)).free
    found = f"{free / 2**30:.1f} GiB free at {data}"
    if free < FREE_BYTES:
        return Check("warn", "disk space", found, "Choose another --data; a full disk refuses submissions.")
    return Check("ok", "disk space", found)


def check_syncs(data: Path) -> Check:
    """How long an acknowledged write takes."""
    try:
        with tempfile.TemporaryFile(dir=_existing(data)) as file:
            times = []
            for _ in range(SYNCS):
                file.write(b"headrace")
                file.flush()
                started = time.perf_counter()
                os.fdatasync(file.fileno())
                times.append(time.perf_counter() - started)
    except OSError as error:
        hint = "The data directory must be on a disk that can be written and synced."
        return Check("fail", "fdatasync", f"{error.strerror} at {data}", hint)
    median = sorted(times)[SYNCS // 2]
    found = f"median {median * 1000:.2f} ms"
    if median > SLOW_SYNC_S:
        return Check("warn", "fdatasync", found, "Submissions wait for it; put --data on a local SSD.")
    return Check("ok", "fdatasync", found)


def check_port(port: int) -> Check:
    """Whether an orchestrator could bind it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check("warn", "port", f"{port}: {error.strerror}", "Fine if that is your orchestrator; else --port.")
    return Check("ok", "port", f"{port} is free")


def check_browser() -> Check:
    """Only the tests of the pages need one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return Check("ok", "browser", found)
    return Check("warn", "browser", "no chromium", "Only tests of the pages need it: apt-get install chromium")


def service_checks(url: str | None, token: str | None) -> Iterator[Check]:
    """Whether an orchestrator answers, who works for it, and whether clocks agree."""
    where = service_url(url)
    try:
        with connect(url, token) as client:
            status = client.status()
    except HeadraceError as error:
        refuses = "phase" in error.extra  # it is there, and says what keeps it
        hint = "Start one with `headrace up`." if isinstance(error, Unavailable) and not refuses else error.hint
        yield Check("fail" if url or refuses else "warn", "orchestrator", error.detail, hint)
        return
    yield Check("ok", "orchestrator", f"{status.version} at {where}, epoch {status.epoch}")
    heard = [worker for worker in status.workers if not is_silent(worker)]
    slots = sum(worker.slots for worker in heard)
    if slots:
        yield Check("ok", "workers", f"{len(heard)} with {slots} slots")
    else:
        yield Check(
            "warn",
            "workers",
            f"all {len(status.workers)} are silent" if status.workers else "none",
            "Start one: headrace worker --orchestrator " + where,
        )
    yield check_clock(where, datetime.now(UTC))


def check_clock(where: str, now: datetime) -> Check:
    """Difference between this machine's clock and the orchestrator's, from its Date header."""
    try:
        with build_opener(ProxyHandler({})).open(where, timeout=2.0) as answer:
            date = answer.headers.get("Date", "")
    except URLError as error:
        date = getattr(error, "headers", {}).get("Date", "")
    except OSError:
        date = ""
    if not date:
        return Check("warn", "clock", "the orchestrator sent no date", "Compare the clocks by hand.")
    skew = abs((parsedate_to_datetime(date) - now).total_seconds())
    if skew > SKEW_S:
        return Check("warn", "clock", f"{skew:.0f} s apart", "Times on the pages mislead: run NTP on both machines.")
    return Check("ok", "clock", f"within {SKEW_S:g} s")


def _existing(data: Path) -> Path:
    """The directory itself, or the nearest parent that exists."""
    path = data.absolute()
    while not path.is_dir():
        path = path.parent
    return path


_STYLES: dict[Verdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _print(check: Check) -> None:
    if not on_terminal():
        click.echo("\t".join((check.verdict, check.name, check.found, check.hint)).rstrip())
        return
    hint = f"  [dim]{escape(check.hint)}[/]" if check.hint else ""
    mark = f"[{_STYLES[check.verdict]}]{check.verdict:<4}[/]"
    console().print(f"{mark} {check.name:<20} {escape(check.found)}{hint}", soft_wrap=True)
