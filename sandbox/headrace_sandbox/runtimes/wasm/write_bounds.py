"""Bounds what a program writes into its folder: calls that take space ask first, and get ENOSPC where there is none.

* What the folder holds is measured, files that were deleted and are still open included; between two measurements every
  byte written counts as a new one. What cannot be measured is full.
* The program's calls go through a table to functions that ask and then make the call in the program's own memory, so
  what WASI checks it still checks itself.

It takes two small modules, because the program has its functions before its memory is there: the first stands in for
the functions when the program is linked, the second is made when the memory is there, and put into the first's table.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from wasmtime import Func, FuncType, Global, Instance, Linker, Module, Store, ValType

WASI = "wasi_snapshot_preview1"

BLOCK_BYTES = 512
"""The unit of ``st_blocks``."""


MOST_DEEP = 50
"""Folders in folders. Every process that walks through them holds a descriptor for each."""

FEW = 50
"""Folders that are made between two measurements, at most; a tree gets no deeper than this and ``MOST_DEEP``."""


class Guarded(NamedTuple):
    """A call: its parameters, and what it takes, as WebAssembly that leaves entries and bytes on the stack."""

    parameters: str
    takes: str


GUARDED = {
    "fd_write": Guarded("i32 i32 i32 i32", "i32.const 0 (call $bytes (local.get 0) (local.get 1) (local.get 2))"),
    "fd_pwrite": Guarded("i32 i32 i32 i64 i32", "i32.const 0 (call $bytes (local.get 0) (local.get 1) (local.get 2))"),
    "fd_allocate": Guarded("i32 i64 i64", "i32.const 0 local.get 2"),
    "path_open": Guarded(
        "i32 i32 i32 i32 i32 i64 i64 i32 i32", "(i32.and (local.get 4) (i32.const 1)) i64.const 0"
    ),  # oflags: creat
    "path_create_directory": Guarded("i32 i32 i32", "(call $few) i32.const 1 i64.const 4096"),
    "path_symlink": Guarded("i32 i32 i32 i32 i32", "i32.const 1 i64.const 4096"),
    # Measured each time, for it may put one deep tree into another.
    "path_rename": Guarded(
        "i32 i32 i32 i32 i32 i32", "(global.set $entries_left (i32.const 0)) i32.const 1 i64.const 0"
    ),
    "path_link": Guarded("i32 i32 i32 i32 i32 i32 i32", "i32.const 1 i64.const 0"),
}

NO_SPACE = 51
"""ENOSPC, as WASI has it."""

_STAND_IN = """(module
  (table (export "table") {count} funcref)
  {functions})"""

_GUARD = """(module
  {imports}
  (import "guard" "room" (func $room (result i32 i64)))
  (import "guard" "table" (table {count} funcref))
  (import "guard" "memory" (memory 0))
  (import "{wasi}" "fd_close" (func $close (param i32) (result i32)))
  (export "memory" (memory 0))
  (global $refused (export "refused") (mut i32) (i32.const 0))
  (global $entries_left (mut i32) (i32.const 0))
  (global $bytes_left (mut i64) (i64.const 0))
  (global $streams (mut i32) (i32.const 7)) ;; of descriptors 0 to 2, a bit each: still what they were
  (elem (i32.const 0) {names} $fd_close)

  (func $bytes (param $fd i32) (param $at i32) (param $count i32) (result i64)
    (local $sum i64)
    (if (i32.and (i32.le_u (local.get $fd) (i32.const 2))
                 (i32.shr_u (global.get $streams) (local.get $fd))) (then (return (i64.const 0))))
    (block $end (loop $next
      (br_if $end (i32.eqz (local.get $count)))
      (local.set $sum (i64.add (local.get $sum) (i64.extend_i32_u (i32.load offset=4 (local.get $at)))))
      (local.set $at (i32.add (local.get $at) (i32.const 8)))
      (local.set $count (i32.sub (local.get $count) (i32.const 1)))
      (br $next)))
    (local.get $sum))

  (func $few
    (if (i32.gt_u (global.get $entries_left) (i32.const {few})) (then (global.set $entries_left (i32.const {few})))))

  (func $fits (param $entries i32) (param $bytes i64) (result i32)
    (i32.and (i32.le_u (local.get $entries) (global.get $entries_left))
             (i64.le_u (local.get $bytes) (global.get $bytes_left))))

  (func $may (param $entries i32) (param $bytes i64) (result i32)
    (if (i32.and (i32.eqz (local.get $entries)) (i64.eqz (local.get $bytes))) (then (return (i32.const 1))))
    (if (i32.eqz (call $fits (local.get $entries) (local.get $bytes))) (then
      (call $room) (global.set $bytes_left) (global.set $entries_left)
      (if (i32.eqz (call $fits (local.get $entries) (local.get $bytes))) (then
        (global.set $refused (i32.const 1))
        (return (i32.const 0))))))
    (global.set $entries_left (i32.sub (global.get $entries_left) (local.get $entries)))
    (global.set $bytes_left (i64.sub (global.get $bytes_left) (local.get $bytes)))
    (i32.const 1))

  (func $fd_close (param i32) (result i32)
    (if (i32.le_u (local.get 0) (i32.const 2)) (then (global.set $streams
      (i32.and (global.get $streams) (i32.xor (i32.const 7) (i32.shl (i32.const 1) (local.get 0)))))))
    (call $close (local.get 0)))
  {functions})"""


class Room(NamedTuple):
    """What a folder may hold."""

    folder: str
    bytes: int
    entries: int
    descriptors: int


class Modules(NamedTuple):
    """The program, and the two that bound it."""

    program: Module
    stand_in: Module
    guard: Module


def texts() -> dict[str, str]:
    """The two that bound it, as text, by name."""
    return {"stand_in": _stand_in(), "guard": _guard()}


class Linked(NamedTuple):
    """The program, with calls that ask. ``refused``: 1 once one of them got ENOSPC; the program cannot reach it."""

    program: Instance
    refused: Global


def link(store: Store, linker: Linker, modules: Modules, room: Room) -> Linked:
    """Link the program. The linker has WASI."""
    exports = Instance(store, modules.stand_in, []).exports(store)
    original = {name: linker.get(store, WASI, name) for name in (*GUARDED, "fd_close")}
    linker.allow_shadowing = True
    for name in original:
        linker.define(store, WASI, name, exports[name])
    instance = linker.instantiate(store, modules.program)

    guards = Linker(linker.engine)
    for name, function in original.items():
        guards.define(store, WASI, name, function)
    measure = FuncType([], [ValType.i32(), ValType.i64()])
    guards.define(store, "guard", "room", Func(store, measure, _measured(room)))
    guards.define(store, "guard", "table", exports["table"])
    guards.define(store, "guard", "memory", instance.exports(store)["memory"])
    refused = guards.instantiate(store, modules.guard).exports(store)["refused"]
    assert isinstance(refused, Global)
    return Linked(instance, refused)


def _stand_in() -> str:
    parameters = {**{name: call.parameters for name, call in GUARDED.items()}, "fd_close": "i32"}
    functions = (
        f'(func (export "{name}") (param {types}) (result i32) {_arguments(types)} '
        f"(call_indirect (param {types}) (result i32) (i32.const {position})))"
        for position, (name, types) in enumerate(parameters.items())
    )
    return _STAND_IN.format(count=len(parameters), functions="\n  ".join(functions))


def _guard() -> str:
    imports = (
        f'(import "{WASI}" "{name}" (func $wasi_{name} (param {call.parameters}) (result i32)))'
        for name, call in GUARDED.items()
    )
    functions = (
        f"(func ${name} (param {call.parameters}) (result i32) "
        f"(if (i32.eqz (call $may {call.takes})) (then (return (i32.const {NO_SPACE})))) "
        f"(call $wasi_{name} {_arguments(call.parameters)}))"
        for name, call in GUARDED.items()
    )
    return _GUARD.format(
        imports="\n  ".join(imports),
        functions="\n  ".join(functions),
        names=" ".join(f"${name}" for name in GUARDED),
        count=len(GUARDED) + 1,
        wasi=WASI,
        few=FEW,
    )


def _arguments(types: str) -> str:
    return " ".join(f"(local.get {position})" for position in range(len(types.split())))


def _measured(room: Room) -> Callable[[], list[int]]:
    def measure() -> list[int]:
        entries, blocks = 0, 0
        try:
            for entry in _held(room):
                entries += 1
                blocks += entry.st_blocks
        except (OSError, _TooDeep):  # what cannot be measured is full
            return [0, 0]
        return [max(room.entries - entries, 0), max(room.bytes - blocks * BLOCK_BYTES, 0)]

    return measure


class _TooDeep(Exception):
    """Folders in folders beyond what is measured."""


def _held(room: Room) -> Iterator[os.stat_result]:
    folder = os.open(room.folder, os.O_RDONLY)
    try:
        yield from _below(folder, MOST_DEEP)
    finally:
        os.close(folder)
    for descriptor in range(3, room.descriptors):
        try:
            open_file = os.fstat(descriptor)
        except OSError:
            continue
        if stat.S_ISREG(open_file.st_mode) and open_file.st_nlink == 0:
            yield open_file


def _below(folder: int, depth: int) -> Iterator[os.stat_result]:
    """By descriptors, because a path may be longer than the kernel takes."""
    if depth == 0:
        raise _TooDeep
    with os.scandir(folder) as found:
        for entry in found:
            yield entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                inner = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
                try:
                    yield from _below(inner, depth - 1)
                finally:
                    os.close(inner)
