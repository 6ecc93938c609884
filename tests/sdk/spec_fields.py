"""Fields of a run spec by path, with their bounds, out of its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headrace.runspec import RunSpec

SCHEMA = RunSpec.model_json_schema()

Range = tuple[float, float]

_NEEDED: dict[str, dict[str, Any]] = {
    "epochs": {"tasks": [{"environment": "test:Echo"}]},
    "tasks": {"tasks": [{"environment": "test:Echo"}]},
    "max_replaced": {"zero_variance": "replace"},
    "policy.agents": {"policy": {"agents": {"agent": {}}}},
    "policy.admission.floor": {"policy": {"admission": {"ceiling": (1 << 31) - 1}}},
}
"""Other fields that a field needs, by the beginning of its path."""


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that a reference stands for."""
    if "$ref" in schema:
        return dict(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    return schema


def number_fields(schema: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, Range]]:
    """Paths and ranges of all numbers; items of lists are those at 0, values of maps those of ``agent``."""
    for option in schema.get("anyOf", [schema]):
        node = resolved(option)
        kind = node.get("type")
        if kind in ("integer", "number") and "enum" not in node:
            yield path, (node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", 0.999))
        for name, field in node.get("properties", {}).items():
            yield from number_fields(field, f"{path}.{name}".lstrip("."))
        if kind == "array":
            yield from number_fields(node["items"], f"{path}.0")
        if isinstance(node.get("additionalProperties"), dict):
            yield from number_fields(node["additionalProperties"], f"{path}.agent")


NUMBERS = dict(number_fields())
"""Ranges of all numbers by path."""


def spec_with(path: str, value: Any, **fields: Any) -> dict[str, Any]:
    """The smallest spec with this value at the path."""
    spec: dict[str, Any] = {"name": "run"}
    needed = [given for start, given in _NEEDED.items() if path.startswith(start)]
    for given in (*needed, fields):
        spec |= given
    if "tasks" not in spec:
        spec.setdefault("environments", [{"id": "test:Echo"}])
    _put(spec, path.split("."), value)
    return spec


def _put(tree: Any, path: list[str], value: Any) -> None:
    key: Any = int(path[0]) if path[0].isdigit() else path[0]
    if len(path) == 1:
        tree[key] = value
        return
    if isinstance(tree, dict):
        tree.setdefault(key, {})
    _put(tree[key], path[1:], value)
