"""Under Kubernetes' restricted profile: doctor reports it, wasm works with its limits, and nothing runs unprotected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_sandbox.host.supervisor import FOLDER_VARIABLE
from headrace_sandbox.runtimes.registry import runtime_names
from headrace_sandbox.runtimes.wasm import interpreter
from headrace_sandbox.runtimes.wasm.runtime import WasmRuntime
from tests.leaks import MARK

pytestmark = [pytest.mark.component("wasm"), pytest.mark.component("bubblewrap"), pytest.mark.timeout(400)]

USER = 65532 if os.geteuid() == 0 else os.geteuid()

ROOT = Path(__file__).parents[4]


class Pod:
    """A container with a folder that it can write, and the compiled interpreter in its cache, as an image has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *command: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "LANG": "C.UTF-8",
            FOLDER_VARIABLE: str(self.folder / "state"),
            MARK: os.environ[MARK],
        }
        return subprocess.run(
            [sys.executable, "-m", "tests.sandbox.runtimes.wasm.restricted_pod", str(USER), *command],
            env=variables, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def headrace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self(sys.executable, str(Path(sys.executable).parent / "headrace"), "sandbox", *arguments)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self(sys.executable, "-c", code)


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    runtime = WasmRuntime()
    compiled = interpreter.compiled_modules(runtime._source, runtime._installation, lambda _: None)
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    cache = folder / ".cache/headrace"
    cache.mkdir(parents=True)
    for module in (compiled.program, compiled.stand_in, compiled.guard):
        shutil.copy(module, cache)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
        if path.is_dir():
            path.chmod(0o700)
    yield Pod(folder)
    shutil.rmtree(folder)


LOOK = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def error(result):
    return errno.errorcode[ctypes.get_errno()] if result < 0 else 'done'
status = dict(line.split(':\\t', 1) for line in open('/proc/self/status').read().splitlines())
print(json.dumps({
    'user': os.getuid(),
    'capabilities': status['CapEff'] + status['CapPrm'],
    'no_new_privs': status['NoNewPrivs'],
    'filter': status['Seccomp'],
    'namespaces': [error(libc.unshare(flag)) for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000)],
    'clone': error(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)) if os.uname().machine == 'x86_64' else 'EPERM',
    'mount': error(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None)),
    'kcore': len(open('/proc/kcore', 'rb').read(1)) if os.access('/proc/kcore', os.R_OK) else 0,
    'sys': bool(os.statvfs('/proc/sys').f_flag & os.ST_RDONLY),
    'processes': sum(name.isdigit() for name in os.listdir('/proc')),
}))
"""


def test_the_tests_pod_has_the_restrictions_of_the_profile(pod: Pod) -> None:
    found: dict[str, Any] = json.loads(pod.python(LOOK).stdout)
    assert (found["user"], found["capabilities"]) == (USER, "0" * 32)
    assert (found["no_new_privs"], found["filter"]) == ("1", "2")
    assert {*found["namespaces"], found["clone"], found["mount"]} == {"EPERM"}
    if os.geteuid() == 0:  # an ordinary user cannot make its other parts
        assert (found["kcore"], found["sys"]) == (0, True)
        assert found["processes"] < 5


def test_doctor_names_the_remedy_and_wasm_as_the_best_runtime(pod: Pod) -> None:
    outcome = pod.headrace("doctor", "--json")
    assert outcome.returncode == 0, outcome.stderr
    reports = json.loads(outcome.stdout)
    rows = {row["name"]: row for row in reports["runtimes"]}
    assert rows["bubblewrap"]["verdict"] == "fail"
    assert "bubblewrap could not make a sandbox" in rows["bubblewrap"]["found"]
    assert "Kubernetes' restricted profile" in rows["bubblewrap"]["hint"]
    assert {name for name, row in rows.items() if row["verdict"] == "ok"} == {"wasm"}
    assert {"memory_bytes", "pids", "disk_bytes", "wall_s"} <= set(rows["wasm"]["active"])
    assert (reports["default"], reports["best"]) == ("bubblewrap", "wasm")
    assert {row["name"]: row["verdict"] for row in reports["machine"]} == {"control groups": "warn", "users": "warn"}


def test_the_default_runtime_is_refused(pod: Pod) -> None:
    ran = pod.folder / "ran"
    outcome = pod.headrace("run", "--", "touch", str(ran))
    assert (outcome.returncode, outcome.stdout) == (70, "")
    assert "The runtime bubblewrap failed its self-test" in outcome.stderr
    assert not ran.exists()


@pytest.mark.parametrize("name", [name for name in runtime_names() if name not in ("bubblewrap", "wasm")])
def test_a_runtime_that_cannot_isolate_there_is_refused(pod: Pod, name: str) -> None:
    ran = pod.folder / "ran"
    outcome = pod.headrace("run", "--runtime", name, "--", "touch", str(ran))
    assert (outcome.returncode, outcome.stdout) == (70, "")
    assert not ran.exists()


def test_wasm_works_with_its_limits(pod: Pod) -> None:
    def run(code: str, *options: str) -> subprocess.CompletedProcess[str]:
        return pod.headrace("run", "--runtime", "wasm", *options, "--", "python3", "-c", code)

    secret = pod.folder / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    code = f"""
for path in ('{secret}', '/etc/passwd', '/proc/self/environ', '../secret'):
    try:
        print(open(path).read())
    except OSError as error:
        print(type(error).__name__)
try:
    held = bytearray(600 << 20)
except MemoryError:
    print('no memory')
for n in range(40):
    open(f'{{n}}', 'wb').write(bytes(1 << 20))
"""
    outcome = run(code)
    assert outcome.returncode == 124
    assert "secret" not in outcome.stdout
    assert outcome.stdout.endswith("Error\nno memory\n")
    assert outcome.stderr.endswith("No space left on device\nStopped at its limit of disk.\n")
    assert run("while True: pass", "--time-s", "0.5").returncode == 124
    assert list((pod.folder / "state/made").iterdir()) == []
