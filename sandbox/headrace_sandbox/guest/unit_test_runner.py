"""Runs inside a sandbox, beside the submission's process and out of its reach: runs unit tests, and writes verdicts.

* The tests come by standard input and are in no file; this process cannot be dumped, so that another one of the same
  user can neither read its memory nor open what it has open.
* The module that is tested is a stand-in: what tests ask of it goes to the submission's process, and data comes back.
* Each test has a process of the submission of its own, and what its class prepares is prepared for it. Tests that are
  marked to be skipped are none.

The text of ``values.py`` stands before it.
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

from headrace_sandbox.guest.values import decoded, encoded

PR_SET_DUMPABLE = 4

KEPT = 500


class SubmissionError(Exception):
    """The submission's process ended, or wrote something that is not an answer."""


class Submission:
    """The process."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._process: Any = subprocess.Popen(
            [sys.executable, "-I", "-c", request["submission"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        ready = self.ask({"module": request["module"], "source": request["source"]})
        if ready != {"ready": True}:
            raise SubmissionError("its first message did not say that it is ready")

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
            with contextlib.suppress(BrokenPipeError):  # a question that it did not live to read
                stream.close()


class RemoteObject:
    """An object of the submission. It gives data; it cannot be compared, since it would decide itself."""

    def __init__(self, submission: Submission, number: int, kind: str) -> None:
        self._submission: Any = submission
        self._number = number
        self._kind = kind

    def _ask(self, what: str, arguments: tuple[Any, ...] = (), named: dict[str, Any] = {}, name: str = "") -> Any:  # noqa: B006
        question = {
            "of": self._number,
            "what": what,
            "name": name,
            "arguments": [_argument(item) for item in arguments],
            "named": {key: _argument(item) for key, item in named.items()},
        }
        answer = self._submission.ask(question)
        if "value" in answer:
            return decoded(answer["value"])
        if "object" in answer:
            return RemoteObject(self._submission, answer["object"], str(answer.get("kind")))
        if "stop" in answer:
            raise StopIteration
        raise _raised(str(answer.get("raised")), str(answer.get("message")))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name=name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", arguments, named)

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
        raise TypeError(f"a {self._kind} of the submission cannot be compared; compare data that it gives")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _argument(item: Any) -> dict[str, Any]:
    return {"object": item._number} if isinstance(item, RemoteObject) else {"value": encoded(item)}


def _raised(name: str, message: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:
            pass
    return SubmissionError(f"{name}: {message}")


class ModuleProxy(types.ModuleType):
    """The module that is tested."""

    current: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LazyName(name)


class LazyName:
    """A name of the module, looked up in the process of the test that uses it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _found(self) -> Any:
        return RemoteObject(ModuleProxy.current, 0, "module")._ask("get", name=self._name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._found()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def __iter__(self) -> Any:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def __getitem__(self, key: Any) -> Any:
        return self._found()[key]

    def __contains__(self, item: Any) -> bool:
        return item in self._found()

    def __eq__(self, other: Any) -> bool:
        return bool(self._found() == other)

    def __bool__(self) -> bool:
        return bool(self._found())

    __hash__ = None  # type: ignore[assignment]


def found_tests(module: types.ModuleType) -> dict[str, Any]:
    """Test functions, and methods of test cases, by name."""
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
    """One method, with what its class prepares: in the process of this test, since each has one of its own."""
    case.setUpClass()
    try:
        case(method).debug()
    finally:
        case.tearDownClass()
        case.doClassCleanups()


def verdict_of(test: Any, request: dict[str, Any]) -> dict[str, Any]:
    submission: Any = None
    try:
        submission = ModuleProxy.current = Submission(request)
        test()
    except AssertionError as error:
        return {"verdict": "wrong", "detail": str(error)[:KEPT] or "an assertion failed"}
    except Exception as error:  # noqa: BLE001 - a test that raises has not passed
        return {"verdict": "error", "detail": f"{type(error).__name__}: {error}"[:KEPT]}
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
    tests = found_tests(module)
    verdicts.write(json.dumps({"tests": list(tests)}) + "\n")
    verdicts.flush()
    for name, test in tests.items():
        verdicts.write(json.dumps({"test": name, **verdict_of(test, request)}) + "\n")
        verdicts.flush()


if __name__ == "__main__":
    main()
