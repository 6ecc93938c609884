"""The listening socket of an HTTP service.

* A port that is in use or cannot be bound is refused, with the remedy for its cause.
"""

from __future__ import annotations

import errno
import socket

from headrace.errors import PortInUse, SetupError

BACKLOG = 2048
"""Most connections waiting to be accepted: after a restart a whole fleet reconnects at once."""


def listen(host: str, port: int, *, option: str) -> socket.socket:
    """A TCP socket that listens on the port; 0 lets the system choose one.

    ``option`` is the command line option that sets the port, for hints. Raises SetupError.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"Port {port} on {host} is in use by another process.",
                hint=f"Stop that process, or choose another port with {option} (0 lets the system choose).",
                port=port,
            ) from error
        raise SetupError(
            f"Port {port} on {host} cannot be bound: {error.strerror}.", hint=_remedy(error, host, option)
        ) from error
    return listener


def _remedy(error: OSError, host: str, option: str) -> str:
    if isinstance(error, socket.gaierror):
        return f"Check the spelling of {host!r}: it is neither an address nor a known name."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"This machine has no network interface with the address {host}; 0.0.0.0 binds all of them."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Ports below 1024 need privileges: choose another one with {option}."
    return f"Check the address and {option}."
