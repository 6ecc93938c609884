"""DNS lookups of a run's policy servers for ``policy_servers.discovery``.

* A lookup does not block the event loop, and has a deadline.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from headrace.common.timeouts import timeout
from headrace.server import logs
from headrace_orchestrator.policy_servers.discovery import Discovery, host_of

log = logs.logger(__name__)

LOOKUP_TIMEOUT_S = 10.0
"""Deadline of a lookup. A resolver that asks several servers in turn takes about half of it."""

NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)
"""The resolver's errors for a name without addresses, such as a headless service without ready pods."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The IP addresses of a host, for connections to a port; raises OSError."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a host by the system's resolver."""
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


async def look_up(name: str, discovery: Discovery, resolver: Resolve, clock: Callable[[], float]) -> None:
    """Look a name up, and report the result to ``discovery``."""
    try:
        async with timeout(LOOKUP_TIMEOUT_S):
            hosts = await resolver(*host_of(name))
    except TimeoutError:
        discovery.take_failure(name, f"the resolver did not answer within {LOOKUP_TIMEOUT_S:g} s", clock())
    except OSError as error:
        if isinstance(error, socket.gaierror) and error.errno in NO_ADDRESS:
            discovery.take_hosts(name, [], clock())
        else:
            log.warning("a lookup failed", name=name, problem=str(error))
            discovery.take_failure(name, f"the lookup failed ({error})", clock())
    else:
        discovery.take_hosts(name, hosts, clock())
