"""Lookup of environments by id, and the documentation's example environment."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

import headrace
from headrace import environment as registry
from headrace.errors import InvalidRequest, UnknownEnvironment
from headrace_workers.environments.conformance import check_environment

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
BUILT_IN = [
    point
    for point in entry_points(group=registry.ENTRY_POINT_GROUP)
    if point.value.startswith("headrace_workers.environments.")
]


@pytest.mark.parametrize("point", BUILT_IN, ids=lambda point: point.name)
def test_every_built_in_environment_is_registered_by_an_entry_point_that_loads(point: EntryPoint):
    assert point.name in headrace.registered()
    assert callable(point.load())


def test_no_environment_is_imported_before_it_is_first_made():
    program = (
        "import sys, headrace, headrace_workers.environments as package\n"
        "headrace.registered()\n"
        "print([name for name in sys.modules if name.startswith(f'{package.__name__}.')])\n"
        "headrace.make('game:Nim-v0')\n"
        "print('headrace_workers.environments.nim' in sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == ["[]", "True"]


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
    assert len(BUILT_IN) >= 12
    assert [point.name for point in BUILT_IN if f"`{point.name.removesuffix('*')}" not in text] == []
