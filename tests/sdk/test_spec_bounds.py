"""The bounds of every field of a run spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import InvalidRunSpec
from headrace.runspec import parse_run_spec, read_run_spec
from tests.sdk.spec_fields import NUMBERS, SCHEMA, number_fields, resolved, spec_with

PLAIN_DATA = {"kwargs", "example", "renderer_options", "structured_outputs"}
"""Data for others: bounded in depth, and by the bytes of the whole spec."""

WHOLE = {"tasks"}
"""Lists that only the bytes of the whole spec bound."""


BOUNDS: dict[str, list[tuple[str, ...]]] = {
    "integer": [("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")],
    "number": [("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")],
    "string": [("maxLength", "pattern")],
    "array": [("maxItems",)],
    "object": [],
}
"""Words of JSON Schema of which a field has one of each tuple, by its type."""


def unbounded(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Paths of the fields that lack a bound."""
    for option in schema.get("anyOf", [schema]):
        node = resolved(option)
        kind, name = node.get("type"), path.rpartition(".")[2]
        if node.get("enum") or "const" in node or name in PLAIN_DATA or kind in ("boolean", "null"):
            continue
        if name not in WHOLE and not all(any(word in node for word in words) for words in BOUNDS[kind or "object"]):
            yield path
        if kind == "array":
            yield from unbounded(node["items"], path)
        if kind == "object":
            yield from _unbounded_object(node, path)


def _unbounded_object(node: dict[str, Any], path: str) -> Iterator[str]:
    for name, field in node.get("properties", {}).items():
        yield from unbounded({**resolved(field), **field}, f"{path}.{name}".lstrip("."))
    values = node.get("additionalProperties")
    if isinstance(values, dict):
        if "maxProperties" not in node:
            yield path
        yield from unbounded(values, path)


def test_every_field_of_a_spec_has_bounds() -> None:
    assert list(unbounded(SCHEMA, "")) == []
    assert len(list(number_fields())) > 30


@pytest.mark.parametrize("path", sorted(NUMBERS))
def test_a_number_outside_of_its_bounds_is_refused_and_its_field_is_named(path: str) -> None:
    low, high = NUMBERS[path]
    for value in (low - 1, high * 2, high * 1e300 if isinstance(high, float) else 2**70):
        with pytest.raises(InvalidRunSpec) as refused:
            parse_run_spec(spec_with(path, value))
        assert path in {problem["field"] for problem in refused.value.extra["problems"]}


@pytest.mark.parametrize(
    "spec",
    [
        {"attempt_lease_s": 1e-6},
        {"batch_lease_s": 1e-6},
        {"bin_tokens": 2**53 + 1},
        {"sampling": {"temperature": 1e-9}},
        {"sampling": {"stop": [""]}},
        {"environments": [{"id": "two\nlines"}]},
        {"tasks": [{"environment": "a", "id": "x" * 201}]},
        {"capabilities": ["x\0"]},
        {"policy": {"model": ""}},
        {"policy": {"endpoints": ["http://127.0.0.1:1/" + "x" * 5000]}},
    ],
)
def test_a_stored_spec_is_read_whatever_bounds_are_newer(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidRunSpec):
        parse_run_spec({"name": "run", **spec})
    stored = read_run_spec({"name": "run", **spec})
    assert read_run_spec(stored.model_dump(mode="json")) == stored
