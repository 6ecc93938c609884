"""Peers: other systems that do a part of the same work, each in a separate virtual environment under ``build/peers``.

* A peer is installed once, from its own hashed lock, and again for another lock or interpreter.
* A peer runs on the interpreter of the benchmark if that is a Python 3.11, for which the locks are made.
* A peer that cannot be installed or started has its error in the table; the other measurements continue.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from benchmarks.peers.protocol import ANSWER
from benchmarks.service import ROOT

FOLDER = ROOT / "benchmarks" / "peers"
BUILT = ROOT / "build" / "peers"

INSTALL_S, START_S, ANSWER_S = 1800.0, 300.0, 300.0
"""Timeouts. Torch and TensorFlow are gigabytes, and Ray takes a while to start on a busy machine."""


class PeerError(Exception):
    """A peer cannot be measured. The message is the reason, in one line."""


class Peer:
    """A running peer. ``problem`` is the reason why it cannot be measured, or empty."""

    def __init__(self, name: str, title: str) -> None:
        self.title = title
        self.problem = ""
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[str] | None = None
        try:
            python = _install(name)
            print(f"{title}: starting", flush=True)
            self._log = (BUILT / f"{name}.log").open("w")
            self._process = subprocess.Popen(
                [str(python), str(FOLDER / f"{name}_peer.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            self._read(START_S)
        except PeerError as error:
            self._set_problem(str(error))

    def ask(self, do: str, **arguments: int) -> dict[str, float]:
        """Request one measurement; the result is empty once the peer has failed."""
        if self.problem:
            return {}
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            return self._read(ANSWER_S)
        except (OSError, PeerError) as error:
            self._set_problem(str(error))
            return {}

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()

    def _read(self, timeout_s: float) -> dict[str, float]:
        """Read the next answer; kill a peer that does not answer in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(timeout_s, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith(ANSWER):
                    answer: dict[str, float] = json.loads(line[len(ANSWER) :])
                    if "error" in answer:
                        raise PeerError(str(answer["error"]).splitlines()[0][:200])
                    return answer
            status = self._process.wait(10)
        finally:
            watchdog.cancel()
        raise PeerError(f"it ended with status {status}, or did not answer within {timeout_s:g} s")

    def _set_problem(self, problem: str) -> None:
        self.problem = problem
        print(f"{self.title}: {problem}", flush=True)


def _install(name: str) -> Path:
    """Install a peer if needed; return the interpreter of its virtual environment. Raises PeerError."""
    lock, folder = FOLDER / f"{name}.txt", BUILT / name
    interpreter = str(Path(sys.executable).resolve()) if sys.version_info[:2] == (3, 11) else "3.11"
    stamp, fingerprint, python = (
        folder / "installed.txt",
        f"{interpreter}\n{lock.read_text()}",
        folder / "bin" / "python",
    )
    if stamp.exists() and stamp.read_text() == fingerprint and python.exists():
        return python
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    print(f"{name}: installing into {folder.relative_to(ROOT)} (minutes and gigabytes, once)", flush=True)
    started_at = time.monotonic()
    _run(uv, "venv", "--quiet", "--clear", "--python", interpreter, str(folder))
    _run(uv, "pip", "install", "--quiet", "--python", str(python), "--require-hashes", "--requirement", str(lock))
    stamp.write_text(fingerprint)
    print(f"{name}: installed in {time.monotonic() - started_at:.0f} s", flush=True)
    return python


def _run(*command: str) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"not installed: {error}") from error
    if process.returncode:
        output = process.stderr.strip() or process.stdout.strip()
        raise PeerError(f"not installed: {output.splitlines()[-1][:200]}")
