"""Orchestrator, workers and policy server of a benchmark, each a separate process."""

from __future__ import annotations

import os
import pstats
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from headrace import Client
from headrace.errors import HeadraceError

ROOT = Path(__file__).parents[1]

START_S = 60.0
"""A process must answer within this time."""


class Service:
    """Processes of one measurement. With ``profile`` each runs under cProfile, at about half its speed."""

    def __init__(self, folder: Path, *, profile: bool = False) -> None:
        self.folder, self._profile = folder, profile
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.workers = 0
        self.port, self.policy_port = _free_port(), _free_port()
        self.url, self.policy_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.policy_port}"

    def start_orchestrator(self, *module: str) -> None:
        """Start the orchestrator and wait until it is ready, to within ten milliseconds. ``module``: the module to run
        instead of the command line, and its first arguments."""
        data = str(self.folder / "data")
        self._start(
            "orchestrator",
            *(module or ("headrace_orchestrator.cli",)),
            *("orchestrator", "--data", data),
            *("--port", str(self.port), "--log-level", "warning"),
        )
        wait_for("the orchestrator", self._ready, interval_s=0.01)

    def _ready(self) -> bool:
        with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        return False

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL."""
        entry = next(entry for entry in self._children if entry[0] == name)
        entry[1].kill()
        entry[1].wait()
        self._children.remove(entry)

    def resident_mb(self, name: str) -> float:
        """Return the resident memory of a process and its children, in megabytes; shared pages count once for each."""
        pid = next(child.pid for child_name, child in self._children if child_name == name)
        pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in _with_children(pid))
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def start_worker(self, *arguments: str, slots: int, name: str = "worker") -> None:
        self.workers += 1
        self._start(
            name,
            *("headrace_workers", "--orchestrator", self.url, "--name", name, "--import", "benchmarks.null"),
            *("--slots", str(slots), "--log-level", "warning", *arguments),
        )

    def start_tiny_policy(self) -> None:
        self._start("policy", "headrace_workers.tiny_policy", "--port", str(self.policy_port))
        wait_for("the tiny policy", lambda: _accepts(self.policy_port))

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds used so far, by process, including its children: they vary less than wall time on a
        busy machine."""
        return {name: sum(map(_cpu_s, _with_children(child.pid))) for name, child in self._children}

    def stop(self) -> None:
        """Stop all processes, the last one started first, and print their profiles."""
        for _, child in reversed(self._children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(40)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._profile:
            for name, _ in self._children:
                _print_profile(name, self.folder / f"{name}.prof")

    def _start(self, name: str, *module: str) -> None:
        profile = ("-m", "cProfile", "-o", str(self.folder / f"{name}.prof")) if self._profile else ()
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, *profile, "-m", *module],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        self._children.append((name, child))


@contextmanager
def service(*, profile: bool = False) -> Iterator[Service]:
    """Make a service in a temporary folder; at the end, stop its processes and remove the folder."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        running = Service(Path(folder), profile=profile)
        try:
            yield running
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}\n")
            raise
        finally:
            running.stop()


def count_stored(client: Client, run: str) -> int:
    """Return the number of episodes of a run that have ended."""
    return sum(client.run(run).episodes.values())


def rate(count: Callable[[], int], *, first: int, last: int, timeout_s: float = 120.0) -> float:
    """Return the rate per second at which a count grows from ``first`` to ``last``."""
    started_at, first_count = 0.0, 0
    deadline = time.perf_counter() + timeout_s
    while True:
        now, counted = time.perf_counter(), count()
        if not started_at and counted >= first:
            started_at, first_count = now, counted
        elif started_at and counted >= last:
            return (counted - first_count) / (now - started_at)
        if now > deadline:
            raise HeadraceError(f"The count reached {counted} of {last} within {timeout_s:g} s.")
        time.sleep(0.1)


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = START_S, *, interval_s: float = 0.05) -> None:
    """Poll a condition until it is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise HeadraceError(f"Waited {timeout_s:g} s for {what} in vain.")
        time.sleep(interval_s)


def _with_children(pid: int) -> list[int]:
    """Return a process and its children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [pid, *(int(child) for task in tasks for child in (task / "children").read_text().split())]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _print_profile(name: str, file: Path) -> None:
    if file.exists():
        print(f"\n== profile of {name}")
        pstats.Stats(str(file)).strip_dirs().sort_stats("tottime").print_stats(25)
