"""Installation of the benchmarks' peers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.buffer import peers


@pytest.fixture
def interpreters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The interpreters for which an environment was made, in order. Nothing is installed."""
    interpreters: list[str] = []

    def run(uv: str, *command: str) -> None:
        if command[0] == "venv":
            interpreters.append(command[command.index("--python") + 1])
            (Path(command[-1]) / "bin").mkdir(parents=True, exist_ok=True)
            (Path(command[-1]) / "bin" / "python").touch()

    (tmp_path / "peer.txt").write_text("peer==1\n")
    monkeypatch.setattr(peers, "_run", run)
    monkeypatch.setattr(peers, "FOLDER", tmp_path)
    monkeypatch.setattr(peers, "BUILT", tmp_path / "build")
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    return interpreters


def test_a_peer_is_installed_once_and_again_for_another_lock_or_interpreter(
    tmp_path: Path, interpreters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    assert peers._install("peer") == peers._install("peer") == tmp_path / "build" / "peer" / "bin" / "python"
    assert len(interpreters) == 1
    (tmp_path / "peer.txt").write_text("peer==2\n")
    peers._install("peer")
    assert len(interpreters) == 2
    monkeypatch.setattr(sys, "executable", "/another/python3.11")
    peers._install("peer")
    assert interpreters[2:] == ["/another/python3.11"]


@pytest.mark.parametrize(
    ("version", "expected"), [((3, 11, 2), str(Path(sys.executable).resolve())), ((3, 12, 1), "3.11")]
)
def test_a_peer_runs_on_the_interpreter_of_the_benchmark_if_it_is_python_3_11(
    interpreters: list[str], monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], expected: str
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    peers._install("peer")
    assert interpreters == [expected]
