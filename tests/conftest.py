"""Rules for every test: parts that may be missing, and nothing left behind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import leaks
from tests.components import CI, LEAST_TESTS, PARTS

pytest_plugins = [  # fixtures of every folder: one vLLM, one Docker daemon a session
    "tests.vllm.server",
    "tests.sandbox.runtimes.docker.fixtures",
]


_ran: pytest.StashKey[Counter[str]] = pytest.StashKey()
_problems: pytest.StashKey[list[str]] = pytest.StashKey()
_mark: pytest.StashKey[str] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ran] = Counter()
    config.stash[_problems] = []
    config.stash[_mark] = leaks.mark_session()
    if not os.access(Path.home(), os.W_OK):  # as in scripts/setup.sh: an account without a writable home
        os.environ.setdefault("UV_CACHE_DIR", str(config.rootpath / "build" / "uv-cache"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _parts_of(item):
        if not PARTS[name].present():
            message = f"{name} is missing here; install it with: {PARTS[name].install}"
            if CI:
                pytest.fail(message, pytrace=False)
            pytest.skip(message)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" and not report.skipped:
        item.config.stash[_ran].update([*_folders_of(item), *_parts_of(item)])
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    problems = session.config.stash[_problems]
    problems += [f"left running: {process}" for process in leaks.escaped(session.config.stash[_mark])]
    if CI and _is_complete(session.config):
        ran = session.config.stash[_ran]
        problems += [
            f"component {name}: {ran[name]} tests ran, a complete run has at least {least}"
            for name, least in LEAST_TESTS.items()
            if ran[name] < least
        ]
    if problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = ", ".join(f"{name} {count}" for name, count in sorted(config.stash[_ran].items()))
    terminalreporter.write_line(f"tests run by component: {counts or 'none'}")
    for problem in config.stash[_problems]:
        terminalreporter.write_line(problem, red=True)


def _folders_of(item: pytest.Item) -> list[str]:
    """The test's folder of ``tests/``, and its subfolders that ``LEAST_TESTS`` names."""
    _, *folders, _ = item.nodeid.split("::")[0].split("/")
    paths = ["/".join(folders[: depth + 1]) for depth in range(len(folders))]
    return [path for path in paths if path in (folders[0], *LEAST_TESTS)]


def _parts_of(item: pytest.Item) -> list[str]:
    return [mark.args[0] for mark in item.iter_markers("component")]


def _is_complete(config: pytest.Config) -> bool:
    """Whether every test was asked for: no path, no -k, no -m, no --last-failed."""
    chosen = any(config.getoption(name, None) for name in ("keyword", "markexpr", "lf", "deselect", "collectonly"))
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not chosen


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a child process, a thread or a listening socket. Made first, so it looks last."""
    before = leaks.snapshot()
    yield
    if left := leaks.new_since(before):
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory of an orchestrator that does not exist yet."""
    return tmp_path / "data"
