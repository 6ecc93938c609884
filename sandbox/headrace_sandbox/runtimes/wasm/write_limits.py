"""Limits a program's writes to its folder: each call that uses space is checked first, and gets ENOSPC if none is left.

* The folder's content is measured, including deleted files that are still open; between two measurements every byte
  written counts as a new one. A folder that cannot be measured counts as full.
* The program's calls go through a table to functions that check and then make the call in the program's own memory, so
  WASI's own checks still apply.

This takes two small modules, because a program is linked with its functions before its memory exists: the stand-in
provides the functions at link time, and the guard is made with the memory, and put into the stand-in's table.
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

MOST_DEPTH = 50
"""Deepest nesting of folders. A process that walks through them holds a descriptor for each level."""

MOST_NEW_FOLDERS = 50
"""Most folders that are made between two measurements, so a tree is never deeper than the sum of this and
``MOST_DEPTH``."""


class GuardedCall(NamedTuple):
    """A call of WASI: its parameters, and its demand, as WebAssembly that leaves entries and bytes on the stack."""

    parameters: str
    demand: str


GUARDED_CALLS = {
    "fd_write": GuardedCall("i32 i32 i32 i32", "i32.const 0 (call $bytes (local.get 0) (local.get 1) (local.get 2))"),
    "fd_pwrite": GuardedCall(
        "i32 i32 i32 i64 i32", "i32.const 0 (call $bytes (local.get 0) (local.get 1) (local.get 2))"
    ),
    "fd_allocate": GuardedCall("i32 i64 i64", "i32.const 0 local.get 2"),
    "path_open": GuardedCall(
        "i32 i32 i32 i32 i32 i64 i64 i32 i32", "(i32.and (local.get 4) (i32.const 1)) i64.const 0"
    ),  # oflags: creat
    "path_create_directory": GuardedCall("i32 i32 i32", "(call $limit_entries) i32.const 1 i64.const 4096"),
    "path_symlink": GuardedCall("i32 i32 i32 i32 i32", "i32.const 1 i64.const 4096"),
    # Measured each time, because it may move one deep tree into another.
    "path_rename": GuardedCall(
        "i32 i32 i32 i32 i32 i32", "(global.set $entries_left (i32.const 0)) i32.const 1 i64.const 0"
    ),
    "path_link": GuardedCall("i32 i32 i32 i32 i32 i32 i32", "i32.const 1 i64.const 0"),
}

NO_SPACE = 51
"""WASI's number for ENOSPC."""

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
  (global $streams (mut i32) (i32.const 7)) ;; a bit for each of descriptors 0 to 2: 1 while it was not closed
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

  (func $limit_entries
    (if (i32.gt_u (global.get $entries_left) (i32.const {few})) (then (global.set $entries_left (i32.const {few})))))

  (func $fits (param $entries i32) (param $bytes i64) (result i32)
    (i32.and (i32.le_u (local.get $entries) (global.get $entries_left))
             (i64.le_u (local.get $bytes) (global.get $bytes_left))))

  (func $reserve (param $entries i32) (param $bytes i64) (result i32)
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


class FolderLimits(NamedTuple):
    """The limits of a folder's content. ``descriptors``: most open files of this process."""

    folder: str
    bytes: int
    entries: int
    descriptors: int


class WasmModules(NamedTuple):
    """The program, and the two modules that limit its writes."""

    program: Module
    stand_in: Module
    guard: Module


def module_texts() -> dict[str, str]:
    """The two modules that limit writes, as text, by name."""
    return {"stand_in": _stand_in_text(), "guard": _guard_text()}


class LinkedProgram(NamedTuple):
    """The program, with guarded calls. ``refused``: 1 once one of them got ENOSPC; the program cannot change it."""

    program: Instance
    refused: Global


def link(store: Store, linker: Linker, modules: WasmModules, limits: FolderLimits) -> LinkedProgram:
    """Link the program. The linker must define WASI."""
    exports = Instance(store, modules.stand_in, []).exports(store)
    original = {name: linker.get(store, WASI, name) for name in (*GUARDED_CALLS, "fd_close")}
    linker.allow_shadowing = True
    for name in original:
        linker.define(store, WASI, name, exports[name])
    instance = linker.instantiate(store, modules.program)

    guards = Linker(linker.engine)
    for name, function in original.items():
        guards.define(store, WASI, name, function)
    measure = FuncType([], [ValType.i32(), ValType.i64()])
    guards.define(store, "guard", "room", Func(store, measure, _measurement(limits)))
    guards.define(store, "guard", "table", exports["table"])
    guards.define(store, "guard", "memory", instance.exports(store)["memory"])
    refused = guards.instantiate(store, modules.guard).exports(store)["refused"]
    assert isinstance(refused, Global)
    return LinkedProgram(instance, refused)


def _stand_in_text() -> str:
    parameters = {**{name: call.parameters for name, call in GUARDED_CALLS.items()}, "fd_close": "i32"}
    functions = (
        f'(func (export "{name}") (param {types}) (result i32) {_arguments(types)} '
        f"(call_indirect (param {types}) (result i32) (i32.const {position})))"
        for position, (name, types) in enumerate(parameters.items())
    )
    return _STAND_IN.format(count=len(parameters), functions="\n  ".join(functions))


def _guard_text() -> str:
    imports = (
        f'(import "{WASI}" "{name}" (func $wasi_{name} (param {call.parameters}) (result i32)))'
        for name, call in GUARDED_CALLS.items()
    )
    functions = (
        f"(func ${name} (param {call.parameters}) (result i32) "
        f"(if (i32.eqz (call $reserve {call.demand})) (then (return (i32.const {NO_SPACE})))) "
        f"(call $wasi_{name} {_arguments(call.parameters)}))"
        for name, call in GUARDED_CALLS.items()
    )
    return _GUARD.format(
        imports="\n  ".join(imports),
        functions="\n  ".join(functions),
        names=" ".join(f"${name}" for name in GUARDED_CALLS),
        count=len(GUARDED_CALLS) + 1,
        wasi=WASI,
        few=MOST_NEW_FOLDERS,
    )


def _arguments(types: str) -> str:
    return " ".join(f"(local.get {position})" for position in range(len(types.split())))


def _measurement(limits: FolderLimits) -> Callable[[], list[int]]:
    def measure() -> list[int]:
        entries, blocks = 0, 0
        try:
            for entry in _measured_files(limits):
                entries += 1
                blocks += entry.st_blocks
        except (OSError, _TooDeep):  # counts as full
            return [0, 0]
        return [max(limits.entries - entries, 0), max(limits.bytes - blocks * BLOCK_BYTES, 0)]

    return measure


class _TooDeep(Exception):
    """A folder is nested deeper than is measured."""


def _measured_files(limits: FolderLimits) -> Iterator[os.stat_result]:
    folder = os.open(limits.folder, os.O_RDONLY)
    try:
        yield from _files_below(folder, MOST_DEPTH)
    finally:
        os.close(folder)
    for descriptor in range(3, limits.descriptors):
        try:
            open_file = os.fstat(descriptor)
        except OSError:
            continue
        if stat.S_ISREG(open_file.st_mode) and open_file.st_nlink == 0:
            yield open_file


def _files_below(folder: int, depth: int) -> Iterator[os.stat_result]:
    """The entries of a tree, found by descriptors, because a path may be longer than the kernel accepts."""
    if depth == 0:
        raise _TooDeep
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                inner = os.open(entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=folder)
                try:
                    yield from _files_below(inner, depth - 1)
                finally:
                    os.close(inner)
