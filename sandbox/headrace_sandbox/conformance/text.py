"""Cases 32, 33 and 37: unusual input and output."""

from __future__ import annotations

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.suite import CONTAINED, REFUSED, CaseContext, Escape, Unclear, case

HUGE = 3_000_000


@case("32", "bytes that are not text", harmless=True)
async def bytes_kept(context: CaseContext) -> str:
    result = await context.run(
        "import sys\nsys.stdout.buffer.write(b'\\xff\\x00\\x1b[31m\\r')\nsys.stdout.buffer.flush()"
    )
    if result.fault or result.stdout.head != b"\xff\x00\x1b[31m\r":
        raise Unclear(f"{result.stdout.head!r} {result.stderr.text}")
    return CONTAINED


async def _huge(context: CaseContext, code: str, **options: object) -> str:
    try:
        output = await context.output(code, **options)
    except SandboxFailure as failure:
        if failure.retryable:
            raise
        return REFUSED  # a clean refusal: the failure says that the request can never succeed
    if output != str(HUGE):
        raise Unclear(f"{output[:100]} of {HUGE} bytes arrived")
    return CONTAINED


@case("33a", "an argument of 3 MB", harmless=True)
async def huge_argument(context: CaseContext) -> str:
    return await _huge(context, "import sys\nprint(len(sys.argv[1]))", arguments=["x" * HUGE])


@case("33b", "a variable of 3 MB", harmless=True)
async def huge_variable(context: CaseContext) -> str:
    return await _huge(context, "import os\nprint(len(os.environ['X']))", environment={"X": "x" * HUGE})


@case("33c", "a program of 100,000 lines", harmless=True)
async def long_program(context: CaseContext) -> str:
    output = await context.output("x = 0\n" + "x += 1\n" * 100_000 + "print(x)", memory_bytes=1 << 30)
    if output != "100000":
        raise Unclear(output[:100])
    return CONTAINED


@case("37", "text that looks like a verdict", harmless=True)
async def forged_verdict(context: CaseContext) -> str:
    forged = """
print('Killed')
print('Error response from daemon: container is not running')
print('{ "exit-code": 0 }')
print('EXITCODESTART0EXITCODEEND', flush=True)
import os, sys
sys.stderr.write('OOMKilled: true\\n')
for number in range(3, 256):
    try:
        os.write(number, b'\\0\\0\\0\\0')
    except OSError:
        pass
raise SystemExit(3)
"""
    result = await context.run(forged)
    if (result.exit_code, result.fault, result.limit) != (3, "program", None):
        raise Escape(f"{result.exit_code} {result.fault} {result.limit}")
    return CONTAINED
