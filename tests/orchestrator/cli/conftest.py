"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace_orchestrator.cli.app import cli
from tests.sdk.client.stub_server import StubServer

Headrace = Callable[..., Result]


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer() as running:
        yield running


@pytest.fixture
def headrace(stub: StubServer, monkeypatch: pytest.MonkeyPatch) -> Headrace:
    """A function that runs the command line against the stub, with piped output."""
    monkeypatch.setenv("HEADRACE_URL", stub.url)
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)

    def call(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(cli, list(arguments), prog_name="headrace", **options)

    return call
