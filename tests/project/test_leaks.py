"""The leak checks find what they are there for."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from tests import leaks


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)


@pytest.mark.usefixtures("no_grace")
def test_a_child_process_that_still_runs_is_a_leak() -> None:
    before = leaks.snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        left = leaks.new_since(before)
        child.communicate(b"\n")
    assert len(left) == 1
    assert left[0].startswith(f"child process {child.pid} (")
    assert leaks.new_since(before) == []


@pytest.mark.usefixtures("no_grace")
def test_a_thread_that_still_runs_is_a_leak() -> None:
    before = leaks.snapshot()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="lingering")
    thread.start()
    left = leaks.new_since(before)
    done.set()
    thread.join()
    assert left == [f"thread lingering ({thread.ident})"]


@pytest.mark.usefixtures("no_grace")
def test_a_listening_socket_that_is_open_is_a_leak() -> None:
    before = leaks.snapshot()
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = leaks.new_since(before)
        assert left == [f"listening socket (descriptor {server.fileno()})"]
    assert leaks.new_since(before) == []


@pytest.mark.usefixtures("no_grace")
def test_a_process_whose_parent_died_is_found_by_the_mark_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leaks.MARK, "a-session-of-this-test")
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = leaks.escaped("a-session-of-this-test")
        child.communicate(b"\n")
    assert len(found) == 1
    assert f"process {child.pid} " in found[0]
    assert "test_a_process_whose_parent_died" in found[0]
    assert leaks.escaped("a-session-of-this-test") == []
