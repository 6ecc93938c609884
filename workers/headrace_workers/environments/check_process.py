"""The conformance check of an environment in a process of its own, for ``headrace env check``.

* An environment that ends its process, or never returns from a call, breaks the protocol: the violation names the call.
* Each call has a deadline, and so have the imports and the constructor.
* What the environment prints appears on standard error, apart from the result.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import headrace
from headrace.errors import HeadraceError, SetupError, from_problem
from headrace_workers.environments.conformance import Violation, check_environment
from headrace_workers.imports import import_all

START = "from headrace_workers.environments.check_process import main; main()"

READ_BYTES = 1 << 16


def check_in_process(
    environment: str, kwargs: dict[str, Any], *, actions: Sequence[str], imports: Sequence[str], call_s: float
) -> list[Violation]:
    """Check an environment in a process that is killed if a call takes longer than ``call_s``. Raises HeadraceError
    for an environment that cannot be made."""
    request = json.dumps(
        {"environment": environment, "kwargs": kwargs, "actions": list(actions), "imports": list(imports)}
    )
    messages, theirs = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs)], stdin=subprocess.PIPE, stdout=2, pass_fds=[theirs]
        )
    finally:
        os.close(theirs)
    with process, open(messages, "rb", buffering=0):
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request.encode())
                process.stdin.close()
            return _result(process, messages, call_s)
        finally:
            process.kill()


def _result(process: subprocess.Popen[bytes], messages: int, call_s: float) -> list[Violation]:
    call = "import"
    try:
        for message in _read_messages(messages, call_s):
            if "problem" in message:
                raise from_problem(message["problem"])
            if "violations" in message:
                return [Violation(*violation) for violation in message["violations"]]
            call = message["call"]
    except TimeoutError:
        return [Violation("returns", f"{call} did not return within {call_s:g} s")]
    code = process.wait()
    end = f"signal {-code}" if code < 0 else f"exit status {code}"
    return [Violation("returns", f"{call} ended the process: {end}")]


def _read_messages(descriptor: int, call_s: float) -> Iterator[dict[str, Any]]:
    """Yield the messages of the process. Raises TimeoutError if it sends none for ``call_s``."""
    data = b""
    while True:
        if not select.select([descriptor], [], [], call_s)[0]:
            raise TimeoutError
        received = os.read(descriptor, READ_BYTES)
        if not received:
            return
        *lines, data = (data + received).split(b"\n")
        yield from map(json.loads, lines)


def main() -> None:
    """Check the environment that standard input names, and write messages to the descriptor in the argument."""
    output = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    os.set_inheritable(output.fileno(), False)

    def send(**message: Any) -> None:
        output.write(json.dumps(message) + "\n")

    request = json.load(sys.stdin)
    try:
        send(violations=_check(request, lambda call: send(call=call)))
    except HeadraceError as error:
        send(problem=error.problem())
    output.flush()
    os._exit(0)  # threads of the environment do not delay the end


def _check(request: dict[str, Any], on_call: Any) -> list[Violation]:
    environment, kwargs = request["environment"], request["kwargs"]
    import_all(request["imports"])
    on_call("the constructor")
    try:
        headrace.make(environment, **kwargs)  # a failing constructor is not a violation of the protocol
    except HeadraceError:
        raise
    except Exception as error:
        raise SetupError(
            f"{environment} cannot be made: {type(error).__name__}: {error}.",
            hint="Pass its arguments with --kwargs.",
        ) from error
    return check_environment(lambda: headrace.make(environment, **kwargs), actions=request["actions"], on_call=on_call)
