from __future__ import annotations

from pathlib import Path

import pytest

from headrace_sandbox.host.supervisor import FOLDER_VARIABLE, state_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "state"))
    return state_folder()
