"""Cases 1 to 8 and 35: resources that a program may exhaust."""

from __future__ import annotations

import resource
import secrets

from headrace_sandbox.conformance.leftovers import wait_gone
from headrace_sandbox.conformance.suite import CONTAINED, CaseContext, Unclear, case, outcome_of

NO_FORK = ("has no attribute 'fork'", "does not support processes", "Function not implemented")
"""Errors of an interpreter that cannot start processes."""

FULL = ("No space left on device", "Read-only file system", "No such file or directory", "Disk quota", "MemoryError")

TOO_LARGE = ("File too large", "No space left on device", "Invalid argument", "Cannot allocate memory")


@case("1a", "a fork bomb in Python")
async def fork_bomb(context: CaseContext) -> str:
    mark = secrets.token_hex(8)
    code = f"""
import os, sys
if not hasattr(os, 'fork'):
    os.fork
for _ in range(100_000):
    if os.fork() == 0:
        os.execvp('sleep', ['{mark}', '300'])
"""
    result = await context.run(code)
    await wait_gone(mark)
    if result.lost is not None:
        return CONTAINED
    return outcome_of(result, *NO_FORK)


@case("1b", "a fork bomb in a shell")
async def shell_bomb(context: CaseContext) -> str:
    mark = secrets.token_hex(8)
    code = (
        f"import subprocess, sys\nsys.exit(subprocess.run(['bash', '-c', 'f() {{ f | f; }}; f', '{mark}']).returncode)"
    )
    result = await context.run(code, wall_s=2.0)
    await wait_gone(mark)
    if result.lost is not None:
        return CONTAINED
    return outcome_of(result, *NO_FORK)


@case("2", "a memory bomb")
async def memory_bomb(context: CaseContext) -> str:
    result = await context.run("held = [bytearray(10_000_000) for _ in range(1000)]", memory_bytes=64 << 20)
    outcome = outcome_of(result, "MemoryError")
    peak = result.usage.peak_memory_bytes
    if outcome == "limit:memory" and peak is not None and not 48 << 20 <= peak <= 72 << 20:
        raise Unclear(f"a peak of {peak >> 20} MiB of 64")
    if await context.output("print('fine')") != "fine":
        raise Unclear("the next program did not run")
    return outcome


async def _files_in_memory(context: CaseContext, open_file: str) -> str:
    code = f"import os\nfile = {open_file}\nfor _ in range(256):\n    file.write(bytes(1 << 20))\n    file.flush()"
    result = await context.run(code, memory_bytes=64 << 20, disk_bytes=1 << 30, file_bytes=1 << 30)
    return CONTAINED if result.fault == "" else outcome_of(result, *FULL, "has no attribute 'memfd_create'")


@case("3a", "memory through files in the scratch folder")
async def scratch_memory(context: CaseContext) -> str:
    return await _files_in_memory(context, "open('x', 'wb')")


@case("3b", "memory through files in /dev/shm")
async def shared_memory(context: CaseContext) -> str:
    return await _files_in_memory(context, "open('/dev/shm/x', 'wb')")


@case("3c", "memory through memfd")
async def memfd_memory(context: CaseContext) -> str:
    return await _files_in_memory(context, "os.fdopen(os.memfd_create('x'), 'wb')")


@case("4", "a full scratch folder")
async def disk_fill(context: CaseContext) -> str:
    code = "for n in range(100):\n    open(f'{n}', 'wb').write(bytes(1 << 20))"
    return outcome_of(await context.run(code, disk_bytes=8 << 20), *FULL)


@case("5", "300,000 empty files")
async def inode_fill(context: CaseContext) -> str:
    code = "for n in range(300_000):\n    open(f'{n}', 'w').close()"
    return outcome_of(await context.run(code, memory_bytes=64 << 20, wall_s=60.0), *FULL)


@case("6a", "a sparse file of 1 TiB")
async def sparse_file(context: CaseContext) -> str:
    code = "open('x', 'wb').truncate(1 << 40)\nprint('made')"
    result = await context.run(code)
    return CONTAINED if result.fault == "" else outcome_of(result, *TOO_LARGE)


@case("7", "output without end", harmless=True)
async def output_flood(context: CaseContext) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await context.run("while True:\n    print('x' * 1000)", output_bytes=32 << 20, kept_bytes=1000)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if len(result.stdout.head) + len(result.stdout.tail) > 1000 or not result.stdout.truncated:
        raise Unclear(f"{len(result.stdout.head)} and {len(result.stdout.tail)} bytes kept of {result.stdout}")
    if grown_kib > 16 << 10:
        raise Unclear(f"the supervisor grew by {grown_kib} KiB")
    return outcome_of(result)


@case("8", "a megabyte of output in each stream", harmless=True)
async def much_output(context: CaseContext) -> str:
    result = await context.run("import sys\nsys.stdout.write('o' * 1_000_000)\nsys.stderr.write('e' * 1_000_000)")
    sizes = (result.stdout.total_bytes, result.stderr.total_bytes)
    if result.fault or sizes != (1_000_000, 1_000_000):
        raise Unclear(f"{result.fault} {sizes}")
    return CONTAINED


BURN = """
import sys, threading, time
until = time.monotonic() + 2
def burn():
    while time.monotonic() < until:
        pass
def burn_in_processes():
    import os
    for _ in range(8):
        if os.fork() == 0:
            burn()
            os._exit(0)
    for _ in range(8):
        os.wait()
if sys.platform == 'linux':
    burn_in_processes()
else:
    burn()
"""


@case("35a", "eight busy processes on half a processor")
async def processor_quota(context: CaseContext) -> str:
    result = await context.run(BURN, cpus=0.5)
    if result.fault:
        raise Unclear(result.stderr.text)
    if "cpus" in result.isolation.active:
        used_s = result.usage.cpu_s or 0.0
        if used_s > 0.5 * result.wall_s + 0.3:
            raise Unclear(f"{used_s:.2f} s of processor time in {result.wall_s:.2f} s")
    return CONTAINED


@case("35b", "counting the processors")
async def processors_seen(context: CaseContext) -> str:
    code = "import os\nprint(len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else 1)"
    processors = int(await context.output(code, cpus=1.0))
    if processors != 1:
        raise Unclear(f"the program sees {processors} processors with a limit of 1")
    return CONTAINED
