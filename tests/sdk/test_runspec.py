"""Run specs: unknown fields, and specs that are refused at their creation."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from headrace.errors import InvalidRunSpec
from headrace.runspec import RunSpec, parse_run_spec


def test_every_field_has_a_description() -> None:
    schema = RunSpec.model_json_schema()
    for model in (schema, *schema["$defs"].values()):
        for name, field in model["properties"].items():
            assert field.get("description") or "$ref" in field, f"{model['title']}.{name}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seeds": 1}, "seeds"),
        ({"limits": {"max_turn": 3}}, r"limits\.max_turn"),
        ({"environments": [{"id": "game:Nim-v0", "args": {}}]}, r"environments\.0\.args"),
    ],
)
def test_unknown_fields_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRunSpec, match=f"{named}: Extra inputs are not permitted"):
        parse_run_spec({"name": "run", **fields})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"environments": [{"id": "game:Nim-v0"}], "tasks": []}, "not both"),
        ({"environments": [{"id": "game:Nim-v0"}], "epochs": 2}, "epochs needs a fixed list of tasks"),
        ({"environments": [{"id": "a", "weight": 1e308}]}, "allowed is 1e-09 to 1000000000.0"),
        ({"estimator": {"name": "rebn", "weighting": "token", "ddof": 1}}, "ddof must be 0 with token weighting"),
        ({"policy": {"admission": {"floor": 4, "ceiling": 3}}}, "ceiling = 3 is below floor = 4"),
        ({"policy": {"endpoints": ["host:8000"]}}, "is not the address of a policy server"),
        ({"policy": {"adapters": [{"name": "a", "path": "/a"}]}}, r"list these in policy\.endpoints"),
    ],
)
def test_a_spec_that_can_never_be_served_is_refused_at_its_creation(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRunSpec, match=problem):
        parse_run_spec({"name": "run", **fields})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seed": 2**63}, "seed"),
        ({"max_bytes": 2**63}, "max_bytes"),
        ({"limits": {"working_time_s": math.inf}}, "working_time_s"),
        ({"tasks": [{"environment": "e", "seed": 2**63}]}, "tasks.0.seed"),
        ({"tasks": [{"environment": "e", "kwargs": {"x": 2**64}}]}, "tasks.0.kwargs"),
        ({"tasks": [{"environment": "e", "kwargs": {"x": object()}}]}, "tasks.0.kwargs"),
        ({"tasks": [{"environment": "e", "example": {"x": functools.reduce(lambda x, _: [x], range(99), 0)}}]}, "deep"),
    ],
)
def test_a_spec_that_cannot_be_stored_is_refused_at_its_creation(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRunSpec, match=named):
        parse_run_spec({"name": "run", **fields})
    parse_run_spec({"name": "run", "seed": 2**63 - 1, "tasks": [{"environment": "e", "kwargs": {"x": [{"y": 1}]}}]})


def test_the_error_of_a_refused_spec_reads_as_one_sentence() -> None:
    with pytest.raises(InvalidRunSpec) as refused:
        parse_run_spec({"name": "run", "estimator": {"name": "unknown"}})
    assert refused.value.detail.startswith("The run spec is not valid: estimator.name: No estimator 'unknown'. Known: ")
    assert refused.value.detail.endswith(".")
    assert ".." not in refused.value.detail
