"""The base install: a fresh virtual environment with only the base dependencies."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.batch.build import build_head
from headrace.batch.estimator_inputs import GroupInput
from headrace.runspec import EstimatorSpec
from headrace.trajectory import Task, Version
from headrace.wire.codec import decode_head, encode
from tests.builders import make_trajectory

ROOT = Path(__file__).resolve().parents[2]

LEARNER = """
import json, sys
from importlib.metadata import distributions
from pathlib import Path

import headrace
from headrace import estimators, layouts

source, run = sys.argv[1:3]
if source.startswith("http://"):
    with headrace.Client(source) as client:
        batch = next(client.batches(run))
else:
    batch = headrace.Batch.parse(Path(source).read_bytes())
batch.verify()
agent_episodes = batch.agent_episodes()
own = estimators.advantages("rloo", agent_episodes.experience, gamma=1.0).advantages[agent_episodes.row_turns]
layout = layouts.packed(batch.rows)
try:
    headrace.AsyncClient()
    missing = ""
except headrace.HeadraceError as error:
    missing = error.code
print(json.dumps({
    "installed": sorted(found.metadata["Name"].lower().replace("_", "-") for found in distributions()),
    "served": batch.columns["advantages"].tolist(),
    "own": own.tolist(),
    "mask": int(layout.mask.sum()),
    "async": missing,
}))
"""


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the project and no extras."""
    folder = tmp_path_factory.mktemp("base")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    (wheel,) = folder.glob("*.whl")
    uv = _uv()
    _run(*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    install = (*uv, "pip", "install", "--quiet", "--python", str(python), str(wheel))
    from_cache = subprocess.run((*install, "--offline"), cwd=ROOT, capture_output=True, check=False, timeout=100)
    if from_cache.returncode:
        _run(*install)
    return python


def run_learner(python: Path, source: str, run: str = "run") -> dict[str, Any]:
    """Run the learner on a batch: ``source`` is a file with a body, or the base URL of an orchestrator."""
    answer: dict[str, Any] = json.loads(_run(str(python), "-c", LEARNER, source, run))
    return answer


def test_a_base_install_reads_a_batch_and_computes_advantages(base_python: Path, tmp_path: Path) -> None:
    records = [encode(make_trajectory(number=k, rewards=[0.0, float(k)])) for k in (1, 2)]
    members = [(decode_head(record), len(record)) for record in records]
    groups = [GroupInput("g", Task(environment="test:Echo", seed=0), 2, members)]
    estimator = EstimatorSpec(name="grpo", eps=0.0)
    head = build_head(batch="b", run="run", estimator=estimator, version=Version(0, 0), groups=groups)
    (tmp_path / "body").write_bytes(head + b"".join(records))

    answer = run_learner(base_python, str(tmp_path / "body"))

    assert answer["served"] == [-1.0, -1.0, 1.0, 1.0]
    assert answer["own"] == [-1.0, -1.0, 1.0, 1.0]
    assert answer["mask"] == 16
    assert answer["async"] == "missing-extra"
    assert set(answer["installed"]) == {
        "headrace",
        "numpy",
        "msgspec",
        "pydantic",
        "pydantic-core",
        "annotated-types",
        "typing-extensions",
        "typing-inspection",
    }


def _uv() -> tuple[str, ...]:
    path = shutil.which("uv")
    return (path,) if path else (sys.executable, "-m", "uv")


def _run(*command: str) -> str:
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout
