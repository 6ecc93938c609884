"""The process that runs one program of WebAssembly, or compiles the interpreter; nothing else runs in it.

* It gives up what it does not need before the program starts: privileges, system calls, its user where that is root.
* It tells how the program ended over a descriptor that the program does not have.
* It ends when its time is over or the process that started it is gone, whatever runs in it.

It is started with the standard library, wasmtime and this package alone on its path.
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
from headrace_sandbox.runtimes.wasm import write_bounds

LOOK_S = 0.25
"""Between looks at the process that started this one."""

STACK_BYTES = 1 << 20
"""Of WebAssembly; CPython's own stack is in its memory."""

SPARE_DESCRIPTORS = 32
"""More than the program may have: those of this process."""


def main() -> None:
    if sys.argv[1] == "compile":
        compile_modules(*sys.argv[2:])
    else:
        run(int(sys.argv[2]), int(sys.argv[3]))


def engine() -> Engine:
    """The same to compile and to run. No clock of its own is needed: the process is killed."""
    config = Config()
    config.max_wasm_stack = STACK_BYTES
    return Engine(config)


def compile_modules(source: str, program: str, stand_in: str, guard_: str) -> None:
    """Writes what is missing of the interpreter and the modules that bound it."""
    machine = engine()
    texts = write_bounds.texts()
    makes: dict[str, Callable[[], Module]] = {
        program: lambda: Module.from_file(machine, source),
        stand_in: lambda: Module(machine, texts["stand_in"]),
        guard_: lambda: Module(machine, texts["guard"]),
    }
    for target, make in makes.items():
        if not os.path.exists(target):
            write_whole(target, make().serialize())


def write_whole(target: str, content: bytes | bytearray) -> None:
    """It is there whole, or not at all."""
    part = Path(f"{target}.{os.getpid()}")
    part.write_bytes(content)
    part.rename(target)


def run(request_descriptor: int, status_descriptor: int) -> None:
    with os.fdopen(request_descriptor, "rb") as file:
        request: dict[str, Any] = json.load(file)
    threading.Thread(target=watch, args=(os.getppid(), request["wall_s"]), daemon=True).start()
    machine = engine()
    paths = request["modules"].items()
    modules = write_bounds.Modules(**{name: Module.deserialize_file(machine, path) for name, path in paths})
    store = Store(machine)
    store.set_limits(memory_size=request["memory_bytes"], instances=4, memories=2)
    descriptors = request["open_files"] + SPARE_DESCRIPTORS
    room = write_bounds.Room(".", request["disk_bytes"], request["entries"], descriptors)
    os.chdir(request["folder"])
    store.set_wasi(wasi(request))
    give_up(request, descriptors)
    write_files(request)
    linker = Linker(machine)
    linker.define_wasi()
    linked = write_bounds.link(store, linker, modules, room)
    exports = linked.program.exports(store)
    start, memory = exports["_start"], exports["memory"]
    assert isinstance(start, Func)
    assert isinstance(memory, Memory)
    os.write(status_descriptor, b"\n")  # it starts now
    ended: dict[str, Any]
    try:
        start(store)
        ended = {"exit": 0}
    except ExitTrap as end:
        ended = {"exit": end.code}
    except (Trap, WasmtimeError) as trap:
        cause = str(trap).rpartition("Caused by:")[2].strip()
        sys.stderr.write(f"{cause}\n")
        sys.stderr.flush()
        ended = {"trap": cause}
    ended |= {"memory_bytes": memory.data_len(store), "disk_full": bool(linked.refused.value(store))}
    os.write(status_descriptor, json.dumps(ended).encode())
    os._exit(0)  # nothing of the program is left to end in order


def watch(parent: int, wall_s: float) -> None:
    until = time.monotonic() + wall_s
    while time.monotonic() < until and os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def give_up(request: dict[str, Any], descriptors: int) -> None:
    limits = {"RLIMIT_CORE": 0, "RLIMIT_NOFILE": descriptors, "RLIMIT_FSIZE": request["file_bytes"]}
    if request["cpu_s"] is not None:
        limits["RLIMIT_CPU"] = request["cpu_s"]
    for name, value in limits.items():
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
        with contextlib.suppress(OSError):  # a second wall, where the kernel has one
            isolation.give_up_privileges(bytes.fromhex(request["filter"]))


def write_files(request: dict[str, Any]) -> None:
    for path, content in request["files"].items():
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode("latin-1"))


def wasi(request: dict[str, Any]) -> WasiConfig:
    config = WasiConfig()
    config.argv = request["arguments"]
    config.env = list(request["environment"].items())
    config.inherit_stdin()
    config.inherit_stdout()
    config.inherit_stderr()
    for inside in ("/scratch", "/tmp"):
        config.preopen_dir(".", inside)
    return config
