"""A Docker daemon for tests: in mount and network namespaces of its own, with its own folders, socket and group.

* It touches no interface and no packet filter of this machine, and no registry.
* Whatever happened, ``stop`` leaves no process, mount, control group or file.

``python -m tests.sandbox.runtimes.docker.docker_daemon COMMAND`` runs a command that finds such a daemon, and an image
with Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import docker

from tests.sandbox.runtimes.docker.images import PYTHON, rootfs

START_S = 60.0

STOP_S = 20.0

REPOSITORY = "headrace-test"

_GROUPS = Path("/sys/fs/cgroup")


class DockerDaemon:
    """``host`` is its address as in DOCKER_HOST."""

    def __init__(self) -> None:
        # Not below tmp_path: the path of a socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="hrd-"))
        self.host = f"unix://{self.folder}/sock"
        self._group = f"headrace-test-docker-{uuid.uuid4().hex[:8]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns when it answers."""
        options = {
            "bridge": "none", "iptables": "false", "ip6tables": "false", "ip-forward": "false", "ip-masq": "false",
            "userland-proxy": "false", "log-driver": "none", "storage-driver": "overlay2", "shutdown-timeout": "3",
            "data-root": f"{self.folder}/data", "exec-root": f"{self.folder}/exec", "pidfile": f"{self.folder}/pid",
            "cgroup-parent": f"/{self._group}", "host": self.host, "config-file": f"{self.folder}/daemon.json",
        }  # fmt: skip
        (self.folder / "daemon.json").write_text("{}")  # not this machine's own
        command = ["unshare", "--mount", "--net", "--propagation", "private", "--", "dockerd"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start:\n{self.log()}")
            time.sleep(0.05)

    def load(self, tag: str, programs: Iterable[str]) -> str:
        """Make an image with these programs; returns its name."""
        client = docker.APIClient(self.host, version="1.41", timeout=120)
        try:
            said = client.import_image_from_data(rootfs(programs), repository=REPOSITORY, tag=tag)
            if "error" in json.loads(said.strip().splitlines()[-1]):
                raise RuntimeError(said)
        finally:
            client.close()
        return f"{REPOSITORY}:{tag}"

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Kill it, and remove everything that it made; an orderly end would take seconds."""
        try:
            if self._process is not None:
                self.kill()
        finally:
            self._kill_the_rest()
            for parent in [*_GROUPS.glob(f"*/{self._group}"), *_GROUPS.glob(self._group)]:
                for folder, _, _ in os.walk(parent, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
            shutil.rmtree(self.folder, ignore_errors=True)

    def groups(self) -> list[Path]:
        """The control groups of its containers."""
        return [path for path in _GROUPS.glob(f"*/{self._group}/*") if path.is_dir()]

    def log(self) -> str:
        """The end of its log."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(f"{self.folder}/sock")
                connection.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
                return b"200 OK" in connection.recv(1000)
            except OSError:
                return False

    def _kill_the_rest(self) -> None:
        """Remaining processes that it started: they name its folder, or are in its group."""
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline:
            left = self._left()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _left(self) -> set[int]:
        found = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text().rpartition(")")[2]
                is_ours = os.fsencode(self.folder) + b"/" in command or self._group in (entry / "cgroup").read_text()
                if is_ours and state.split()[0] != "Z" and int(entry.name) != os.getpid():
                    found.add(int(entry.name))
        return found


def main() -> int:
    """Run the command in the arguments beside a daemon; returns its exit code."""
    daemon = DockerDaemon()
    try:
        daemon.start()
        found = {"DOCKER_HOST": daemon.host, "HEADRACE_DOCKER_IMAGE": daemon.load("python", PYTHON)}
        return subprocess.run(sys.argv[1:], env={**os.environ, **found}, check=False).returncode
    finally:
        daemon.stop()


if __name__ == "__main__":
    sys.exit(main())
