"""``headrace doctor``: checks of this machine and the orchestrator, with a remedy for each failure.

* Doctor ends with 1 if a check failed, and prints a remedy.
* Doctor checks the orchestrator.
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

EXTRAS = {
    "async": ("aiohttp",),
    "worker": ("aiohttp", "structlog", "uvicorn"),
    "server": ("starlette", "uvicorn", "prometheus_client", "jinja2", "structlog", "google_crc32c"),
    "offline": ("google_crc32c",),
    "export": ("google_crc32c", "pyarrow"),
    "reasoning-gym": ("reasoning_gym",),
}
"""The modules of each extra."""

SYNCS = 20
SLOW_SYNC_S = 0.05
"""Time of a group commit above which it delays submissions."""

FREE_BYTES = 1 << 30
"""Free space below which the disk may soon be full."""

SKEW_S = 5.0
"""Clock difference above which times on the pages are misleading; no decision depends on it."""

DoctorVerdict = Literal["ok", "warn", "fail"]


class DoctorCheck(NamedTuple):
    """The result of one check. ``found``: the observed value."""

    verdict: DoctorVerdict
    name: str
    found: str
    hint: str = ""


@click.command(short_help="Check this machine and the orchestrator.")
@data_option("Data directory.")
@click.option(
    "--port", default=8470, show_default=True, type=click.IntRange(1, 65535), help="Port of the orchestrator."
)
@service_options
@json_option
def doctor(data: Path, port: int, url: str | None, token: str | None) -> None:
    """Check this machine and the orchestrator; each problem comes with a remedy.

    \b
    Example:
      headrace doctor --data /var/lib/headrace --url http://127.0.0.1:8470
    """
    orchestrator_checks = [*service_checks(url, token)]
    owns_port = orchestrator_checks[0].verdict == "ok" and urlsplit(service_url(url)).port == port
    checks = [*local_checks(data, port, owns_port=owns_port), *orchestrator_checks]
    if shared().json:
        emit([check._asdict() for check in checks])
    else:
        for check in checks:
            _print(check)
    if any(check.verdict == "fail" for check in checks):
        click.get_current_context().exit(FAILED)


def local_checks(data: Path, port: int, *, owns_port: bool = False) -> Iterator[DoctorCheck]:
    """Check this machine. ``owns_port``: True if the orchestrator that answered listens on the port."""
    yield check_python(sys.version_info[:2])
    yield check_platform(sys.platform)
    yield from (check_extra(extra, modules) for extra, modules in EXTRAS.items())
    yield check_space(data)
    yield check_syncs(data)
    yield DoctorCheck("ok", "port", f"{port}: the orchestrator has it") if owns_port else check_port(port)
    yield check_browser()


def check_python(version: tuple[int, ...]) -> DoctorCheck:
    """Check for Python 3.11 or newer."""
    text = ".".join(map(str, version))
    if version < (3, 11):
        return DoctorCheck("fail", "python", text, "Headrace needs Python 3.11 or newer.")
    return DoctorCheck("ok", "python", text)


def check_platform(platform: str) -> DoctorCheck:
    """Check for Linux, where children die with their parent."""
    if platform != "linux":
        return DoctorCheck(
            "warn",
            "platform",
            platform,
            "Made for Linux: elsewhere children of a killed `headrace up` keep running.",
        )
    return DoctorCheck("ok", "platform", platform)


def check_extra(extra: str, modules: tuple[str, ...]) -> DoctorCheck:
    """Check that all modules of an extra are installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        return DoctorCheck("warn", f"extra {extra}", f"lacks {', '.join(missing)}", f"pip install 'headrace[{extra}]'")
    return DoctorCheck("ok", f"extra {extra}", "installed")


def check_space(data: Path) -> DoctorCheck:
    """Check the free disk space at the data directory."""
    free = shutil.disk_usage(_existing(data)).free
    observed = f"{free / 2**30:.1f} GiB free at {data}"
    if free < FREE_BYTES:
        return DoctorCheck("warn", "disk space", observed, "Choose another --data; a full disk refuses submissions.")
    return DoctorCheck("ok", "disk space", observed)


def check_syncs(data: Path) -> DoctorCheck:
    """Measure the time of an acknowledged write."""
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
        hint = "Put the data directory on a writable disk that supports sync."
        return DoctorCheck("fail", "fdatasync", f"{error.strerror} at {data}", hint)
    median = sorted(times)[SYNCS // 2]
    observed = f"median {median * 1000:.2f} ms"
    if median > SLOW_SYNC_S:
        return DoctorCheck("warn", "fdatasync", observed, "Submissions wait for it; put --data on a local SSD.")
    return DoctorCheck("ok", "fdatasync", observed)


def check_port(port: int) -> DoctorCheck:
    """Check that an orchestrator could bind the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return DoctorCheck(
                "warn",
                "port",
                f"{port}: {error.strerror}",
                "Fine if this is your orchestrator; else choose another --port.",
            )
    return DoctorCheck("ok", "port", f"{port} is free")


def check_browser() -> DoctorCheck:
    """Look for a browser, which only the tests of the pages need."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if observed := shutil.which(name):
            return DoctorCheck("ok", "browser", observed)
    return DoctorCheck("warn", "browser", "no chromium", "Only tests of the pages need it: apt-get install chromium")


def service_checks(url: str | None, token: str | None) -> Iterator[DoctorCheck]:
    """Check that an orchestrator answers, that it has workers, and that the clocks agree."""
    address = service_url(url)
    try:
        with connect(url, token) as client:
            status = client.status()
    except HeadraceError as error:
        refuses = "phase" in error.extra  # it answers, and its error names the problem
        hint = "Start one with `headrace up`." if isinstance(error, Unavailable) and not refuses else error.hint
        yield DoctorCheck("fail" if url or refuses else "warn", "orchestrator", error.detail, hint)
        return
    yield DoctorCheck("ok", "orchestrator", f"{status.version} at {address}, epoch {status.epoch}")
    active = [worker for worker in status.workers if not worker.silent]
    slots = sum(worker.slots for worker in active)
    if slots:
        yield DoctorCheck("ok", "workers", f"{len(active)} with {slots} slots")
    else:
        yield DoctorCheck(
            "warn",
            "workers",
            f"all {len(status.workers)} are silent" if status.workers else "none",
            "Start one: headrace worker --orchestrator " + address,
        )
    yield check_clock(address, datetime.now(UTC))


def check_clock(address: str, now: datetime) -> DoctorCheck:
    """Compare this machine's clock with the orchestrator's, from its Date header."""
    try:
        with build_opener(ProxyHandler({})).open(address, timeout=2.0) as response:
            date = response.headers.get("Date", "")
    except URLError as error:
        date = getattr(error, "headers", {}).get("Date", "")
    except OSError:
        date = ""
    if not date:
        return DoctorCheck("warn", "clock", "the orchestrator sent no date", "Compare the clocks by hand.")
    skew = abs((parsedate_to_datetime(date) - now).total_seconds())
    if skew > SKEW_S:
        return DoctorCheck(
            "warn", "clock", f"{skew:.0f} s apart", "Times on the pages are misleading: run NTP on both machines."
        )
    return DoctorCheck("ok", "clock", f"within {SKEW_S:g} s")


def _existing(data: Path) -> Path:
    """The directory itself, or its nearest existing parent."""
    path = data.absolute()
    while not path.is_dir():
        path = path.parent
    return path


_STYLES: dict[DoctorVerdict, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def _print(check: DoctorCheck) -> None:
    if not on_terminal():
        click.echo("\t".join((check.verdict, check.name, check.found, check.hint)).rstrip())
        return
    hint = f"  [dim]{escape(check.hint)}[/]" if check.hint else ""
    mark = f"[{_STYLES[check.verdict]}]{check.verdict:<4}[/]"
    console().print(f"{mark} {check.name:<20} {escape(check.found)}{hint}", soft_wrap=True)
