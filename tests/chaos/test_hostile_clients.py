"""Clients that open connections and send nothing, or send more than a request, to services in processes of their own.

* Silent connections beyond the descriptors of a service keep no worker from being served, on old or new connections.
* Requests whose responses nobody reads, endless headers and endless trailers cost little memory, and it is given back.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

ROUNDS = int(os.environ.get("CHAOS_HOSTILE_ROUNDS", "1"))
"""`make chaos` repeats each attack."""

SILENT = 1500
SOFT_DESCRIPTORS, HARD_DESCRIPTORS = 512, 1024

SENT_BYTES = 8 << 20
"""Bytes of each attack that costs memory."""

MEMORY_BYTES = 32 << 20
"""Most memory that an attack may cost: less than the bytes of four attacks."""

TOKEN = "0123456789abcdef"
TOKENS = f'[[tokens]]\nname = "fleet"\nroles = ["worker", "sandbox"]\ntoken = "{TOKEN}"\n'

LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({SOFT_DESCRIPTORS}, {HARD_DESCRIPTORS}))
"""

ORCHESTRATOR = """
import sys
from pathlib import Path
from headrace_orchestrator.server import run
from headrace_orchestrator.settings import Settings
folder = Path(sys.argv[1])
settings = Settings(data=folder / "data", tokens=folder / "tokens.toml", port=0)
run(settings, ready=lambda address: print(address.url, flush=True))
"""

SANDBOX = """
import sys
from pathlib import Path
from headrace_sandbox.service.server import run
from headrace_sandbox.service.settings import ServiceSettings
settings = ServiceSettings(
    runtime="process", allow_unsafe=True, host="127.0.0.1", tokens=Path(sys.argv[1], "tokens.toml"), log_level="error"
)
run(settings, ready=lambda address: print(address, flush=True))
"""


class Service(NamedTuple):
    """A service process, with a request of its workers."""

    pid: int
    port: int
    method: str
    path: str
    body: bytes

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def memory_bytes(self, field: str = "VmRSS") -> int:
        """Memory in use, or another value of /proc."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

    def open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def require_served(self, worker: http.client.HTTPConnection) -> None:
        """Require that a worker's request is answered on this connection."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        worker.request(self.method, self.path, self.body, headers)
        answer = worker.getresponse()
        content = answer.read()
        assert answer.status == 200, content


LEASE = msgspec.json.encode({"worker": "w", "slots": 1, "free": 1, "wait_s": 0})
SERVICES = {
    "orchestrator": (ORCHESTRATOR, "POST", "/v1/worker/lease", LEASE),
    "sandbox": (SANDBOX, "GET", "/v1/status", b""),
}


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    program, *worker_request = SERVICES[request.param]
    (tmp_path / "tokens.toml").write_text(TOKENS)
    command = [sys.executable, "-c", LIMITED + program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2])
            yield Service(process.pid, port, *worker_request)
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough descriptors in this process for the silent connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < SILENT + 200:
        pytest.skip(f"{SILENT} connections need more than {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SILENT + 200), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("descriptors")
def test_silent_connections_beyond_the_descriptors_keep_no_worker_from_being_served(service: Service):
    with contextlib.closing(service.open()) as worker:
        service.require_served(worker)
        for _ in range(ROUNDS):
            with contextlib.ExitStack() as silent:
                for number in range(SILENT):
                    silent.enter_context(service.connect())
                    if number % 100 == 0:
                        service.require_served(worker)
                service.require_served(worker)
                with contextlib.closing(service.open()) as newer:
                    service.require_served(newer)


ATTACKS = {
    "requests whose responses nobody reads": (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "requests of the shortest kind": (b"", b"GET / HTTP/1.1\r\n\r\n"),
    "endless headers": (b"GET /healthz HTTP/1.1\r\n", b"a: b\r\n"),
    "one endless header": (b"GET /healthz HTTP/1.1\r\na: ", b"b" * 4096),
    "endless trailers": (
        b"POST /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
        b"a: b\r\n",
    ),
}


def test_what_clients_send_before_a_token_costs_little_memory_and_it_is_given_back(service: Service):
    with contextlib.closing(service.open()) as worker:
        service.require_served(worker)
        before = service.memory_bytes()
        for name, (begin, repeated) in ATTACKS.items():
            data = begin + repeated * (SENT_BYTES // len(repeated))
            with contextlib.ExitStack() as clients:
                for _ in range(4 * ROUNDS):
                    send(clients.enter_context(service.connect()), data)
                service.require_served(worker)
                cost = service.memory_bytes("VmHWM") - before
                assert cost < MEMORY_BYTES, f"{name}: {cost >> 20} MiB"


def send(client: socket.socket, data: bytes) -> None:
    """Send data and read nothing, until the service closes the connection or does not read for a second."""
    view = memoryview(data)
    client.setblocking(False)
    deadline = time.monotonic() + 30
    while view and time.monotonic() < deadline and select.select([], [client], [], 1)[1]:
        try:
            view = view[client.send(view) :]
        except (ConnectionResetError, BrokenPipeError):
            return
