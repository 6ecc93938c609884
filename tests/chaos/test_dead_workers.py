"""Workers are killed and replaced: within the lease term of each death every figure tells the dead from the living."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from headrace import Client
from headrace.wire.messages import ServiceStatus
from tests.e2e.processes import Processes, answers, free_port, wait_for

ROUNDS = int(os.environ.get("CHAOS_DEAD_WORKERS", "2"))
"""Number of workers that are killed."""

TERM_S = 2.0
SLOTS = 3

pytestmark = pytest.mark.timeout(120 + 10 * ROUNDS)


def test_a_dead_worker_is_silent_in_every_figure_within_the_lease_term(tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        processes.orchestrator(tmp_path / "data", port).start()
        wait_for("the orchestrator answers", lambda: answers(url + "/readyz"))
        with Client(url) as client:
            environments = [{"id": "game:GuessTheNumber-v0"}]
            client.create_run({"name": "run", "environments": environments, "attempt_lease_s": TERM_S})
            # No policy answers, so that the workers keep the attempts that they hold.
            policy = f"http://127.0.0.1:{free_port()}"
            survivor = processes.worker("survivor", url, policy, slots=SLOTS).start()
            for number in range(ROUNDS):
                doomed = processes.worker(f"doomed-{number}", url, policy, slots=SLOTS).start()
                wait_for("both workers are there", lambda: _present(client.status()) == 2)
                wait_for("they know the term", lambda: max(w.seen_s for w in client.status().workers) < TERM_S / 2)
                doomed.kill()
                killed = time.monotonic()
                wait_for("it is silent", lambda: _present(client.status()) == 1, timeout_s=30)
                # The answer above may have been late; what it says is computed when it is asked.
                assert min(w.seen_s for w in client.status().workers if w.silent) >= TERM_S
                assert time.monotonic() - killed >= TERM_S / 3
                _check_figures(url, client)
            assert survivor.running


def _present(status: ServiceStatus) -> int:
    return sum(not worker.silent for worker in status.workers)


def _check_figures(url: str, client: Client) -> None:
    """Check that metrics, console, ``top`` and ``doctor`` count only the survivor."""
    metrics = _read(url + "/metrics")
    for name, value in (("pool_slots", SLOTS), ("pool_workers", 1)):
        assert re.search(rf'^headrace_{name}{{pool="default"}} {value}\.0$', metrics, re.MULTILINE), name
    silent = re.search(r'^headrace_pool_workers_silent{pool="default"} (\d+)\.0$', metrics, re.MULTILINE)
    assert silent is not None
    assert int(silent[1]) >= 1
    caption = re.search(r"<caption>(.*)</caption>", _read(url + "/"))
    assert caption is not None
    assert re.fullmatch(rf"Pool default: 1 workers, \d of {SLOTS} slots busy, and {silent[1]} silent", caption[1])
    rows = [line.split() for line in _headrace(url, "top", "--once").splitlines() if "default" in line]
    states = {row[0]: row[-1] for row in rows}
    assert states.pop("survivor") == "ok"
    assert set(states.values()) == {"silent"}
    assert f"1 with {SLOTS} slots" in _headrace(url, "doctor")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def _headrace(url: str, *command: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", *command, "--url", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return ran.stdout + ran.stderr
