"""Cases 21 to 25, 28, 34 and 36: attacks on the kernel."""

from __future__ import annotations

from headrace_sandbox.conformance.suite import CONTAINED, CaseContext, Unclear, case

NUMBERS = """
if sys.platform == 'linux' and os.uname().machine != 'x86_64':
    raise SystemExit('the numbers of system calls are those of x86-64')
"""


@case("21a", "namespaces and mounts")
async def namespaces(context: CaseContext) -> str:
    return await context.try_forbidden(
        NUMBERS
        + """
attempt('unshare the user namespace', lambda: system_call(272, 0x10000000))
attempt('unshare mounts', lambda: system_call(272, 0x20000))
def cloned():
    pid = system_call(56, 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
attempt('clone with a user namespace', cloned)
attempt('mount', lambda: system_call(165, b'none', b'/tmp', b'tmpfs', 0, 0))
attempt('pivot_root', lambda: system_call(155, b'/tmp', b'/tmp'))
attempt('setns', lambda: system_call(308, os.open('/proc/self/ns/mnt', os.O_RDONLY), 0))
attempt('open_tree', lambda: system_call(428, -100, b'/', 1))
"""
    )


@case("21b", "devices; pipes with names are allowed")
async def devices_made(context: CaseContext) -> str:
    return await context.try_forbidden("""
import stat
if sys.platform == 'linux':
    os.mkfifo('fifo')
for kind in (stat.S_IFCHR, stat.S_IFBLK):
    attempt(f'a device of kind {kind:o}', lambda: os.mknod('device', kind | 0o600, os.makedev(1, 3)))
""")


@case("22", "keys, BPF, performance counters, io_uring, userfaultfd")
async def interfaces(context: CaseContext) -> str:
    return await context.try_forbidden(
        NUMBERS
        + """
zeros = __import__('ctypes').create_string_buffer(256) if sys.platform == 'linux' else None
for name, number, arguments in (
    ('keyctl', 250, (0, -3, 1)),
    ('add_key', 248, (b'user', b'x', b'y', 1, -3)),
    ('bpf', 321, (0, zeros, 72)),
    ('perf_event_open', 298, (zeros, 0, -1, -1, 0)),
    ('io_uring_setup', 425, (1, zeros)),
    ('userfaultfd', 323, (1,)),
    ('open_by_handle_at', 304, (-100, zeros, 0)),
    ('process_vm_readv', 310, (1, zeros, 1, zeros, 1, 0)),
    ('kexec_load', 246, (0, 0, 0, 0)),
    ('init_module', 175, (zeros, 1, b'')),
):
    attempt(name, lambda: system_call(number, *arguments))
"""
    )


@case("23", "settings of the kernel")
async def settings(context: CaseContext) -> str:
    return await context.try_forbidden("""
def written(path):
    with open(path, 'r+') as file:
        was = file.read()
        file.seek(0)
        file.write(was or 'h')
for path in ('sys/kernel/core_pattern', 'sys/vm/overcommit_memory', 'sys/kernel/hostname', 'sys/net/ipv4/ip_forward'):
    attempt(path, lambda: written('/proc/' + path))
attempt('sysrq', lambda: os.write(os.open('/proc/sysrq-trigger', os.O_WRONLY), b'h'))
attempt('drop_caches', lambda: os.write(os.open('/proc/sys/vm/drop_caches', os.O_WRONLY), b'1'))
attempt('kcore', lambda: open('/proc/kcore', 'rb').read(1))
attempt('kmsg', lambda: os.read(os.open('/dev/kmsg', os.O_RDONLY), 10))
def addresses():
    with open('/proc/kallsyms') as file:
        if file.readline().split()[0].strip('0'):
            return 'addresses of the kernel'
    raise PermissionError('all zero')
attempt('kallsyms', addresses)
""")


@case("24", "saving itself from the killer of memory")
async def oom_score(context: CaseContext) -> str:
    return await context.try_forbidden("""
def score():
    with open('/proc/self/oom_score_adj', 'w') as file:
        file.write('-1000')
attempt('oom_score_adj', score)
""")


@case("25", "devices of this machine")
async def devices(context: CaseContext) -> str:
    return await context.try_forbidden("""
for name in ('kvm', 'vda', 'sda', 'mem', 'port', 'fuse', 'net/tun', 'vsock', 'loop-control'):
    attempt('/dev/' + name, lambda: os.open('/dev/' + name, os.O_RDONLY))
""")


@case("28", "sockets of other families: VSOCK, ALG, PACKET, raw")
async def families(context: CaseContext) -> str:
    return await context.try_forbidden("""
import socket
attempt('VSOCK', lambda: socket.socket(40, socket.SOCK_STREAM))
attempt('ALG', lambda: socket.socket(38, socket.SOCK_SEQPACKET))
attempt('PACKET', lambda: socket.socket(17, socket.SOCK_RAW))
attempt('Bluetooth', lambda: socket.socket(31, socket.SOCK_STREAM))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
""")


@case("34", "setting the clock")
async def clocks(context: CaseContext) -> str:
    return await context.try_forbidden("""
import time
attempt('clock_settime', lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()))
def shift():
    os.write(os.open('/proc/self/timens_offsets', os.O_WRONLY), b'monotonic 1000 0')
attempt('the offset of a clock', shift)
""")


@case("36", "dumping its core")
async def core_dump(context: CaseContext) -> str:
    code = """
import os, sys
if sys.platform != 'linux':
    print('no processes')
    raise SystemExit
import resource
try:
    resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))
except (OSError, ValueError):
    pass
print(resource.getrlimit(resource.RLIMIT_CORE)[1], flush=True)
os.abort()
"""
    result = await context.run(code)
    if result.stdout.text == "no processes\n":
        return CONTAINED
    if result.stdout.text != "0\n":
        raise Unclear(f"a core dump may have {result.stdout.text.strip()} bytes: {result.stderr.text}")
    if (result.signal or (result.exit_code or 0) - 128) != 6 or result.fault != "program":
        raise Unclear(f"ended with {result.exit_code}, signal {result.signal}")
    return CONTAINED
