"""Commands that create and close runs."""

from __future__ import annotations

import pytest

from headrace.errors import (
    RunExists,
    UnknownRun,
)
from headrace.runspec import RunSpec


def test_a_run_is_created_once_and_unknown_ones_are_errors(harness):
    harness.run("a")
    with pytest.raises(RunExists):
        harness.run("a")
    with pytest.raises(UnknownRun):
        harness.status("b")
    assert harness.core.run_names() == ["a"]
    assert harness.core.spec("a") == RunSpec(name="a", environments=[{"id": "game:A"}])
