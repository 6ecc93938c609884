"""The service and its client, over a runtime in memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest

from headrace.errors import SandboxFailure, SetupError
from headrace_sandbox.client import ServiceRuntime, client_of
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from tests.sandbox.memory_runtime import ISOLATION, MemoryRuntime
from tests.sandbox.service.serving import service

LIMITS = Limits(memory_bytes=1 << 20, wall_s=30.0)
TEMPLATE = Template(files={"a": b"\xff\0"}, limits=LIMITS)


@pytest.fixture
def runtime() -> MemoryRuntime:
    return MemoryRuntime()


@pytest.fixture
async def address(runtime: MemoryRuntime, tmp_path: Path) -> AsyncIterator[str]:
    async with service(runtime, tmp_path / "s", pool={"running": 2, "waiting": 2, "sandboxes": 1}) as address:
        yield address
    assert runtime.is_closed
    assert (runtime.living, runtime.running) == (set(), 0)


@pytest.fixture
async def client(address: str) -> AsyncIterator[ServiceRuntime]:
    client = client_of(address, owner="run", wait_s=10.0)
    yield client
    await client.close()


def code(words: str) -> PythonProgram:
    return PythonProgram(code=words)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_client_is_a_runtime(client: ServiceRuntime) -> None:
    assert (await client.connect()).runtime == "memory"
    assert client.isolation == ISOLATION
    result = await client.run(SandboxCommand(arguments=["hello", "there"]), LIMITS)
    assert (result.stdout.text, result.exit_code) == ("hello there", 0)
    assert (await client.run_code(code("kill"), LIMITS)).signal == 9
    sandbox = await client.open(TEMPLATE, 60)
    assert (sandbox.isolation, sandbox.ttl_s) == (ISOLATION, pytest.approx(60))
    assert await sandbox.read("a", 10) == b"\xff\0"
    await sandbox.write("b", b"\xfe")
    assert [(file.path, file.size_bytes) for file in await sandbox.list()] == [("a", 2), ("b", 1)]
    await sandbox.upload(b"tar", "x")
    assert await sandbox.download("x", 10) == b"tar"
    assert (await sandbox.run(SandboxCommand(arguments=["again"]), LIMITS)).stdout.text == "again"
    await sandbox.reset()
    assert [file.path for file in await sandbox.list()] == ["a"]
    assert await sandbox.renew(30) == pytest.approx(30, abs=0.1)
    await sandbox.close()
    await sandbox.close()


async def test_a_session_works_over_the_service(client: ServiceRuntime) -> None:
    sandbox = await client.open(TEMPLATE, 60)
    session = await sandbox.session("bash")
    assert (await session.run("one", LIMITS)).stdout.text == "one"
    running = asyncio.ensure_future(session.run("sleep 60", LIMITS))
    await asyncio.sleep(0.05)
    await session.interrupt()
    assert (await running).stdout.text == "interrupted"
    await session.close()
    with pytest.raises(SandboxFailure, match="over"):
        await session.run("two", LIMITS)
    await sandbox.close()


async def test_a_failure_keeps_its_kind_over_the_service(client: ServiceRuntime) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await client.run_code(code("fail"), LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)
    sandbox = await client.open(TEMPLATE, 60)
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.read("nothing", 10)
    assert (caught.value.kind, caught.value.retryable) == ("no-such-file", False)
    await sandbox.close()


async def test_when_a_client_disconnects_its_running_program_is_killed(
    client: ServiceRuntime, runtime: MemoryRuntime
) -> None:
    sandbox = await client.open(TEMPLATE, 60)
    running = [
        asyncio.ensure_future(client.run_code(code("sleep 60"), LIMITS)),
        asyncio.ensure_future(sandbox.run(SandboxCommand(arguments=["sleep", "60"]), LIMITS)),
    ]
    await until(lambda: runtime.running == 2)
    for task in running:
        task.cancel()
    await until(lambda: runtime.running == 0)
    assert (await sandbox.run(SandboxCommand(arguments=["still there"]), LIMITS)).stdout.text == "still there"
    await sandbox.close()


async def test_a_client_that_disconnects_while_it_waits_is_not_served(
    client: ServiceRuntime, runtime: MemoryRuntime
) -> None:
    first = [asyncio.ensure_future(client.run_code(code("sleep 60"), LIMITS)) for _ in range(2)]
    await until(lambda: runtime.running == 2)
    waiting = asyncio.ensure_future(client.run_code(code("never"), LIMITS))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.sleep(0.05)
    for task in first:
        task.cancel()
    await until(lambda: runtime.running == 0)
    assert (await client.run_code(code("after"), LIMITS)).exit_code == 0
    assert "never" not in runtime.ran


async def test_too_many_requests_are_refused_as_busy_with_the_time_to_retry(
    client: ServiceRuntime, address: str
) -> None:
    running = [asyncio.ensure_future(client.run_code(code("sleep 60"), LIMITS)) for _ in range(4)]
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(address.removeprefix("unix://"))) as http:

        async def waiting() -> int:
            async with http.get("http://localhost/v1/status") as answer:
                count: int = (await answer.json())["waiting"]
                return count

        while await waiting() < 2:
            await asyncio.sleep(0.005)
    with pytest.raises(SandboxFailure) as caught:
        await client.run_code(code("more"), LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("busy", True)
    assert caught.value.extra["retry_after_s"] > 0
    for task in running:
        task.cancel()
    await asyncio.wait(running)


async def test_an_expired_lease_is_over_for_the_client(client: ServiceRuntime, runtime: MemoryRuntime) -> None:
    sandbox = await client.open(TEMPLATE, 0.05)
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.run(SandboxCommand(arguments=["sleep", "60"]), LIMITS)
    assert caught.value.kind == "lease-over"
    await until(lambda: not runtime.living)
    await sandbox.close()


async def test_an_execution_that_may_have_begun_is_run_again_only_if_it_is_repeatable(tmp_path: Path) -> None:
    """A service that accepts one request and disconnects."""
    asked: list[bytes] = []
    path = tmp_path / "s"
    runtime = MemoryRuntime()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    server = await asyncio.start_unix_server(hang_up, path)
    once, again = client_of(f"unix://{path}"), client_of(f"unix://{path}", repeatable=True)
    with pytest.raises(SandboxFailure) as caught:
        await once.run_code(code("x"), LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("service-lost", True)
    assert len(asked) == 1
    running = asyncio.ensure_future(again.run_code(code("y"), LIMITS))
    await until(lambda: len(asked) > 1)
    server.close()
    path.unlink(missing_ok=True)
    async with service(runtime, path):
        assert (await running).stdout.text == "y"
        await once.close()
        await again.close()
    assert runtime.ran == ["y"]


async def test_a_request_that_did_not_reach_the_service_is_retried_for_a_while(tmp_path: Path) -> None:
    client = client_of(f"unix://{tmp_path / 's'}")
    running = asyncio.ensure_future(client.run_code(code("x"), LIMITS))
    await asyncio.sleep(0.1)
    async with service(MemoryRuntime(), tmp_path / "s"):
        assert (await running).stdout.text == "x"
        await client.close()


async def test_an_unreachable_service_is_a_retryable_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_sandbox.client.RECONNECT_S", 0.1)
    client = client_of(f"unix://{tmp_path / 's'}")
    with pytest.raises(SandboxFailure, match="headrace sandbox serve") as caught:
        await client.run_code(code("x"), LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("service-unreachable", True)
    await client.close()


async def test_the_page_of_a_proxy_is_a_failure(tmp_path: Path) -> None:
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 6\r\nConnection: close\r\n\r\n<html>")
        writer.close()

    async with await asyncio.start_unix_server(page, tmp_path / "s"):
        client = client_of(f"unix://{tmp_path / 's'}")
        with pytest.raises(SandboxFailure) as caught:
            await client.run_code(code("x"), LIMITS)
        assert (caught.value.kind, caught.value.retryable) == ("service-error", True)
        await client.close()


def test_an_invalid_address_is_refused() -> None:
    for address in ("", "/run/x.sock", "unix://relative/x", "ftp://host", "http://"):
        with pytest.raises(SandboxFailure) as caught:
            client_of(address)
        assert caught.value.kind == "bad-address"


async def test_the_socket_can_be_used_by_its_owner_or_by_the_given_group(
    runtime: MemoryRuntime, tmp_path: Path
) -> None:
    async with service(runtime, tmp_path / "s"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    assert not (tmp_path / "s").exists()
    async with service(MemoryRuntime(), tmp_path / "s", group=f"{os.getgid()}"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    with pytest.raises(SetupError, match="cannot be given to the group"):
        async with service(MemoryRuntime(), tmp_path / "s", group="no such group"):
            pass


async def test_a_socket_in_use_is_refused_and_that_of_a_killed_service_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # without a listening service
    async with service(MemoryRuntime(), path):
        with pytest.raises(SetupError, match="answers"):
            async with service(MemoryRuntime(), path):
                pass
    path.write_text("a file")
    with pytest.raises(SetupError, match="not a socket"):
        async with service(MemoryRuntime(), path):
            pass


async def test_an_open_bind_without_tokens_is_refused() -> None:
    with pytest.raises(SetupError, match="--tokens"):
        async with service(MemoryRuntime(), host="0.0.0.0"):
            pass


async def test_with_tokens_a_client_needs_the_role_sandbox(runtime: MemoryRuntime, tmp_path: Path) -> None:
    lines = []
    for role in ("sandbox", "viewer"):
        digest = hashlib.sha256(f"the-{role}s-secret-token".encode()).hexdigest()
        lines.append(f'[[tokens]]\nname = "{role}"\nroles = ["{role}"]\nsha256 = "{digest}"\n')
    (tmp_path / "tokens.toml").write_text("".join(lines))
    async with service(runtime, host="127.0.0.1", tokens=tmp_path / "tokens.toml") as address:
        for token, ok in (("the-sandboxs-secret-token", True), ("the-viewers-secret-token", False), ("", False)):
            client = client_of(address, token=token)
            if ok:
                assert (await client.run_code(code("x"), LIMITS)).exit_code == 0
            else:
                with pytest.raises(SandboxFailure) as caught:
                    await client.run_code(code("x"), LIMITS)
                assert (caught.value.kind, caught.value.retryable) == ("service-refused", False)
            await client.close()


async def test_requests_of_web_pages_are_refused(runtime: MemoryRuntime) -> None:
    async with service(runtime, host="127.0.0.1") as address, aiohttp.ClientSession() as http:
        foreign = [({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 403)]
        for headers, status in (*foreign, ({"Content-Type": "text/plain"}, 415)):
            async with http.post(f"{address}/v1/run", data=b"x", headers=headers) as answer:
                assert answer.status == status


async def test_health_readiness_and_metrics_are_reported(client: ServiceRuntime, address: str) -> None:
    await client.run_code(code("x"), LIMITS)
    await client.run_code(code("kill"), LIMITS)
    sandbox = await client.open(TEMPLATE, 60)
    with pytest.raises(SandboxFailure):
        await client.run_code(code("fail"), LIMITS)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(address.removeprefix("unix://"))) as http:
        for path in ("/healthz", "/readyz"):
            async with http.get(f"http://localhost{path}") as answer:
                assert answer.status == 200
        async with http.get("http://localhost/metrics") as answer:
            lines = (await answer.text()).splitlines()
        for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/run", 405), ("POST", "/v1/run", 400)):
            async with http.request(method, f"http://localhost{path}", data=b"\xc1") as answer:
                assert answer.status == status
                assert answer.content_type == "application/problem+json"
    await sandbox.close()
    for line in (
        'headrace_sandbox_executions_total{ending="ok"} 1.0',
        'headrace_sandbox_executions_total{ending="program"} 1.0',
        'headrace_sandbox_failures_total{kind="sandbox-lost"} 1.0',
        'headrace_sandbox_sandboxes{state="leased"} 1.0',
        "headrace_sandbox_leases 1.0",
        'headrace_sandbox_http_requests_total{route="/v1/run",status="200"} 2.0',
    ):
        assert line in lines


async def test_an_unexpected_error_is_a_problem_body_with_an_id_that_is_logged(
    runtime: MemoryRuntime, address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_code(program: PythonProgram, limits: Limits) -> ExecResult:
        raise ZeroDivisionError

    monkeypatch.setattr(runtime, "run_code", run_code)
    body = msgspec.msgpack.encode({"program": {"code": "1"}, "limits": {}, "wait_s": 1.0})
    connector = aiohttp.UnixConnector(address.removeprefix("unix://"))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.post("http://localhost/v1/run", data=body) as answer,
    ):
        assert (answer.status, answer.content_type) == (500, "application/problem+json")
        problem = await answer.json(content_type=None)
    assert problem["incident"] in capsys.readouterr().out


async def test_a_body_over_the_limit_is_refused(runtime: MemoryRuntime, tmp_path: Path) -> None:
    async with service(runtime, tmp_path / "s", max_body_bytes=1000) as address:
        client = client_of(address)
        with pytest.raises(SandboxFailure, match="--max-body-mib") as caught:
            await client.run_code(code("x" * 2000), LIMITS)
        assert (caught.value.kind, caught.value.retryable) == ("service-refused", False)
        await client.close()


async def test_a_file_is_read_only_up_to_the_limit_of_a_body(runtime: MemoryRuntime, tmp_path: Path) -> None:
    async with service(runtime, tmp_path / "s", max_body_bytes=1000) as address:
        client = client_of(address)
        sandbox = await client.open(Template(), 60)
        runtime.opened[-1].files |= {"fits": bytes(1000), "large": bytes(1001), "folder.tar": bytes(1001)}
        assert await sandbox.read("fits", 1 << 40) == bytes(1000)
        for reading in (sandbox.read("large", 1 << 40), sandbox.download("folder", 1 << 40)):
            with pytest.raises(SandboxFailure, match="At most 1000 bytes") as caught:
                await reading
            assert caught.value.kind == "file-too-large"
        await client.close()


HEAD = b"POST /v1/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\nContent-Length: %d\r\n\r\n"


@pytest.mark.parametrize(
    "said",
    [b"", b"\r\n", HEAD[:20], HEAD % 9 + b"x", HEAD.replace(b"msgpack", b"text") % 9 + b"x"],
    ids=["nothing", "an empty line", "half a head", "half a body", "half a body after its answer"],
)
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_client_that_sends_no_complete_request_is_disconnected_after_a_time(
    runtime: MemoryRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes, is_first: bool
) -> None:
    monkeypatch.setattr("headrace_sandbox.service.server.REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr("headrace.server.process.KEEP_ALIVE_S", 0.05)
    async with service(runtime, tmp_path / "s"):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        with contextlib.closing(writer):
            if not is_first:
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await reader.readuntil(b"true}")
            writer.write(said)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()


async def test_a_complete_request_is_answered_however_long_the_answer_takes(
    runtime: MemoryRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_sandbox.service.server.REQUEST_TIMEOUT_S", 0.3)
    asked = {"program": {"code": "sleep 0.5"}, "limits": {"memory_bytes": 1 << 20}, "wait_s": 10.0}
    body = msgspec.msgpack.encode(asked)
    async with service(runtime, tmp_path / "s") as address:
        client = client_of(address, owner="run", wait_s=10.0)
        reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
        with contextlib.closing(writer):
            writer.write(HEAD % len(body) + body[:-1])
            await client.run_code(code("meanwhile"), LIMITS)
            writer.write(body[-1:])
            assert b" 200 " in await reader.readline()
        await client.close()
    assert runtime.ran == ["meanwhile", "sleep 0.5"]


async def test_output_is_kept_only_up_to_the_limit_of_a_body(client: ServiceRuntime) -> None:
    kept = Limits(kept_bytes=1 << 40, memory_bytes=1 << 20)
    lease = await client.open(TEMPLATE, 60.0)
    session = await lease.session("bash")
    for asked in (
        client.run_code(code("1"), kept),
        lease.run(SandboxCommand(arguments=["1"]), kept),
        session.run("1", kept),
    ):
        with pytest.raises(SandboxFailure, match="kept_bytes is 1099511627776") as caught:
            await asked
        assert (caught.value.kind, caught.value.retryable) == ("bad-limit", False)
    await lease.close()


async def test_an_invalid_time_or_limit_is_refused(client: ServiceRuntime, address: str) -> None:
    bodies = {
        "run": {"program": {"code": "1"}, "limits": {"memory_bytes": -1}, "wait_s": 1.0},
        "sandboxes": {"template": {}, "ttl_s": math.nan, "wait_s": 1.0},
    }
    for path, body in bodies.items():
        with pytest.raises(SandboxFailure, match=r"memory_bytes is -1|ttl_s is nan") as caught:
            await client._connection._send("POST", f"/v1/{path}", msgspec.msgpack.encode(body), 10.0, is_safe=False)
        assert (caught.value.kind, caught.value.retryable) == ("bad-limit", False)
    for ttl_s in (0.0, -1.0, math.inf):
        with pytest.raises(SandboxFailure, match="ttl_s"):
            await client.open(TEMPLATE, ttl_s)
    lease = await client.open(TEMPLATE, 60.0)
    with pytest.raises(SandboxFailure, match="ttl_s is nan"):
        await lease.renew(math.nan)
    await lease.close()
    with pytest.raises(SandboxFailure, match="wait_s is inf"):
        client_of(address, wait_s=math.inf)


async def test_a_stopping_service_gives_running_programs_some_time_and_refuses_new_requests(tmp_path: Path) -> None:
    runtime = MemoryRuntime()
    async with service(runtime, tmp_path / "s") as address:
        client = client_of(address)
        short = asyncio.ensure_future(client.run_code(code("sleep 0.3"), LIMITS))
        await until(lambda: runtime.running)
    assert (await short).exit_code == 0
    await client.close()
    runtime = MemoryRuntime()
    async with service(runtime, tmp_path / "s") as address:
        client = client_of(address)
        long = asyncio.ensure_future(client.run_code(code("sleep 60"), LIMITS))
        await until(lambda: runtime.running)
    with pytest.raises(SandboxFailure) as caught:
        await long
    assert (caught.value.kind, caught.value.retryable) == ("draining", True)
    assert runtime.running == 0
    await client.close()
