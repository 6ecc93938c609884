"""Grades by unit tests that a submission never sees."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.errors import EnvironmentFailure
from headrace_sandbox.graders import grade_unit_tests
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Runtime
from headrace_sandbox.runtimes.registry import make_runtime

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=30.0)

TESTS = """
import unittest
import solution
from solution import Stack, square

def test_square():
    assert square(1234) == 1522756

def test_keywords_and_data():
    assert square(number=-3) == 9
    assert solution.NAMES == {"a": [1, 2]}

class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()

    def test_last_in_first_out(self):
        self.stack.push(1)
        self.stack.push("two")
        self.assertEqual(len(self.stack), 2)
        self.assertEqual(list(self.stack), [1, "two"])
        self.assertEqual(self.stack.pop(), "two")

    def test_empty(self):
        with self.assertRaises(IndexError):
            self.stack.pop()
"""

NAMES = ["test_square", "test_keywords_and_data", "TestStack.test_empty", "TestStack.test_last_in_first_out"]

RIGHT = """
NAMES = {'a': [1, 2]}
def square(number):
    print('noise')
    return number * number
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
"""


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    bubblewrap = make_runtime("bubblewrap")
    yield bubblewrap
    await bubblewrap.close()


async def test_each_test_has_a_verdict(runtime: Runtime) -> None:
    results = await grade_unit_tests(runtime, RIGHT, TESTS, LIMITS)
    assert {name: result.verdict for name, result in results.items()} == dict.fromkeys(NAMES, "passed")
    broken = RIGHT.replace("number * number", "number * 3").replace("self.items.pop()", "self.items[0]")
    results = await grade_unit_tests(runtime, broken, TESTS, LIMITS)
    assert [results[name].verdict for name in NAMES] == ["wrong", "wrong", "passed", "wrong"]
    results = await grade_unit_tests(runtime, "square = lambda number: 1 / 0", TESTS, LIMITS)
    assert [results[name].verdict for name in NAMES] == ["error"] * 4
    assert results["test_square"].detail == "ZeroDivisionError: division by zero"


async def test_each_test_has_its_own_process_of_the_submission(runtime: Runtime) -> None:
    tests = """
from solution import dies, one
def test_that_asks_again():
    for _ in range(3):
        try: dies()
        except Exception: pass
    assert one() == 1
def test_another():
    assert one() == 1
"""
    source = "import os\ndef dies(): os._exit(0)\ndef one(): return 1\n"
    results = await grade_unit_tests(runtime, source, tests, LIMITS)
    assert {name: result.verdict for name, result in results.items()} == {
        "test_that_asks_again": "error",
        "test_another": "passed",
    }


async def test_cases_of_unittest_are_run_as_unittest_does(runtime: Runtime) -> None:
    tests = """
import unittest
from solution import one
class TestOne(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.wanted = 1
        cls.addClassCleanup(lambda: None)
    def test_one(self):
        for number in (1, 2):
            with self.subTest(number):
                self.assertEqual(one(), self.wanted)
    @unittest.skip("later")
    def test_skipped(self):
        self.fail()
@unittest.skipIf(True, "later")
class TestSkipped(unittest.TestCase):
    def test_one(self):
        self.fail()
class TestAwaited(unittest.IsolatedAsyncioTestCase):
    async def test_one(self):
        self.assertEqual(one(), 1)
"""
    results = await grade_unit_tests(runtime, "def one(): return 1", tests, LIMITS)
    assert {name: (result.verdict, result.detail) for name, result in results.items()} == {
        "TestOne.test_one": ("passed", ""),
        "TestAwaited.test_one": ("passed", ""),
    }


async def test_an_endless_test_keeps_the_earlier_verdicts(runtime: Runtime) -> None:
    source = RIGHT.replace("self.items.append(item)", "exec('while True: pass')")
    results = await grade_unit_tests(runtime, source, TESTS, Limits(wall_s=3.0))
    assert [results[name].verdict for name in NAMES] == ["passed", "passed", "passed", "limit"]


async def test_tests_that_cannot_be_loaded_are_a_failure_of_the_environment(runtime: Runtime) -> None:
    for tests, why in (
        ("import nowhere", "No module named 'nowhere'"),
        ("x = 1", "no tests were defined"),
        ("(", "SyntaxError"),
    ):
        with pytest.raises(EnvironmentFailure, match=why) as caught:
            await grade_unit_tests(runtime, RIGHT, tests, LIMITS)
        assert caught.value.kind == "bad-tests"


LOOK = """
import glob, os
def memory(pid):
    with open(f'/proc/{pid}/maps') as maps, open(f'/proc/{pid}/mem', 'rb', 0) as mem:
        for line in maps:
            place, rights = line.split()[:2]
            if rights.startswith('rw'):
                start, end = (int(part, 16) for part in place.split('-'))
                mem.seek(start)
                yield mem.read(end - start)
def look():
    seen = []
    for pid in (os.getppid(), 1):
        try: seen += memory(pid)
        except OSError: pass
        for name in ('environ', 'cmdline'):
            try: seen.append(open(f'/proc/{pid}/{name}', 'rb').read())
            except OSError: pass
    for folder, _, names in os.walk('/scratch'):
        for name in names:
            try: seen.append(open(os.path.join(folder, name), 'rb').read())
            except OSError: pass
    return any(str(1234 * 1234).encode() in text for text in seen)
"""

ATTACKS = {
    "says that it passed": """
import json, os
for fd in range(3, 20):
    try: os.write(fd, b'{"test": "test_square", "verdict": "passed", "detail": ""}\\n')
    except OSError: pass
print('{"test": "test_square", "verdict": "passed", "detail": ""}')
""",
    "answers what nobody asked": """
import os
def square(number):
    os.write(3, b'{"value": true, "verdict": "passed"}\\n'); os._exit(0)
""",
    "exits": "import os; os._exit(0)",
    "returns what is equal to everything": """
class Any:
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = lambda *_: False
    def __bool__(self): return True
def square(number): return Any()
""",
    "kills the tests": "import os, signal\ndef square(number): os.kill(os.getppid(), signal.SIGKILL)",
    "stops the tests": "import os, signal\ndef square(number): os.kill(os.getppid(), signal.SIGSTOP)",
    "interrupts the tests": "import os, signal\ndef square(number): os.kill(os.getppid(), signal.SIGINT)",
    "writes to the output of the tests, and kills them": """
import os, signal
def square(number):
    for path in (f'/proc/{os.getppid()}/fd/1', f'/proc/{os.getppid()}/fd/2', '/proc/1/fd/1'):
        try: open(path, 'w').write('{"test": "test_square", "verdict": "passed", "detail": ""}\\n')
        except OSError: pass
    os.kill(os.getppid(), signal.SIGKILL)
""",
    "looks for what is expected": LOOK + "def square(number): return 1522756 if look() else 'not here'",
    "patches assert and unittest": """
import builtins, sys, unittest
builtins.AssertionError = type('Never', (Exception,), {})
unittest.TestCase.assertEqual = lambda *_: None
def square(number): return 0
""",
    "raises what ends tests": "def square(number): raise SystemExit(0)",
    "raises a skip": "import unittest\ndef square(number): raise unittest.SkipTest('no')",
}
ATTACKS["looks for what is expected"] = ATTACKS["looks for what is expected"].replace("1522756", "1234 * 1234")


@pytest.mark.parametrize("attack", ATTACKS)
async def test_verdicts_come_from_the_tests_process_alone(runtime: Runtime, attack: str) -> None:
    source = RIGHT.split("def square")[0] + ATTACKS[attack]
    tests = "from solution import square\ndef test_square():\n    assert square(1234) == 1522756"
    results = await grade_unit_tests(runtime, source, tests, Limits(wall_s=3.0))
    assert results["test_square"].verdict != "passed"
    assert list(results) == ["test_square"]
