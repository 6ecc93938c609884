"""The main program of the process that runs one WebAssembly program, or compiles the interpreter.

* Before the program starts it drops what it does not need: privileges, system calls, and root's user id.
* It reports the program's end over a descriptor that the program does not have.
* It ends after the longest time that the program may take, and when its parent process has ended, whatever runs in it.

Only the standard library, wasmtime and this package are on its path.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wasmtime import Config, Engine, ExitTrap, Func, Linker, Memory, Module, Store, Trap, WasiConfig, WasmtimeError

from headrace_sandbox.guest import isolation
from headrace_sandbox.runtimes.wasm import write_limits

POLL_S = 0.25
"""Interval of the checks for the parent process."""

STACK_BYTES = 1 << 20
"""The stack of WebAssembly; CPython's own stack is in its memory."""

SPARE_DESCRIPTORS = 32
"""Descriptors of this process itself, beyond the program's limit."""


def main() -> None:
    """Compile or run, as the arguments say."""
    if sys.argv[1] == "compile":
        compile_modules(*sys.argv[2:])
    else:
        run(int(sys.argv[2]), int(sys.argv[3]))


def engine() -> Engine:
    """An engine with the same settings for compiling and running. It needs no clock: the process is killed."""
    config = Config()
    config.max_wasm_stack = STACK_BYTES
    return Engine(config)


def compile_modules(source: str, program: str, stand_in: str, guard: str) -> None:
    """Compile the missing ones of the interpreter and the modules that limit its writes."""
    machine = engine()
    texts = write_limits.module_texts()
    makes: dict[str, Callable[[], Module]] = {
        program: lambda: Module.from_file(machine, source),
        stand_in: lambda: Module(machine, texts["stand_in"]),
        guard: lambda: Module(machine, texts["guard"]),
    }
    for target, make in makes.items():
        if not os.path.exists(target):
            write_atomically(target, make().serialize())


def write_atomically(target: str, content: bytes | bytearray) -> None:
    """Write a file that exists only once it is complete."""
    part = Path(f"{target}.{os.getpid()}")
    part.write_bytes(content)
    part.rename(target)


def run(request_descriptor: int, status_descriptor: int) -> None:
    """Run the program of a request, and report its end."""
    with os.fdopen(request_descriptor, "rb") as file:
        request: dict[str, Any] = json.load(file)
    threading.Thread(target=exit_with_parent, args=(os.getppid(), request["most_s"]), daemon=True).start()
    machine = engine()
    paths = request["modules"].items()
    modules = write_limits.WasmModules(**{name: Module.deserialize_file(machine, path) for name, path in paths})
    store = Store(machine)
    store.set_limits(memory_size=request["memory_bytes"], instances=4, memories=2)
    descriptors = request["open_files"] + SPARE_DESCRIPTORS
    limits = write_limits.FolderLimits(".", request["disk_bytes"], request["entries"], descriptors)
    os.chdir(request["folder"])
    store.set_wasi(wasi_config(request))
    drop_rights(request, descriptors)
    write_files(request)
    linker = Linker(machine)
    linker.define_wasi()
    linked = write_limits.link(store, linker, modules, limits)
    exports = linked.program.exports(store)
    start, memory = exports["_start"], exports["memory"]
    assert isinstance(start, Func)
    assert isinstance(memory, Memory)
    os.write(status_descriptor, b"\n")  # the program starts now
    report: dict[str, Any]
    try:
        start(store)
        report = {"exit": 0}
    except ExitTrap as end:
        report = {"exit": end.code}
    except (Trap, WasmtimeError) as trap:
        cause = str(trap).rpartition("Caused by:")[2].strip()
        sys.stderr.write(f"{cause}\n")
        sys.stderr.flush()
        report = {"trap": cause}
    report |= {"memory_bytes": memory.data_len(store), "disk_full": bool(linked.refused.value(store))}
    os.write(status_descriptor, json.dumps(report).encode())
    os._exit(0)  # the program has nothing left to end in order


def exit_with_parent(parent: int, most_s: float) -> None:
    """End this process at its last moment, or when its parent has ended."""
    until = time.monotonic() + most_s
    while time.monotonic() < until and os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def drop_rights(request: dict[str, Any], descriptors: int) -> None:
    """Set the limits, and drop privileges and system calls."""
    rlimits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": descriptors, "RLIMIT_FSIZE": request["file_bytes"]}
    if request["cpu_s"] is not None:
        rlimits["RLIMIT_CPU"] = request["cpu_s"]
    for name, value in rlimits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))
    user = request["user"]
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if request["filter"] is not None:
        with contextlib.suppress(OSError):  # a second barrier, where the kernel supports it
            isolation.drop_privileges(bytes.fromhex(request["filter"]))


def write_files(request: dict[str, Any]) -> None:
    """Write the program's files into the current folder."""
    for path, content in request["files"].items():
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode("latin-1"))


def wasi_config(request: dict[str, Any]) -> WasiConfig:
    """The program's arguments, variables, streams and folders."""
    config = WasiConfig()
    config.argv = request["arguments"]
    config.env = list(request["environment"].items())
    config.inherit_stdin()
    config.inherit_stdout()
    config.inherit_stderr()
    for inside in ("/scratch", "/tmp"):
        config.preopen_dir(".", inside)
    return config
