"""The network of the network cases.

Run as ``unshare --net -- python -m headrace_sandbox.conformance.network_host RUNTIME WAY CASE``.

* This process is in a network namespace of its own. A virtual cable connects it to another one, where a listener has
  the addresses of a metadata service, a private host, a public host and a resolver. They exist nowhere else.
* Each address is first reached from here, so that a sandbox started here which does not reach it is proven to be
  isolated.
* It writes a ``CaseOutcome`` as JSON. All namespaces end with their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import msgspec

from headrace_sandbox.conformance.suite import ESCAPED, REFUSED, TRY, CaseContext, CaseOutcome, Way
from headrace_sandbox.runtimes.registry import make_runtime

METADATA = ".".join(["169", "254"] * 2)
PRIVATE, PUBLIC = "10.0.0.1", "203.0.113.7"
HERE, THERE = "198.51.100.2", "198.51.100.1"
"""The two ends of the cable."""

LISTENER = """
import select, socket
tcp = socket.create_server(('', 80))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('', 53))
print('ready', flush=True)
while True:
    for ready in select.select([tcp, udp], [], [])[0]:
        if ready is tcp:
            connection, peer = tcp.accept()
            connection.close()
        else:
            _, peer = udp.recvfrom(512)
            udp.sendto(b'answer', peer)
        print('reached', flush=True)
"""

READY_S = 10.0

REPORT_S = 0.3
"""Time limit for a listener to report that it was reached."""


class CaseNetwork:
    """Addresses and sockets that can be reached from here. ``attempts``: a program that tries to reach them. For each
    attempt that succeeds, a listener has a connection to accept, or ``outside`` a line to read."""

    def __init__(self, attempts: str, listeners: Sequence[socket.socket] = (), outside: int | None = None) -> None:
        self.attempts = attempts
        self._listeners = listeners
        self._outside = outside

    def count_reached(self) -> int:
        """The number of connections and messages since the last call."""
        time.sleep(REPORT_S)
        count = 0
        for listener in self._listeners:
            while select.select([listener], [], [], 0)[0]:
                listener.accept()[0].close()
                count += 1
        while self._outside is not None and select.select([self._outside], [], [], 0)[0]:
            count += os.read(self._outside, 4096).count(b"\n")
        return count


def addresses(stack: contextlib.ExitStack) -> CaseNetwork:
    """The network of case 26."""
    holder = stack.enter_context(_running(["unshare", "--net", "--", "sleep", "300"]))
    until = time.monotonic() + READY_S
    while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net") and time.monotonic() < until:
        time.sleep(0.01)
    there = ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]
    _run(f"ip link add here type veth peer name there netns {holder.pid}")
    _run(f"ip address add {HERE}/24 dev here", "ip link set here up", "ip link set lo up")
    _run(f"ip address add {THERE}/24 dev there", "ip link set there up", "ip link set lo up", inside=there)
    _run(*(f"ip address add {address}/32 dev lo" for address in (METADATA, PRIVATE, PUBLIC)), inside=there)
    _run(f"ip route add default via {THERE}")
    listener = stack.enter_context(_running([*there, sys.executable, "-c", LISTENER]))
    assert listener.stdout is not None
    outside = listener.stdout.fileno()
    os.read(outside, 100)  # its first line says that it is ready
    attempts = f"""
import socket
for address in {(METADATA, PRIVATE, PUBLIC)!r}:
    attempt(address, lambda: socket.create_connection((address, 80), 2))
def ask():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.settimeout(2)
        resolver.sendto(b'question', ('{PRIVATE}', 53))
        return resolver.recv(512)
attempt('a name', ask)
"""
    return CaseNetwork(attempts, outside=outside)


def local_services(stack: contextlib.ExitStack) -> CaseNetwork:
    """The network of case 27."""
    _run("ip link set lo up")
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder).chmod(0o755)
    path, name = f"{folder}/docker.sock", f"headrace-conformance-{os.getpid()}"
    listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))]
    for address in (path, f"\0{name}"):
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(address)
        listener.listen()
        listeners.append(listener)
    Path(path).chmod(0o777)
    attempts = f"""
import socket
def dial(address):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(2)
        client.connect(address)
attempt('loopback', lambda: socket.create_connection(('127.0.0.1', {listeners[0].getsockname()[1]}), 2))
attempt('an abstract socket', lambda: dial('\\0{name}'))
attempt('a socket that is a file', lambda: dial({path!r}))
if IS_SANDBOX:  # the host may lack these sockets
    attempt('the socket of Docker', lambda: dial('/var/run/docker.sock'))
    attempt('the socket of Podman', lambda: dial('/run/podman/podman.sock'))
"""
    return CaseNetwork(attempts, listeners)


NETWORKS = {"26": addresses, "27": local_services}


async def try_network(network: CaseNetwork, context: CaseContext) -> CaseOutcome:
    """Test that a sandboxed program reaches nothing of a network that this process reaches."""
    code = f"IS_SANDBOX = False\n{TRY}{network.attempts}"
    control = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    lines = control.splitlines()
    if ": refused" in control or network.count_reached() < len(lines):
        return CaseOutcome(outcome="unclear", evidence=f"not reached from here: {lines}")
    result = await context.run(f"IS_SANDBOX = True\n{TRY}{network.attempts}")
    output_lines = result.stdout.text.splitlines()
    escapes = [line for line in output_lines if ": refused" not in line]
    if (times := network.count_reached()) or escapes:
        return CaseOutcome(outcome=ESCAPED, evidence=f"{'; '.join(escapes)}; the listeners were reached {times} times")
    if result.fault or len(output_lines) < len(lines):
        return CaseOutcome(outcome="unclear", evidence=result.stderr.text or f"{output_lines}")
    return CaseOutcome(outcome=REFUSED, evidence="; ".join(output_lines))


async def main(name: str, way: str, number: str) -> None:
    """Make the network of a case, and run the case."""
    with contextlib.ExitStack() as stack:
        network = NETWORKS[number](stack)
        runtime = make_runtime(name, allow_unsafe=True)
        try:
            outcome = await try_network(network, CaseContext(runtime, cast(Way, way)))
        finally:
            await runtime.close()
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


@contextlib.contextmanager
def _running(arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _run(*commands: str, inside: Sequence[str] = ()) -> None:
    for command in commands:
        subprocess.run([*inside, *command.split()], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
