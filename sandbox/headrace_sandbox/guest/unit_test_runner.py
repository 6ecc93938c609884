"""Runs inside a sandbox, beside the submission's process and out of its reach: runs unit tests, and writes verdicts.

* The tests come on standard input and are in no file; this process is not dumpable, so that other processes of the same
  user can neither read its memory nor open its descriptors.
* The tested module is a proxy: the tests' questions go to the submission's process, and data comes back.
* Each test has its own process of the submission, and its class's fixtures are set up for it alone. Skipped tests do
  not count.

The text of ``values.py`` precedes it.
"""

import builtins
import contextlib
import ctypes
import json
import subprocess
import sys
import types
import unittest
from typing import Any

from headrace_sandbox.guest.values import decode, encode

PR_SET_DUMPABLE = 4

MOST_DETAIL_CHARACTERS = 500


class SubmissionError(Exception):
    """The submission's process ended, or wrote something other than an answer."""


class SubmissionProcess:
    """A process of the submission."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, "-I", "-c", request["submission"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        ready = self.ask({"module": request["module"], "source": request["source"]})
        if ready != {"ready": True}:
            raise SubmissionError("the submission's process did not report that it is ready")

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        except (OSError, ValueError, RecursionError) as error:
            raise SubmissionError(f"the submission's process gave no answer: {error}") from None
        if not isinstance(answer, dict):
            raise SubmissionError("the submission's process gave no answer")
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # an unread question
                stream.close()


class RemoteObject:
    """An object of the submission. It returns data; it cannot be compared, since its own code would decide."""

    def __init__(self, submission: SubmissionProcess, number: int, kind: str) -> None:
        self._submission: Any = submission
        self._number = number
        self._kind = kind

    def _ask(
        self, operation: str, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None, name: str = ""
    ) -> Any:
        question = {
            "of": self._number,
            "what": operation,
            "name": name,
            "arguments": [_argument(item) for item in arguments],
            "named": {key: _argument(item) for key, item in (keywords or {}).items()},
        }
        answer = self._submission.ask(question)
        if "value" in answer:
            return decode(answer["value"])
        if "object" in answer:
            return RemoteObject(self._submission, answer["object"], str(answer.get("kind")))
        if "stop" in answer:
            raise StopIteration
        raise _exception(str(answer.get("raised")), str(answer.get("message")))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name=name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", arguments, keywords)

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return f"<{self._kind} of the submission>"

    def __iter__(self) -> Any:
        return self._ask("__iter__")

    def __next__(self) -> Any:
        return self._ask("__next__")

    def __len__(self) -> int:
        length: int = self._ask("__len__")
        return length

    def __getitem__(self, key: Any) -> Any:
        return self._ask("__getitem__", (key,))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("__setitem__", (key, value))

    def __contains__(self, item: Any) -> bool:
        return self._ask("__contains__", (item,)) is True

    def _refuse(self, *_: Any) -> bool:
        raise TypeError(f"a {self._kind} of the submission cannot be compared; compare data that it returns")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _argument(item: Any) -> dict[str, Any]:
    return {"object": item._number} if isinstance(item, RemoteObject) else {"value": encode(item)}


def _exception(name: str, message: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:
            pass
    return SubmissionError(f"{name}: {message}")


class ModuleProxy(types.ModuleType):
    """The tested module."""

    current: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LazyName(name)


class LazyName:
    """A name of the module, looked up in the process of the test that uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _resolve(self) -> Any:
        return RemoteObject(ModuleProxy.current, 0, "module")._ask("get", name=self._name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._resolve()(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._resolve(), name)

    def __iter__(self) -> Any:
        return iter(self._resolve())

    def __len__(self) -> int:
        return len(self._resolve())

    def __getitem__(self, key: Any) -> Any:
        return self._resolve()[key]

    def __contains__(self, item: Any) -> bool:
        return item in self._resolve()

    def __eq__(self, other: Any) -> bool:
        return bool(self._resolve() == other)

    def __bool__(self) -> bool:
        return bool(self._resolve())

    __hash__ = None  # type: ignore[assignment]


def collect_tests(module: types.ModuleType) -> dict[str, Any]:
    """The test functions and the methods of test cases, by name."""
    tests = {}
    for name, item in list(vars(module).items()):
        if isinstance(item, type) and issubclass(item, unittest.TestCase):
            for method in unittest.defaultTestLoader.getTestCaseNames(item):
                if not is_skipped(item) and not is_skipped(getattr(item, method)):
                    tests[f"{name}.{method}"] = lambda item=item, method=method: run_case(item, method)
        elif name.startswith("test") and isinstance(item, types.FunctionType):
            tests[name] = item
    return tests


def is_skipped(marked: Any) -> bool:
    return bool(getattr(marked, "__unittest_skip__", False))


def run_case(case: Any, method: str) -> None:
    """Run one method with its class's fixtures, which use this test's own process of the submission."""
    case.setUpClass()
    try:
        case(method).debug()
    finally:
        case.tearDownClass()
        case.doClassCleanups()


def verdict_of(test: Any, request: dict[str, Any]) -> dict[str, Any]:
    submission: Any = None
    try:
        submission = ModuleProxy.current = SubmissionProcess(request)
        test()
    except AssertionError as error:
        return {"verdict": "wrong", "detail": str(error)[:MOST_DETAIL_CHARACTERS] or "an assertion failed"}
    except Exception as error:  # noqa: BLE001 - a test that raises has not passed
        return {"verdict": "error", "detail": f"{type(error).__name__}: {error}"[:MOST_DETAIL_CHARACTERS]}
    finally:
        if submission is not None:
            submission.end()
    return {"verdict": "passed", "detail": ""}


def main() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        sys.exit("prctl")
    request = json.load(sys.stdin)
    verdicts, sys.stdout = sys.stdout, sys.stderr
    sys.modules[request["module"]] = ModuleProxy(request["module"])
    module = types.ModuleType("tests")
    exec(compile(request["tests"], "tests.py", "exec", dont_inherit=True), module.__dict__)
    tests = collect_tests(module)
    verdicts.write(json.dumps({"tests": list(tests)}) + "\n")
    verdicts.flush()
    for name, test in tests.items():
        verdicts.write(json.dumps({"test": name, **verdict_of(test, request)}) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
