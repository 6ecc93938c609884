"""Benchmarks on a machine without a part that they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_tree import ROOT


@pytest.mark.parametrize(
    ("command", "name"),
    [(["benchmarks.bench_sandbox_service"], "sandbox-service"), (["benchmarks.sandbox", "speed"], "sandbox")],
)
def test_work_that_needs_a_part_that_is_not_installed_has_a_row_with_the_reason(
    command: list[str], name: str, tmp_path: Path
) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stderr) == (0, "")
    (row,) = json.loads((tmp_path / "build" / "bench" / f"{name}.json").read_text())["rows"]
    assert (row["ours"], row["ratio"], row["ok"]) == (None, None, False)
    assert row["against"].startswith("The program bwrap is not installed.")
    assert row["against"].count("apt-get install bubblewrap") == 1
