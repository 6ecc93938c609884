"""Lookup of environments by id, and the documentation's example environment."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import headrace
from headrace import environment as registry
from headrace.errors import InvalidRequest, UnknownEnvironment
from headrace_workers.environments import BUILT_IN
from headrace_workers.environments.conformance import check_environment

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


def test_the_entry_points_of_the_distribution_name_what_the_package_registers():
    points = {point.name: point.value for point in entry_points(group=registry.ENTRY_POINT_GROUP)}
    assert points.items() >= BUILT_IN.items()
    assert set(headrace.registered()) >= set(BUILT_IN)


def test_an_id_family_star_registers_a_whole_family(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    headrace.register("example:*", lambda name, **kwargs: (name, kwargs))
    headrace.register("example:own", lambda **kwargs: "own")
    assert headrace.make("example:a:b", size=3) == ("a:b", {"size": 3})
    assert headrace.make("example:own") == "own"


def test_the_error_for_an_unknown_id_lists_the_ids_of_its_family():
    with pytest.raises(UnknownEnvironment, match="game:Nim-v0") as caught:
        headrace.make("game:Chess-v0")
    assert "math:Arithmetic-v0" not in str(caught.value)


def test_an_id_is_registered_once(monkeypatch):
    monkeypatch.setattr(registry, "_registry", dict(registry._registry))
    headrace.register("example:own", dict)
    with pytest.raises(InvalidRequest, match="example:own"):
        headrace.register("example:own", dict)


def test_the_environment_of_the_page_is_under_30_lines_and_keeps_the_protocol():
    code = re.search(r"```python\n(.*?class Countdown.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    assert len(code.splitlines()) < 30
    found: dict = {}
    exec(code.replace('headrace.register("example:Countdown"', f'headrace.register("test-page:{id(found)}"'), found)
    assert check_environment(found["Countdown"], actions=("\\boxed{3}", "\\boxed{1}", "\\boxed{2}", "?")) == []
    environment = found["Countdown"]()
    environment.reset(0)
    steps = [environment.step(f"\\boxed{{{count}}}") for count in (1, 1)]
    assert [terminated for _, _, terminated, _, _ in steps] == [False, False]


def test_the_page_names_every_environment():
    text = PAGE.read_text()
    assert [name for name in BUILT_IN if f"`{name.removesuffix('*')}" not in text] == []
