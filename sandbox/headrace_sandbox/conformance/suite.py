"""Runs cases against a runtime, and compares what was found with what was expected.

* The outcome of a case is observed from outside, or from what its program could reach; never from its own claim.
* A failure of ours in a case is found as ``failure:KIND``, and is expected nowhere.
* A runtime without a column must be safe by any outcome that is safe.
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
"""Outcomes that are safe, beside every limit."""

PYTHON = ("python3", "-I", "main.py")

MODULES = ("resources", "processes", "visibility", "kernel", "network", "files", "text")
"""Modules of this package that contain cases."""


class CaseOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a case. ``outcome`` is a word of the table; ``evidence`` says what was seen."""

    outcome: str
    evidence: str = ""


class Escape(Exception):
    """The program reached what it must not reach; the text says what."""


class Unclear(Exception):
    """The observation is not an outcome of the case; the text says what was seen."""


class SkipCase(Exception):
    """The case needs something that is not here; the text says what."""


class CaseContext:
    """A runtime to try, and one way to run programs in it."""

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
        given, variables, arguments = dict(files or {}), dict(environment or {}), list(arguments)
        if self.way == "code":
            program = PythonProgram(
                code=code, arguments=arguments, stdin=stdin, files=given, environment=variables, domain="conformance"
            )
            return await self.runtime.run_code(program, bounds)
        given["main.py"] = code.encode()
        command = SandboxCommand(arguments=[*PYTHON, *arguments], stdin=stdin, files=given, environment=variables)
        return await self.runtime.run(command, bounds)

    async def output(self, code: str, **options: object) -> str:
        """The output of a program that must end well."""
        result = await self.run(code, **options)  # type: ignore[arg-type]  # the options of run
        if result.fault:
            raise Unclear(f"ended with {result.exit_code}, {result.limit}: {result.stderr.text.strip()[-300:]}")
        return result.stdout.text.strip()

    async def try_forbidden(self, code: str, **options: object) -> str:
        """The outcome of a program that tries forbidden things, and prints each as a line ``WHAT: done`` or ``WHAT:
        refused``. What went through is virtual where the sandbox has a kernel of its own, and an escape elsewhere."""
        lines = (await self.output(TRY + code, **options)).splitlines()
        if not lines:
            raise Unclear("the program tried nothing")
        done = [line for line in lines if not line.partition(": ")[2].startswith("refused")]
        if not done:
            return REFUSED
        if await self.has_own_kernel():
            return VIRTUAL
        raise Escape("; ".join(done))

    async def has_own_kernel(self) -> bool:
        """True if the kernel that a program sees is not this machine's."""
        if self._has_own_kernel is None:
            code = "import sys, os\nprint(os.uname().release if sys.platform == 'linux' else sys.platform)"
            self._has_own_kernel = await self.output(code) != os.uname().release
        return self._has_own_kernel


TRY = """
import errno, os, sys
def attempt(what, action):
    try:
        result = action()
    except BaseException as error:
        print(f'{what}: refused, {type(error).__name__} {error}', flush=True)
    else:
        print(f'{what}: done, {result!r}'[:200], flush=True)
def system_call(number, *arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
"""``attempt(what, action)`` and ``system_call(number, ...)`` for programs that try forbidden things."""


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
    """One case. ``number``: as in the docs; ``title``: what the program does. ``harmless``: it may run where nothing
    isolates. ``of_runtime``: it is about the whole runtime, whatever the way to run programs."""

    number: str
    title: str
    function: CaseFunction
    harmless: bool
    of_runtime: bool


_cases: dict[str, ConformanceCase] = {}


def case(
    number: str, title: str, *, harmless: bool = False, of_runtime: bool = False
) -> Callable[[CaseFunction], CaseFunction]:
    """Makes a function a case."""

    def registered(function: CaseFunction) -> CaseFunction:
        _cases[number] = ConformanceCase(number, title, function, harmless, of_runtime)
        return function

    return registered


def cases() -> list[ConformanceCase]:
    """All cases, by number."""
    for name in MODULES:
        import_module(f"{__package__}.{name}")
    return sorted(_cases.values(), key=lambda case: (int(case.number.rstrip("abc")), case.number))


def known_columns() -> list[str]:
    """The columns of the table."""
    return expected_table().columns


def columns(runtime: str) -> dict[str, Way]:
    """The columns of a runtime and the ways that they stand for; one without columns is tried both ways."""
    found: dict[str, Way] = {}
    for column in expected_table().columns:
        name, _, way = column.partition(" ")
        if name == runtime:
            found[column] = "code" if way else "run"
    return found or {runtime: "run", f"{runtime} code": "code"}


def expected(column: str, case: ConformanceCase) -> tuple[str, ...]:
    """The allowed outcomes of a case; empty if any safe outcome is allowed. ``-``: it is in another column."""
    table = expected_table()
    if column not in table.columns:
        return ("-",) if case.of_runtime and column.endswith(" code") else ()
    row = table.cases[case.number]
    return tuple(row[table.columns.index(column)].split(" or "))


def is_expected(found: CaseOutcome, outcomes: tuple[str, ...]) -> bool:
    """True if the outcome was expected."""
    if outcomes:
        return found.outcome in outcomes
    return found.outcome in SAFE or found.outcome.startswith("limit:")


class ExpectedTable(msgspec.Struct, forbid_unknown_fields=True):
    columns: list[str]
    cases: dict[str, list[str]]


@functools.cache
def expected_table() -> ExpectedTable:
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
    except SkipCase as missing:
        return CaseOutcome(outcome=NOT_RUN, evidence=str(missing))
    except SandboxFailure as failure:
        kind = {"not-offered": NOT_OFFERED, "unkillable": UNKILLABLE}.get(failure.kind, f"failure:{failure.kind}")
        return CaseOutcome(outcome=kind, evidence=str(failure))


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """One case in one column, as it came out. ``expected`` is empty where any safe outcome may come."""

    column: str
    case: str
    title: str
    expected: tuple[str, ...]
    found: str
    evidence: str
    seconds: float
    ok: bool


async def run_suite(runtime: Runtime, chosen: Iterable[ConformanceCase]) -> AsyncIterator[CaseReport]:
    """Run cases in every column of a runtime; one line each as it comes."""
    listed = list(chosen)
    for (column, way), case in itertools.product(columns(runtime.name).items(), listed):
        outcomes = expected(column, case)
        if outcomes == ("-",):
            continue
        begun_at = time.monotonic()
        found = await run_case(CaseContext(runtime, way), case)
        is_ok = is_expected(found, outcomes) or found.outcome == NOT_RUN
        yield CaseReport(
            column=column,
            case=case.number,
            title=case.title,
            expected=outcomes,
            found=found.outcome,
            evidence=found.evidence,
            seconds=round(time.monotonic() - begun_at, 2),
            ok=is_ok,
        )
