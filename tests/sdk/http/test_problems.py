"""Problem bodies, as opposed to the pages of proxies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.errors import UnknownRun
from headrace.http.problems import read_problem


def test_a_problem_body_is_recognized_by_its_type() -> None:
    body = UnknownRun("No run.", run="guess").problem()
    error = read_problem(404, json.dumps(body).encode())
    assert isinstance(error, UnknownRun)
    assert (error.detail, error.extra) == ("No run.", {"run": "guess"})


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff", b"[]", b'{"type": "about:blank", "code": "unknown-run"}'])
def test_any_other_body_comes_from_a_proxy(body: bytes) -> None:
    assert read_problem(404, body) is None


def test_the_status_in_the_body_does_not_override_the_status_of_the_response() -> None:
    body: dict[str, Any] = {"type": "urn:headrace:problem:of-a-newer-release", "status": 404, "detail": "New."}
    error = read_problem(503, json.dumps(body).encode())
    assert error is not None
    assert error.code == "service-error"
