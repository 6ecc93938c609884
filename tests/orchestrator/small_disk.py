"""A disk of a few mebibytes, for tests that fill it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.components import CI


@contextmanager
def small_disk(folder: Path, *, mib: int) -> Iterator[Path]:
    """Mount one on a new folder; skips the test without the permission to mount."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        message = "a small disk cannot be mounted here: that takes root, and the right to mount"
        pytest.fail(message, pytrace=False) if CI else pytest.skip(message)
    try:
        yield folder
    finally:
        # Lazily: the log writer of a killed orchestrator keeps a file open for a moment.
        subprocess.run(["umount", "--lazy", folder], check=True)
