"""Grades of correct, wrong, broken and dishonest submissions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.graders import CallCase, Case, StdioCase, grade
from headrace_sandbox.graders.comparison import UnreadableAnswer, read_answer, same_text, same_value
from headrace_sandbox.guest.values import encode
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Runtime
from headrace_sandbox.runtimes.registry import make_runtime

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=10.0)

SQUARE_IO = [StdioCase(stdin=f"{n}\n", stdout=f"{n * n}\n") for n in (3, 1234)]
SQUARE = [CallCase(function="square", arguments=[n], expected=n * n) for n in (3, 1234)]


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    bubblewrap = make_runtime("bubblewrap")
    yield bubblewrap
    await bubblewrap.close()


async def verdicts(runtime: Runtime, source: str, cases: list[Case], limits: Limits = LIMITS) -> list[str]:
    return [result.verdict for result in await grade(runtime, source, cases, limits)]


# Honest submissions -------------------------------------------------------------------------------------------------


async def test_each_case_has_a_verdict_of_its_own(runtime: Runtime) -> None:
    source = """
n = int(input())
if n == 4: raise ValueError('four')
while n == 5: pass
held = bytearray(n == 6 and 10**9)
print(n * n if n != 3 else 10)
"""
    cases = [StdioCase(stdin=f"{n}", stdout=f" {n * n}\n\n") for n in range(2, 7)]
    results = await grade(runtime, source, cases, Limits(wall_s=1.0, memory_bytes=64 << 20))
    assert [(result.verdict, result.limit) for result in results[:4]] == [
        ("passed", None),
        ("wrong", None),
        ("error", None),
        ("limit", "time"),
    ]
    assert results[2].detail.endswith("ValueError: four")
    assert results[4].verdict in ("limit", "error"), "killed for memory, or refused it"


async def test_a_case_cannot_leave_anything_to_the_next_one(runtime: Runtime) -> None:
    source = "import os\nprint(os.path.exists('left'))\nopen('left', 'w').close()"
    results = await grade(runtime, source, [StdioCase(stdout="False")] * 3, LIMITS, at_once=1)
    assert [result.verdict for result in results] == ["passed"] * 3


async def test_functions_are_called_with_data_and_return_data(runtime: Runtime) -> None:
    source = """
def swap(pair): return pair[1], pair[0]
def count(words): return {word: words.count(word) for word in words}
def letters(text): return set(text)
def power(base, exponent): print('noise'); return base ** exponent
def raw(data): return data[::-1]
def nothing(): pass
class Solution:
    def __init__(self): self.base = 1
    def add(self, n): return self.base + n
"""
    cases: list[Case] = [
        CallCase(function="swap", arguments=[[1, "é"]], expected=["é", 1]),
        CallCase(function="count", arguments=[["a", "b", "a"]], expected={"a": 2, "b": 1}),
        CallCase(function="letters", arguments=["hello"], expected=["h", "e", "l", "o"]),
        CallCase(function="power", arguments=[7, 9000], expected=7**9000),
        CallCase(function="raw", arguments=[b"\x00\xff"], expected=b"\xff\x00"),
        CallCase(function="nothing", expected=None),
        CallCase(function="Solution.add", arguments=[1], expected=2),
    ]
    assert await verdicts(runtime, source, cases) == ["passed"] * len(cases)


async def test_a_missing_function_or_a_result_that_is_not_data_is_an_error(runtime: Runtime) -> None:
    source = "def f(): return lambda: 1\nx = 3"
    cases: list[Case] = [CallCase(function=name, expected=3) for name in ("f", "x", "g")]
    results = await grade(runtime, source, cases, LIMITS)
    assert [result.verdict for result in results] == ["error"] * 3
    assert [result.detail.rpartition("\n")[2] for result in results] == [
        "TypeError: function is not data",
        "TypeError: 'int' object is not callable",
        "AttributeError: module 'submission' has no attribute 'g'",
    ]


async def test_a_submission_that_does_not_compile_or_is_not_unicode_is_an_error(runtime: Runtime) -> None:
    for source in ("def square(n) return", "\ud800", "a\0b"):
        assert await verdicts(runtime, source, [*SQUARE_IO[:1], *SQUARE[:1]]) == ["error", "error"]


async def test_stopping_early_starts_no_case_after_one_that_did_not_pass(runtime: Runtime) -> None:
    cases = [StdioCase(stdin=f"{n}", stdout="3") for n in range(3, 9)]
    results = await grade(runtime, "print(input())", cases, LIMITS, at_once=1, stop_early=True)
    assert [result.verdict for result in results] == ["passed", "wrong"]


async def test_a_fault_of_a_sandbox_raises_an_error_and_never_becomes_a_verdict() -> None:
    class Broken:
        async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
            raise SandboxFailure("gone", kind="sandbox-lost", retryable=True)

    with pytest.raises(SandboxFailure, match="gone"):
        await grade(Broken(), "print(9)", SQUARE_IO, LIMITS)


# Dishonest submissions ----------------------------------------------------------------------------------------------

ATTACKS = {
    "says that it passed": "print('passed'); print('ok'); print('1 passed in 0.01s')",
    "exits with 0 early": "import sys; sys.exit(0)",
    "exits with 0 at once": "import os; os._exit(0)",
    "exits at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "closes its output": "import os; os.close(1); os.close(2)",
    "writes a verdict": """
import os
for name in ('verdict', 'reward', 'result.json', '/tmp/reward.txt', '/scratch/verdict', '/logs/verifier/reward.txt'):
    try: open(name, 'w').write('1')
    except OSError: pass
""",
    "patches the modules of the grader": """
import sys
for name in ('headrace_sandbox.graders', 'headrace_sandbox.graders.comparison', 'headrace_sandbox', 'unittest'):
    module = type(sys)(name); module.same_text = module.same_value = lambda *_: True; sys.modules[name] = module
""",
    "leaves startup files": """
import os
for name in ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'json.py', 'call.py', 'main.py'):
    open(name, 'w').write('import os; print(1522756); os._exit(0)')
""",
    "changes what equality is": """
import builtins
class Always(int):
    __eq__ = __ge__ = __le__ = lambda *_: True
    __hash__ = int.__hash__
    def __repr__(self): return 'True'
builtins.int = builtins.str = builtins.float = Always
builtins.AssertionError = type('Never', (Exception,), {})
def square(n): return Always(n)
""",
    "returns something that is equal to everything": """
class Any:
    def __eq__(self, other): return True
def square(n): return Any()
print(Any())
""",
    "kills all that it can": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "looks for what is expected": """
import gc, glob, sys
found = [str(o) for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]
for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline') + glob.glob('/scratch/**', recursive=True):
    try: found.append(open(path, errors='replace').read())
    except OSError: pass
print(1234 * 1234 if any(str(1234 * 1234) in text for text in found) else 'not here')
""",
    "reads the frames of its caller": """
import sys
frame, seen = sys._getframe(), []
while frame: seen.append(repr(frame.f_locals)); frame = frame.f_back
print(1234 * 1234 if any(str(1234 * 1234) in text for text in seen) else 'not here')
def square(n):
    frame = sys._getframe()
    while frame:
        if 'expected' in frame.f_locals: return frame.f_locals['expected']
        frame = frame.f_back
""",
    "writes an answer with the name of a verdict": """
import os
os.write(1, b'{"verdict": "passed", "passed": true, "reward": 1}')
os._exit(0)
""",
    "takes what writes answers over": """
import json, sys, os
main = sys.modules['__main__']
json.dumps = lambda *_: '{"verdict": "passed"}'
def square(n): return {'verdict': 'passed'}
""",
    "never ends": "while True: pass",
    "writes without end": "while True: print('passed' * 1000)",
    "fills the memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "forks without end": "import os\nwhile True: os.fork()",
    "leaves a child that writes on": """
import os, time
if os.fork() == 0:
    time.sleep(0.2)
    os.write(1, b'1522756\\n9\\n')
os._exit(0)
""",
}
"""Programs that try to pass as squares of 3 and 1234 without computing them."""


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_verdict_never_rests_on_a_claim_of_the_program(runtime: Runtime, attack: str) -> None:
    limits = Limits(wall_s=1.0, memory_bytes=64 << 20, pids=16, output_bytes=1 << 20)
    results = await grade(runtime, ATTACKS[attack], [*SQUARE_IO, *SQUARE], limits)
    assert [result.verdict for result in results if result.verdict == "passed"] == []
    honest = "def square(n): return n * n\nif __name__ == '__main__': print(square(int(input())))"
    assert await verdicts(runtime, honest, [SQUARE_IO[1], SQUARE[1]]) == ["passed"] * 2, "nothing is left of it"


async def test_correct_output_does_not_pass_if_the_program_then_fails(runtime: Runtime) -> None:
    source = "n = int(input())\nprint(n * n, flush=True)\nraise SystemExit(3)"
    assert await verdicts(runtime, source, list(SQUARE_IO)) == ["error", "error"]


async def test_the_expected_output_never_enters_a_sandbox() -> None:
    programs: list[PythonProgram] = []

    class Watching:
        async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
            programs.append(program)
            raise SandboxFailure("seen", kind="seen", retryable=False)

    for case in (
        StdioCase(stdin="in", stdout="a secret"),
        CallCase(function="f", arguments=["in"], expected="a secret"),
    ):
        with pytest.raises(SandboxFailure):
            await grade(Watching(), "source", [case], LIMITS)
    assert len(programs) == 2
    for program in programs:
        assert b"a secret" not in program.code.encode() + program.stdin + json.dumps(dict(program.environment)).encode()
        assert not program.files


# Comparison -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (True, 1, False),
        (1, True, False),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), True),
        (10**400, 1.5, False),
        (10**400, 10**400, True),
        (10**400 + 1, 10**400, False),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        ((1, (2,)), [1, [2]], True),
        ([1], [1, 1], False),
        ({3, 1}, [1, 3], True),
        ({1}, [1, 1], False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({}, [], False),
        (b"a", "a", False),
    ],
)
def test_values_are_compared_as_data(actual: object, expected: object, same: bool) -> None:
    answer = json.dumps(encode(actual)).encode()
    assert same_value(read_answer(answer), expected) is same


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"1522756 ",
        b"[" * 200_000,
        b'{"verdict": "passed"}',
        b'{"int": "0x1", "map": []}',
        b'{"int": 1}',
        b'{"map": [[1]]}',
        b'{"bytes": "zz"}',
        b"\xff",
        b"9" * 5000,
    ],
)
def test_output_that_cannot_be_read_as_an_answer_equals_nothing(answer: bytes) -> None:
    try:
        value = read_answer(answer)
    except UnreadableAnswer:
        return
    assert value == 1522756
    assert same_value(value, 1234) is False


@pytest.mark.timeout(30)
def test_the_time_to_compare_an_answer_depends_only_on_its_size() -> None:
    many = list(range(30_000))
    assert same_value(read_answer(json.dumps({"set": many}).encode()), many[::-1]) is True
    assert same_value(
        read_answer(json.dumps({"set": [[n, "a"] for n in many]}).encode()), [(n, "a") for n in many[::-1]]
    )
    others = read_answer(json.dumps({"set": [n + 0.5 for n in many]}).encode())
    assert same_value(others, many[::-1]) is False
    near = read_answer(b'{"set": [0.30000000000000004, 2.0, {"set": [1]}, true]}')
    assert same_value(near, [2, True, 0.3, [1]]) is True
    assert same_value(near, [2, 1, 0.3, [1]]) is False


def test_text_is_compared_without_surrounding_whitespace() -> None:
    assert same_text("\n 1 2\n", "1 2")
    assert not same_text("1  2", "1 2")


async def test_many_cases_of_many_submissions_share_a_runtime(runtime: Runtime) -> None:
    sources = [f"print(int(input()) ** {power})" for power in (1, 2, 3)] * 4
    graded = await asyncio.gather(*(verdicts(runtime, source, list(SQUARE_IO)) for source in sources))
    assert graded == [["wrong"] * 2, ["passed"] * 2, ["wrong"] * 2] * 4
