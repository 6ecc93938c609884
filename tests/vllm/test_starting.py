"""Start of a vLLM server by examples, tests and benchmarks, with a substitute for vLLM itself."""

from __future__ import annotations

import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.policy import __main__ as policy_benchmark
from examples import vllm_server
from examples.vllm_server import StartFailed, start_vllm

SERVER = """\
import http.server, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
    def log_message(self, *arguments):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that replaces the interpreter with vLLM."""
    script = tmp_path / "python"
    monkeypatch.setattr(vllm_server, "PYTHON", script)
    return script


def test_a_server_that_ends_shows_the_end_of_its_log(tmp_path: Path, stand_in: Path):
    stand_in.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    stand_in.chmod(0o755)
    with pytest.raises(StartFailed) as failed, start_vllm(tmp_path, log=tmp_path / "log"):
        pass
    assert "ended with status 3" in str(failed.value)
    assert str(failed.value).endswith("out of luck")


def test_without_vllm_the_error_says_how_to_install_it(tmp_path: Path, stand_in: Path):
    with pytest.raises(FileNotFoundError, match="make parts"), start_vllm(tmp_path):
        pass


def test_a_server_and_its_child_processes_end_with_the_block(tmp_path: Path, stand_in: Path):
    (tmp_path / "server.py").write_text(SERVER)
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    stand_in.chmod(0o755)
    with start_vllm(tmp_path, log=tmp_path / "log") as address, urllib.request.urlopen(f"{address}/health") as answer:
        child = int(answer.read())
        assert runs(child)
    wait_for(lambda: not runs(child))


def runs(pid: int) -> bool:
    """Return True if a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("parts", [[], ["cost", "updates"]], ids=["all", "some"])
def test_without_vllm_the_benchmark_of_policy_serving_ends_with_one_line_before_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: list[str]
):
    monkeypatch.setattr(policy_benchmark, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["policy", *parts])
    with pytest.raises(SystemExit, match=r"^vLLM is not installed. Run make parts"):
        policy_benchmark.main()
