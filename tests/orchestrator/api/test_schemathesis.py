"""The OpenAPI document against the service: requests made from the document, for every route and every role.

* Every response has a documented status, type and schema, and none is an internal error.
* Requests that do not match the document are refused, and so are those without a token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from headrace.server.auth import ROLES
from headrace.wire import messages
from headrace_orchestrator.api.routes import ROUTES
from tests.orchestrator.api.test_auth import token_of, write_tokens
from tests.orchestrator.serving import Process

schemathesis: Any = pytest.importorskip("schemathesis", reason="install it with `make setup`")
requests: Any = pytest.importorskip("requests", reason="install it with `make setup`")

POSITIVE, NEGATIVE = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE

EXAMPLES = int(os.environ.get("HEADRACE_API_EXAMPLES", "2"))
"""Requests of each kind to each route, from an administrator; other roles send one."""

REFUSED_AS_INVALID = "400", "409", "415", "422"
"""Statuses of a request that matches the document, and is refused for what it says: a schema cannot express it."""


class SourcePath:
    """A path in the source code of a process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"Path({str(self._path)!r})"


class Session(requests.Session):  # type: ignore[misc]
    """A session that reads the first event of a stream, which never ends."""

    def send(self, request: Any, **options: Any) -> Any:
        response = super().send(request, **{**options, "stream": True})
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            lines = response.iter_lines(chunk_size=1)
            response._content = b"\n".join(iter(lambda: next(lines), b"")) + b"\n\n"
            response.close()
        return response


@schemathesis.serializer(messages.RECORDS_MEDIA_TYPE)  # type: ignore[untyped-decorator]
def as_bytes(context: Any, value: Any) -> Any:
    """Bodies that are not JSON are bytes."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An orchestrator with tokens and a run."""
    folder = tmp_path_factory.mktemp("api")
    process = Process(folder / "data")
    try:
        tokens = SourcePath(write_tokens(folder / "tokens.toml"))
        address = process.start(tokens=tokens, max_wait_s=0.05, log_level="critical")
        made = requests.post(f"{address}/v1/runs", json={"name": "run"}, headers=bearer("admin"), timeout=30)
        assert made.status_code == 201
        yield address
    finally:
        process.end()


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=bearer("viewer"))
    expected = ["2xx", "3xx", "401", "403", "404", "5xx", *REFUSED_AS_INVALID]
    schema.config.checks.positive_data_acceptance.expected_statuses = expected
    return schema


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token_of(role)}"} if role else {}


@pytest.mark.parametrize("role", [*ROLES, ""])
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_requests_made_from_the_document_get_the_responses_that_it_describes(
    url: str, document: Any, route: Any, role: str
):
    operation = document[route.path][route.method]
    is_allowed = role == "admin" or role in route.roles or not route.roles
    for mode in (POSITIVE, *[NEGATIVE] * is_allowed):  # others are refused alike
        try:
            exchange(operation, mode, role)
        except Unsatisfiable:
            assert mode == NEGATIVE, "no request can be made from the document"  # it takes no input


def exchange(operation: Any, mode: Any, role: str) -> None:
    """Send requests and check the responses."""
    numbers = iter(range(1000))

    @settings(
        max_examples=EXAMPLES if role == "admin" else 1,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if "run" in (case.path_parameters or {}) and mode == POSITIVE and next(numbers) % 2 == 0:
            case.path_parameters["run"] = "run"
        with Session() as session:
            case.call_and_validate(session=session, headers=bearer(role), timeout=20)

    try:
        send()
    except schemathesis.core.failures.FailureGroup as failures:
        raise AssertionError("\n\n".join(map(str, failures.exceptions))) from None
