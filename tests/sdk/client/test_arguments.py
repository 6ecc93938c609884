"""Wrong arguments of the client and of ``register``: errors that say what to pass, before any request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import headrace
from headrace.errors import InvalidRequest


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda client: client.pull(5), "5"),
        (lambda client: client.pull(""), "''"),
        (lambda client: client.run(None), "None"),
        (lambda client: client.trajectory(3), "3"),
        (lambda client: client.ack("foo"), "'foo'"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused_by_name(call: Callable[[Any], Any], what: str) -> None:
    with headrace.Client("http://127.0.0.1:1", retry_for_s=0) as client, pytest.raises(InvalidRequest, match=what):
        call(client)


def test_an_address_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="address"):
        headrace.Client(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\tb", "a\x1b[2J", 5])
def test_an_environment_id_is_a_name_on_one_line(name: Any) -> None:
    with pytest.raises(InvalidRequest, match="not a name"):
        headrace.register(name, object)  # type: ignore[arg-type]
