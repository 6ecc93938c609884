"""``headrace sandbox``: checks of this machine's runtimes, and commands in sandboxes.

* ``serve`` shares this host's sandboxes between processes.
* ``reap`` removes what killed processes of Headrace left on this machine.
* ``doctor`` exits with 1 if no runtime isolates, and names the remedy.
* ``conformance`` exits with 1 if the outcome of a case is not the expected one.
* ``run`` uses the given runtime, or the default; it fails if that runtime cannot be used, and never uses another.
* ``run`` exits as the command did: with its exit code, 128 + n after signal n, 124 after a limit, 127 if the command
  does not exist; 70 after a fault of ours.
* Options of ``run`` end where the command begins; an unknown option is not taken for the command.
* ``run`` copies only the given files into the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance import suite
from headrace_sandbox.doctor import DoctorReport, DoctorRow, diagnose
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Runtime, SandboxCommand
from headrace_sandbox.runtimes.registry import DEFAULT, make_runtime, ready_runtime
from headrace_sandbox.service.command import serve

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

LIMIT_HIT, OUR_FAULT = 124, 70
"""Exit codes: that of ``timeout``, and that of ``sysexits`` for a software fault."""

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("sandbox", short_help="Check the runtimes of this machine, and run a command in a sandbox.")
def sandbox() -> None:
    """Isolated execution of untrusted programs."""


@sandbox.command("doctor")
@_json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Run a self-test of every runtime, and print the results; exit code 1 if none isolates.

    \b
    Example:
      headrace sandbox doctor
    """
    report = asyncio.run(diagnose(_say))
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        _print_report(report)
    if report.best is None:
        context.exit(1)


def _print_report(report: DoctorReport) -> None:
    for row in (*report.machine, *report.runtimes):
        _print_row(row)
    passed = [row.name for row in report.runtimes if row.verdict == "ok"]
    if report.default in passed:
        click.echo(f"The default is {report.default}.")
    elif report.best is None:
        click.echo("No runtime isolates here.")
    else:
        click.echo(
            f"The default, {report.default}, cannot be used here. The best that passes: --runtime {report.best}."
        )


def _print_row(row: DoctorRow) -> None:
    mark = click.style(f"{row.verdict:<5}", fg=COLOURS[row.verdict])
    click.echo(f"{mark} {row.name}: {row.found}")
    if row.versions:
        click.echo(f"      versions: {', '.join(f'{part} {version}' for part, version in row.versions.items())}")
    if row.active:
        click.echo(f"      limits: {', '.join(row.active)}")
    if row.cost_s:
        costs = (f"{1000 * cost_s:.0f} ms as {way}" for way, cost_s in row.cost_s.items())
        click.echo(f"      print(1): {', '.join(costs)}")
    for line in row.hint.splitlines():
        click.echo(f"      {line}")


def _say(message: str) -> None:
    click.echo(message, err=True)


@sandbox.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--runtime", default=DEFAULT, show_default=True, help="Runtime to use; `doctor` lists them.")
@click.option("--allow-unsafe", is_flag=True, help="Allow the runtime that does not isolate.")
@click.option(
    "--time-s",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0.01),
    help="Limit of wall-clock time, in seconds.",
)
@click.option(
    "--memory-mib", default=256, show_default=True, type=click.IntRange(8), help="Limit of memory of all its processes."
)
@click.option(
    "--pids", default=64, show_default=True, type=click.IntRange(2), help="Limit of processes and threads at a time."
)
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="File to copy, under its name, to the folder where COMMAND runs; may be repeated.",
)
@_json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def run(
    context: click.Context,
    runtime: str,
    allow_unsafe: bool,
    time_s: float,
    memory_mib: int,
    pids: int,
    files: Sequence[Path],
    as_json: bool,
    command: Sequence[str],
) -> None:
    """Run COMMAND in a fresh sandbox; standard input goes to it unless it is a terminal.

    \b
    Examples:
      headrace sandbox run -- python3 -c 'print(1)'
      headrace sandbox run --time-s 1 --json -- sleep 60
      headrace sandbox run --file work/solve.py -- python3 solve.py
      headrace sandbox run --runtime wasm -- python3 -c 'print(1)'
    """
    limits = Limits(wall_s=time_s, memory_bytes=memory_mib << 20, pids=pids)
    contents = _contents(files)
    stdin = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    sandboxed = SandboxCommand(arguments=command, stdin=stdin, files=contents)
    try:
        result = asyncio.run(_run(runtime, allow_unsafe, sandboxed, limits))
    except SandboxFailure as failure:
        click.echo(f"Error: {failure}", err=True)
        context.exit(OUR_FAULT)
    if as_json:
        texts = {"stdout": result.stdout.text, "stderr": result.stderr.text, "fault": result.fault}
        click.echo(json.dumps({**msgspec.to_builtins(result), **texts}))
    else:
        click.echo(result.stdout.text, nl=False)
        click.echo(result.stderr.text, nl=False, err=True)
        if not result.isolation.is_sandbox:
            click.echo("Not a sandbox: the command ran as this user.", err=True)
        if result.limit is not None and result.fault:
            click.echo(f"Stopped at its limit of {result.limit}.", err=True)
    context.exit(_exit_code(result))


@sandbox.command("reap")
@_json_option
@click.pass_context
def reap_(context: click.Context, as_json: bool) -> None:
    """Remove what killed processes of Headrace left: processes, control groups, folders; exit code 1 if some remain.

    \b
    Example:
      headrace sandbox reap
    """
    report = reap()
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        click.echo(
            f"Removed {len(report.processes)} processes, {len(report.groups)} control groups, "
            f"{len(report.folders)} folders."
        )
        for line in report.left:
            click.echo(f"Left: {line}", err=True)
    if report.left:
        context.exit(1)


@sandbox.command("conformance")
@click.option("--runtime", "name", required=True, help="Name of a runtime, including your own.")
@click.option("--case", "numbers", multiple=True, help="Run only this case; may be repeated.")
@click.option("--allow-unsafe", is_flag=True, help="Allow a runtime that does not isolate; only harmless cases run.")
@_json_option
@click.pass_context
def conformance(context: click.Context, name: str, numbers: Sequence[str], allow_unsafe: bool, as_json: bool) -> None:
    """Run hostile programs in a runtime, and compare the outcomes with the expected ones.

    \b
    Examples:
      headrace sandbox conformance --runtime bubblewrap
      headrace sandbox conformance --runtime gvisor --case 1a --case 26 --json
    """
    chosen = [case for case in suite.cases() if not numbers or case.number in numbers]
    if unknown := set(numbers) - {case.number for case in chosen}:
        raise click.BadParameter(f"Unknown case: {', '.join(sorted(unknown))}.", param_hint="--case")
    try:
        is_ok = asyncio.run(_conformance(make_runtime(name, allow_unsafe=allow_unsafe), chosen, as_json))
    except SandboxFailure as failure:
        click.echo(f"Error: {failure}", err=True)
        context.exit(OUR_FAULT)
    context.exit(0 if is_ok else 1)


async def _conformance(runtime: Runtime, chosen: Sequence[suite.ConformanceCase], as_json: bool) -> bool:
    lines = []
    try:
        async for line in suite.run_suite(runtime, chosen):
            lines.append(line)
            if not as_json:
                _show(line)
    finally:
        await runtime.close()
    differing = [line for line in lines if not line.ok]
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(line) for line in lines]))
    else:
        click.echo(f"{len(lines)} cases, {len(differing)} not as expected")
    return not differing


def _show(line: suite.CaseReport) -> None:
    mark = click.style("ok  " if line.ok else "FAIL", fg=COLOURS["ok" if line.ok else "fail"])
    expected = " or ".join(line.expected) or "safe"
    click.echo(
        f"{mark} {line.column:<15} {line.case:>3}  {line.title:<62} expected {expected:<24} found {line.found} "
        f"({line.seconds:.1f} s)"
    )
    if not line.ok or line.found == suite.NOT_RUN:
        click.echo(f"     {line.evidence}")


sandbox.add_command(serve)


async def _run(name: str, allow_unsafe: bool, command: SandboxCommand, limits: Limits) -> ExecResult:
    runtime = await ready_runtime(name, allow_unsafe=allow_unsafe, say=_say)
    try:
        return await runtime.run(command, limits)
    finally:
        await runtime.close()


def _contents(files: Sequence[Path]) -> dict[str, bytes]:
    """Contents of the files, by their names."""
    contents: dict[str, bytes] = {}
    for file in files:
        if file.name in contents:
            raise click.BadParameter(f"Two files are named {file.name}.", param_hint="--file")
        contents[file.name] = file.read_bytes()
    return contents


def _exit_code(result: ExecResult) -> int:
    if result.fault == "limit":
        return LIMIT_HIT
    return 128 + result.signal if result.signal is not None else result.exit_code or 0
