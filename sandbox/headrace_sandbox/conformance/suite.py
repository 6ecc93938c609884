"""Runs cases on a runtime, and compares their outcomes with the expected ones.

* The outcome of a case is observed from outside, or from what its program could reach; never from the program's claim.
* A failure of ours in a case has the outcome ``failure:KIND``, which is never expected.
* For a runtime without a column, any safe outcome is expected.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Literal

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, Runtime, SandboxCommand
from headrace_sandbox.runtimes.registry import UNSAFE

Way = Literal["run", "code"]
"""The way to run a case's programs: as commands, or by ``run_code``."""

CONTAINED, REFUSED, VIRTUAL, ESCAPED, UNKILLABLE = "contained", "refused", "virtual", "escaped", "unkillable"
NOT_OFFERED, NOT_RUN = "not offered", "not run"

SAFE = (CONTAINED, REFUSED, VIRTUAL, UNKILLABLE, NOT_OFFERED, NOT_RUN)
"""Safe outcomes, besides every limit."""

PYTHON = ("python3", "-I", "main.py")

MODULES = ("resources", "processes", "visibility", "kernel", "network", "files", "text")
"""Modules of this package that contain cases."""


class CaseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a case. ``outcome``: as in the table. ``evidence``: the observation behind it."""

    outcome: str
    evidence: str = ""


class Escape(Exception):
    """The program reached something that it must not reach; the text names it."""


class Unclear(Exception):
    """The observation is not an outcome of the case; the text describes it."""


class SkipCase(Exception):
    """The case needs something that is missing here; the text names it."""


class CaseContext:
    """A runtime under test, and the way to run programs in it."""

    def __init__(self, runtime: Runtime, way: Way) -> None:
        self.runtime = runtime
        self.way = way
        self._has_own_kernel: bool | None = None

    async def run(
        self,
        code: str,
        *,
        arguments: Iterable[str] = (),
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        **limits: float,
    ) -> ExecResult:
        """Run a Python program. ``limits`` are fields of ``Limits``. Raises SandboxFailure."""
        bounds = msgspec.convert({"wall_s": 20.0, **limits}, Limits)
        contents, variables, arguments = dict(files or {}), dict(environment or {}), list(arguments)
        if self.way == "code":
            program = PythonProgram(
                code=code, arguments=arguments, stdin=stdin, files=contents, environment=variables, domain="conformance"
            )
            return await self.runtime.run_code(program, bounds)
        contents["main.py"] = code.encode()
        command = SandboxCommand(arguments=[*PYTHON, *arguments], stdin=stdin, files=contents, environment=variables)
        return await self.runtime.run(command, bounds)

    async def output(self, code: str, **options: object) -> str:
        """The output of a program that must succeed."""
        result = await self.run(code, **options)  # type: ignore[arg-type]  # the options of run
        if result.fault:
            raise Unclear(f"ended with {result.exit_code}, limit {result.limit}: {result.stderr.text.strip()[-300:]}")
        return result.stdout.text.strip()

    async def try_forbidden(self, code: str, **options: object) -> str:
        """The outcome of a program that tries forbidden things, and prints a line ``ACTION: done`` or ``ACTION:
        refused`` for each. A success is virtual where the sandbox has a kernel of its own, and an escape elsewhere."""
        lines = (await self.output(TRY + code, **options)).splitlines()
        if not lines:
            raise Unclear("the program tried nothing")
        successes = [line for line in lines if not line.partition(": ")[2].startswith("refused")]
        if not successes:
            return REFUSED
        if await self.has_own_kernel():
            return VIRTUAL
        raise Escape("; ".join(successes))

    async def has_own_kernel(self) -> bool:
        """True if the kernel that a program sees is not this machine's."""
        if self._has_own_kernel is None:
            code = "import sys, os\nprint(os.uname().release if sys.platform == 'linux' else sys.platform)"
            self._has_own_kernel = await self.output(code) != os.uname().release
        return self._has_own_kernel


TRY = """
import errno, os, sys
def attempt(name, action):
    try:
        result = action()
    except BaseException as error:
        print(f'{name}: refused, {type(error).__name__} {error}', flush=True)
    else:
        print(f'{name}: done, {result!r}'[:200], flush=True)
def system_call(number, *arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
"""``attempt(name, action)`` and ``system_call(number, ...)`` for programs that try forbidden things."""


def outcome_of(result: ExecResult, *errors: str) -> str:
    """The outcome of a program that should run into a limit, or into one of these errors."""
    if result.fault == "limit":
        return f"limit:{result.limit}"
    if result.exit_code != 0 and any(error in result.stderr.text for error in errors):
        return REFUSED
    last = result.stderr.text.strip()[-300:] or result.stdout.text.strip()[-300:]
    raise Unclear(f"ended with {result.exit_code}, signal {result.signal}: {last}")


CaseFunction = Callable[[CaseContext], Awaitable[str]]


class ConformanceCase(msgspec.Struct, frozen=True):
    """A case. ``number``: as in the docs. ``title``: the program's action. ``harmless``: it may run where nothing
    isolates. ``of_runtime``: it tests the whole runtime, and runs in only one of its columns."""

    number: str
    title: str
    function: CaseFunction
    harmless: bool
    of_runtime: bool


_cases: dict[str, ConformanceCase] = {}


def case(
    number: str, title: str, *, harmless: bool = False, of_runtime: bool = False
) -> Callable[[CaseFunction], CaseFunction]:
    """Register a function as a case."""

    def registered(function: CaseFunction) -> CaseFunction:
        _cases[number] = ConformanceCase(number, title, function, harmless, of_runtime)
        return function

    return registered


def cases() -> list[ConformanceCase]:
    """All cases, by number."""
    for name in MODULES:
        import_module(f"{__package__}.{name}")
    return sorted(_cases.values(), key=lambda case: (int(case.number.rstrip("abc")), case.number))


def columns(runtime: str) -> dict[str, Way]:
    """The columns of a runtime, and the way that each one runs programs; both ways for a runtime without columns."""
    ways: dict[str, Way] = {}
    for column in expected_table().columns:
        name, _, way = column.partition(" ")
        if name == runtime:
            ways[column] = "code" if way else "run"
    return ways or {runtime: "run", f"{runtime} code": "code"}


def expected(column: str, case: ConformanceCase) -> tuple[str, ...]:
    """The expected outcomes of a case; empty if any safe outcome is. ``-``: the case runs in another column."""
    table = expected_table()
    if column not in table.columns:
        return ("-",) if case.of_runtime and column.endswith(" code") else ()
    row = table.cases[case.number]
    return tuple(row[table.columns.index(column)].split(" or "))


def is_expected(case_outcome: CaseOutcome, outcomes: tuple[str, ...]) -> bool:
    """True if the outcome is among the expected ones."""
    if outcomes:
        return case_outcome.outcome in outcomes
    return case_outcome.outcome in SAFE or case_outcome.outcome.startswith("limit:")


class ExpectedTable(msgspec.Struct, forbid_unknown_fields=True):
    columns: list[str]
    cases: dict[str, list[str]]


@functools.cache
def expected_table() -> ExpectedTable:
    """The expected outcomes of all cases."""
    return msgspec.toml.decode((Path(__file__).parent / "expected.toml").read_bytes(), type=ExpectedTable)


async def run_case(context: CaseContext, case: ConformanceCase) -> CaseOutcome:
    """Run one case; any error becomes its outcome."""
    if context.runtime.name == UNSAFE and not case.harmless:
        return CaseOutcome(outcome=NOT_RUN, evidence="nothing isolates here")
    try:
        return CaseOutcome(outcome=await case.function(context))
    except Escape as escape:
        return CaseOutcome(outcome=ESCAPED, evidence=str(escape))
    except Unclear as unclear:
        return CaseOutcome(outcome="unclear", evidence=str(unclear))
    except SkipCase as skip:
        return CaseOutcome(outcome=NOT_RUN, evidence=str(skip))
    except SandboxFailure as failure:
        kind = {"not-offered": NOT_OFFERED, "unkillable": UNKILLABLE}.get(failure.kind, f"failure:{failure.kind}")
        return CaseOutcome(outcome=kind, evidence=str(failure))


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one case in one column. ``expected``: empty if any safe outcome is expected."""

    column: str
    case: str
    title: str
    expected: tuple[str, ...]
    found: str
    evidence: str
    seconds: float
    ok: bool


async def run_suite(runtime: Runtime, chosen: Iterable[ConformanceCase]) -> AsyncIterator[CaseReport]:
    """Run cases in every column of a runtime; yields a report after each."""
    for (column, way), case in itertools.product(columns(runtime.name).items(), chosen):
        outcomes = expected(column, case)
        if outcomes == ("-",):
            continue
        started_at = time.monotonic()
        outcome = await run_case(CaseContext(runtime, way), case)
        is_ok = is_expected(outcome, outcomes) or outcome.outcome == NOT_RUN
        yield CaseReport(
            column=column,
            case=case.number,
            title=case.title,
            expected=outcomes,
            found=outcome.outcome,
            evidence=outcome.evidence,
            seconds=round(time.monotonic() - started_at, 2),
            ok=is_ok,
        )
