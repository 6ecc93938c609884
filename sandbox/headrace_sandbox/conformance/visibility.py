"""Cases 18 to 20, 38 and 39: things that a program may see, or leave for the next one."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from headrace_sandbox.conformance.suite import CONTAINED, REFUSED, CaseContext, Escape, Unclear, case


@case("18", "variables and command lines of this machine", harmless=True)
async def variables(context: CaseContext) -> str:
    secret = secrets.token_hex(16)
    code = """
import glob, os
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try:
        print(open(path, errors='replace').read())
    except OSError:
        pass
print(dict(os.environ))
"""
    os.environ["HEADRACE_CANARY"] = secret
    try:
        text = await context.output(code, kept_bytes=16 << 20)
    finally:
        del os.environ["HEADRACE_CANARY"]
    here = str(Path(__file__).parent.parent)
    for private in (secret, "HEADRACE_CANARY", here, os.getcwd() if len(os.getcwd()) > 4 else here):
        if private in text:
            raise Escape(f"it saw {private!r} of this machine")
    return CONTAINED


@case("19a", "files of this machine", harmless=True)
async def files(context: CaseContext) -> str:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        canary = Path(folder) / "canary"
        canary.write_text("a file of the host")
        code = f"""
import os
for root in ('', '/proc/1/root', '/proc/1/cwd', '/proc/1/cwd/..', '/proc/self/root'):
    try:
        print(open(root + {str(canary)!r}).read())
    except OSError:
        pass
"""
        if await context.output(code):
            raise Escape(f"it read {canary}")
    return REFUSED


@case("19b", "descriptors that were inherited", harmless=True)
async def descriptors(context: CaseContext) -> str:
    with tempfile.TemporaryFile() as held:
        os.set_inheritable(held.fileno(), True)
        code = """
import os, stat, sys
open_ones = []
for number in range(3, 256):
    try:
        mode = os.fstat(number).st_mode
    except OSError:
        continue
    if sys.platform == 'wasi' and stat.S_ISDIR(mode):
        continue  # WASI passes folders as descriptors
    target = os.readlink(f'/proc/self/fd/{number}') if os.path.exists('/proc/self/fd') else ''
    open_ones.append((number, target))
print([item for item in open_ones if not item[1].startswith('/scratch')])
"""
        inherited = await context.output(code)
    if inherited != "[]":
        raise Escape(f"descriptors {inherited}")
    return CONTAINED


@case("20", "passwords, and programs that raise privileges")
async def privileges(context: CaseContext) -> str:
    return await context.try_forbidden("""
import glob, subprocess
def shadow():
    text = open('/etc/shadow').read()
    if '$' in text:
        return text[:20]
    raise PermissionError('no password in it')
attempt('/etc/shadow', shadow)
def become_root():
    os.setuid(0)
    if open('/proc/self/status').read().split('CapEff:')[1].split()[0].strip('0'):
        return os.getuid()
    raise PermissionError('root without a capability')
attempt('setuid', become_root)
def effective():
    status = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)
    held = status['CapEff'].strip(), status['CapBnd'].strip()
    if int(held[0], 16) == 0 and status.get('NoNewPrivs', '1').strip() == '1':
        raise PermissionError('none')
    return held, status.get('NoNewPrivs')
attempt('capabilities', effective)
def su():
    said = subprocess.run(['su', '-c', 'id -u'], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if said.returncode == 0 and said.stdout.strip() == '0' and os.getuid() != 0:
        return said.stdout
    raise PermissionError(said.stderr.strip())
attempt('su', su)
""")


@case("38", "tampering with what the next program is graded by")
async def tampering(context: CaseContext) -> str:
    code = """
import builtins, os, sys
for folder in ['.', os.path.expanduser('~'), '/tmp', *sys.path]:
    for name in ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'json.py', 'unittest.py', 'grader.py'):
        try:
            with open(os.path.join(folder or '.', name), 'w') as file:
                file.write('print("passed")\\nraise SystemExit(0)\\n')
        except OSError:
            pass
builtins.print = lambda *args, **kw: None
sys.exit(0)
"""
    result = await context.run(code)
    if result.exit_code != 0:
        raise Unclear(result.stderr.text)
    grader = "import grader, json, unittest\nprint(json.dumps(grader.VALUE))"
    if (
        output := await context.output(
            "import sys\nsys.path.insert(0, '.')\n" + grader, files={"grader.py": b"VALUE = 41"}
        )
    ) != "41":
        raise Escape(f"the next program printed {output!r}")
    return CONTAINED


SHOW_TRACES = """
import os, sys, time
def listing(folder):
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        return type(error).__name__
print(sorted(os.environ.items()))
print([(folder, listing(folder)) for folder in ('.', '/tmp', '/dev/shm', '/var/tmp', '/run', '/dev/mqueue')])
print(sorted(sys.modules) if len(sys.argv) > 1 else '')
for path in ('/proc/sysvipc/shm', '/proc/sysvipc/msg', '/proc/sysvipc/sem', '/proc/net/unix'):
    try:
        print(path, len(open(path).read().splitlines()))
    except OSError as error:
        print(path, type(error).__name__)
print([pid for pid in (listing('/proc') if sys.platform == 'linux' else []) if pid.isdigit() and len(pid) > 2])
"""
"""Prints everything that an earlier program could have left; the output is the same if nothing was left."""

LEAVE_TRACES = """
import builtins, json, os, sys
json.dumps = None
builtins.left = 1
os.environ['LEFT'] = '1'
for folder in ('.', '/tmp', '/dev/shm', '/var/tmp', '/run'):
    try:
        os.makedirs(folder + '/__pycache__', exist_ok=True)
        open(folder + '/left', 'w').write('left')
    except OSError:
        pass
try:
    import ctypes
    ctypes.CDLL(None).shmget(0x5EED, 4096, 0o1666)
    import socket
    socket.socket(socket.AF_UNIX).bind('\\0left')
except (ImportError, AttributeError, OSError):
    pass  # this Python has none of them
"""


@case("39", "leaving something for the next program")
async def leftovers(context: CaseContext) -> str:
    before = await context.output(SHOW_TRACES)
    await context.output(LEAVE_TRACES)
    after = await context.output(SHOW_TRACES)
    if before != after:
        different = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=False) if pair[0] != pair[1]]
        raise Escape(f"the next program sees {different or after}")
    return CONTAINED
