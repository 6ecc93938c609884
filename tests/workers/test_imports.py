"""Modules and files that a worker imports at its start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import headrace
from headrace.errors import SetupError
from headrace_workers.imports import import_all

ENVIRONMENT = """
import headrace

class Greeting:
    def reset(self, seed=None):
        return "Say hello.", {}

    def step(self, action):
        return "", float(action == "hello"), True, False, {}

headrace.register("test-imports:Greeting-%s", Greeting)
"""


@pytest.fixture
def environment_file(tmp_path: Path):
    name = f"environments_of_{tmp_path.name}"
    file = tmp_path / f"{name}.py"
    file.write_text(ENVIRONMENT % name)
    yield file
    sys.modules.pop(name, None)


def test_a_path_that_ends_in_py_is_imported_as_a_module_of_the_files_name(environment_file: Path):
    import_all([str(environment_file)])
    assert f"test-imports:Greeting-{environment_file.stem}" in headrace.registered()
    assert environment_file.stem in sys.modules


def test_a_module_is_found_in_the_folder_in_which_the_worker_was_started(environment_file: Path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(environment_file.parent)
    import_all([environment_file.stem])
    assert f"test-imports:Greeting-{environment_file.stem}" in headrace.registered()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), ("1 / 0", "ZeroDivisionError"), ("import nowhere_at_all", "nowhere")],
)
def test_a_failed_import_stops_the_worker_with_the_reason(tmp_path: Path, content, reason):
    file = tmp_path / "broken_environments.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SetupError, match=reason):
        import_all([str(file)])
    assert "broken_environments" not in sys.modules


def test_a_file_does_not_replace_an_imported_module(tmp_path: Path):
    (tmp_path / "json.py").write_text("")
    with pytest.raises(SetupError, match="rename"):
        import_all([str(tmp_path / "json.py")])
