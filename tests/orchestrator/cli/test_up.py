"""``headrace up`` and the demo's service with real processes, which all end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from click.testing import CliRunner

from headrace.client.sync_client import Client
from headrace_orchestrator.buffer.log.writer_process import SUPPORTED
from headrace_orchestrator.cli.demo.processes import demo_service
from headrace_orchestrator.cli.up import up
from tests.orchestrator.service.test_log_writer import children

UP = [sys.executable, "-m", "headrace_orchestrator.cli", "up", "--workers", "1", "--slots", "2", "--port", "0"]


def test_up_prints_one_line_for_each_component_and_a_signal_stops_all_components_in_order(data_dir: Path) -> None:
    command = [*UP, "--data", str(data_dir), "--policy-endpoint", "http://127.0.0.1:9", "--json"]
    command += ["--max-wait-s", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            printed = [json.loads(process.stdout.readline()) for _ in range(3)]
            with Client(printed[2]["url"]) as client:
                assert client.runs() == []
                client.create_run({"name": "r", "environments": [{"id": "no:one"}], "max_concurrent": 1})
            url = printed[2]["url"] + "/v1/runs/r/pull"
            body = json.dumps({"learner": "l", "session": "s", "request": "p", "wait_s": 20}).encode()
            with urlopen(Request(url, body, {"Content-Type": "application/json"}), timeout=10) as answer:
                assert answer.headers["Headrace-Wait-Seconds"] == "1"
        finally:
            process.send_signal(signal.SIGTERM)
        ended = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    assert [line["component"] for line in printed[:2]] == ["orchestrator", "worker-0"]
    assert [(line["component"], line["what"]) for line in ended] == [("worker-0", "ended"), ("orchestrator", "ended")]


@pytest.mark.skipif(not SUPPORTED, reason="the log's writer has no process of its own here")
def test_an_orchestrator_that_lost_its_log_writer_is_started_anew_with_all_that_was_acknowledged(
    data_dir: Path,
) -> None:
    command = [*UP, "--data", str(data_dir), "--policy-endpoint", "http://127.0.0.1:9", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            started, _, page = [json.loads(process.stdout.readline()) for _ in range(3)]
            with Client(page["url"], retry_for_s=60) as client:
                client.create_run({"name": "r", "environments": [{"id": "no:one"}], "max_concurrent": 1})
                (writer,) = children(int(started["detail"]))
                os.kill(writer, signal.SIGKILL)
                restarts = [json.loads(process.stdout.readline()) for _ in range(2)]
                assert [run.name for run in client.runs()] == ["r"]
                client.close_run("r")
        finally:
            process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert [(line["component"], line["what"]) for line in restarts] == [
        ("orchestrator", "restarting"),
        ("orchestrator", "started"),
    ]
    assert "exit code 1" in restarts[0]["detail"]


def test_the_tiny_policy_may_have_another_port(data_dir: Path) -> None:
    command = [*UP, "--data", str(data_dir), "--tiny-policy", "--tiny-policy-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            printed = [json.loads(process.stdout.readline()) for _ in range(4)]
            with urlopen(printed[3]["policy_endpoint"] + "/weight_info", timeout=10) as answer:
                assert json.load(answer) == {"weight_version": "0.0"}
        finally:
            process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 0
    assert [line.get("component") for line in printed] == ["orchestrator", "tiny-policy", "worker-0", None]


def test_all_processes_end_with_the_block_however_it_ends(tmp_path: Path) -> None:
    """A fixture of every test fails it if a process is left running."""

    def fail() -> None:
        with demo_service(tmp_path, time.sleep) as service:
            service.start_policy("policy")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {file.name for file in (tmp_path / "logs").iterdir()} == {
        "orchestrator.log",
        "policy.log",
        "worker-0.log",
        "worker-1.log",
    }


def test_an_invalid_policy_endpoint_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refused = CliRunner().invoke(up, ["--data", str(tmp_path / "data"), "--policy-endpoint", "127.0.0.1:8000"])
    assert refused.exit_code == 2
    assert "not the address of a policy server" in refused.output
    assert not (tmp_path / "data").exists()
