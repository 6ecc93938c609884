"""Commands and programs that are refused when they are made, so by every runtime alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template

HALF = "\ud800"
"""Half a character, as JSON can hold it; a model may write it into a tool call."""


def command(**given: Any) -> SandboxCommand:
    return SandboxCommand(arguments=["true"], **given)


def program(**given: Any) -> PythonProgram:
    return PythonProgram(code="", **given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SandboxCommand(arguments=[]),
        lambda: SandboxCommand(arguments=["echo", "a\0b"]),
        lambda: SandboxCommand(arguments=["echo", HALF]),
        lambda: PythonProgram(code=HALF),
        *(
            lambda make=make, given=given: make(**given)
            for make in (command, program, Template)
            for given in (
                {"environment": {"A": "a\0b"}},
                {"environment": {"A": HALF}},
                {"environment": {"A=B": "c"}},
                {"environment": {"": "c"}},
                {"environment": {HALF: "c"}},
            )
        ),
    ],
)
def test_a_command_that_no_system_could_start_is_refused_before_anything_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(SandboxFailure) as caught:
        make()
    assert (caught.value.kind, caught.value.retryable) == ("bad-command", False)


@pytest.mark.parametrize("make", [command, program, Template])
@pytest.mark.parametrize("files", [{"a": b"", "a/b": b""}, {"a/b/c": b"", "a": b""}, {HALF: b""}, {"../a": b""}])
def test_a_file_with_an_impossible_path_is_refused(make: Callable[..., object], files: dict[str, bytes]) -> None:
    with pytest.raises(SandboxFailure) as caught:
        make(files=files)
    assert (caught.value.kind, caught.value.retryable) == ("bad-path", False)


def test_a_decoded_request_is_checked_as_well() -> None:
    sent = msgspec.msgpack.encode({"arguments": ["echo", "a\0b"]})
    with pytest.raises(SandboxFailure, match="NUL"):
        msgspec.msgpack.decode(sent, type=SandboxCommand)


def test_any_unicode_text_is_accepted() -> None:
    SandboxCommand(arguments=["echo", "é\U0001f600\n\x01"], environment={"A": "b=c"}, files={"ä/b": b"", "ä/c": b""})
    PythonProgram(code="print('a\0b')")  # the interpreter says what is wrong with it
