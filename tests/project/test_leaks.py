"""The leak checks detect leaked processes, threads and sockets."""

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
def test_a_running_child_process_is_a_leak() -> None:
    before = leaks.snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        leaked = leaks.new_since(before)
        child.communicate(b"\n")
    assert len(leaked) == 1
    assert leaked[0].startswith(f"child process {child.pid} (")
    assert leaks.new_since(before) == []


@pytest.mark.usefixtures("no_grace")
def test_a_running_thread_is_a_leak() -> None:
    before = leaks.snapshot()
    finish = threading.Event()
    thread = threading.Thread(target=finish.wait, name="lingering")
    thread.start()
    leaked = leaks.new_since(before)
    finish.set()
    thread.join()
    assert leaked == [f"thread lingering ({thread.ident})"]


@pytest.mark.usefixtures("no_grace")
def test_an_open_listening_socket_is_a_leak() -> None:
    before = leaks.snapshot()
    with socket.create_server(("127.0.0.1", 0)) as server:
        leaked = leaks.new_since(before)
        assert leaked == [f"listening socket (descriptor {server.fileno()})"]
    assert leaks.new_since(before) == []


@pytest.mark.usefixtures("no_grace")
def test_a_process_whose_parent_died_is_detected_by_the_mark_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(leaks.MARK, "a-session-of-this-test")
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        escaped = leaks.escaped("a-session-of-this-test")
        child.communicate(b"\n")
    assert len(escaped) == 1
    assert f"process {child.pid} " in escaped[0]
    assert "test_a_process_whose_parent_died" in escaped[0]
    assert leaks.escaped("a-session-of-this-test") == []
