"""The listening socket of an HTTP service."""

from __future__ import annotations

import contextlib
import errno
import os
import socket

import pytest

from headrace.errors import PortInUse, SetupError
from headrace.server.listener import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_in_use_is_refused_with_a_hint(host: str):
    with contextlib.closing(listen(host, 0, option="--bind")) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(PortInUse, match=f"Port {port} on {host} is in use") as refused:
            listen(host, port, option="--bind")
    assert refused.value.hint == "Stop that process, or choose another port with --bind (0 lets the system choose)."


def test_an_address_of_another_machine_is_refused_with_the_remedy_for_it():
    with pytest.raises(SetupError, match=r"Port 0 on 192\.0\.2\.1 cannot be bound: ") as refused:
        listen("192.0.2.1", 0, option="--port")
    assert refused.value.hint.startswith("This machine has no network interface with the address 192.0.2.1")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Check the spelling of 'locahost'"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), "choose another one with --port"),
        (OSError(errno.EINVAL, os.strerror(errno.EINVAL)), "Check the address and --port."),
    ],
)
def test_a_port_that_cannot_be_bound_is_refused_with_the_remedy_for_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: OSError, remedy: str
):
    def bind(self: socket.socket, address: object) -> None:
        raise error

    monkeypatch.setattr(socket, "socket", type("Refusing", (socket.socket,), {"bind": bind}))
    with pytest.raises(SetupError) as refused:
        listen("locahost", 80, option="--port")
    assert remedy in refused.value.hint
