"""Estimators and selection rules of other packages, registered by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with an installed package that adds an estimator and a selection rule."""
    (tmp_path / "extension.py").write_text(
        dedent("""
            from headrace.estimators import Estimator
            from headrace.selection import SelectionRule

            doubled = Estimator(lambda inputs: 2.0 * inputs.returns)
            newest = SelectionRule(lambda groups: groups.in_order(backwards=True))
        """)
    )
    metadata = tmp_path / "extension-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extension\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[headrace.estimators]\ndoubled = extension:doubled\n\n[headrace.selection]\nnewest = extension:newest\n"
    )
    return tmp_path


def printed_by(statement: str, installed: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", dedent(statement)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_other_packages_add_estimators_by_the_entry_point_group(installed: Path) -> None:
    out = printed_by(
        """
        import numpy as np
        from headrace import RunSpec
        from headrace.estimators import Experience, advantages

        spec = RunSpec(name="a", estimator={"name": "doubled"})
        one = Experience(np.ones(2), np.ones(2, np.int64), np.array([0, 2]), np.zeros(1, np.int64))
        print(advantages(spec.estimator.name, one, gamma=1.0).advantages.tolist())
        print("doubled" in RunSpec.model_json_schema()["$defs"]["EstimatorSpec"]["properties"]["name"]["enum"])
        """,
        installed,
    )
    assert out.split("\n")[:2] == ["[4.0, 2.0]", "True"]


def test_other_packages_add_rules_by_the_entry_point_group(installed: Path) -> None:
    out = printed_by(
        """
        from headrace import RunSpec
        from headrace.selection import SELECTION_RULES

        class Groups:
            def in_order(self, *, backwards=False):
                return iter("ba" if backwards else "ab")

        order = RunSpec(name="a", selection={"order": "newest"}).selection.order
        print(*SELECTION_RULES.find(order).order(Groups()))
        print("newest" in RunSpec.model_json_schema()["$defs"]["SelectionSpec"]["properties"]["order"]["enum"])
        """,
        installed,
    )
    assert out.split("\n")[:2] == ["b a", "True"]


def test_the_error_for_an_unknown_name_lists_the_known_ones() -> None:
    from headrace.errors import InvalidRunSpec
    from headrace.runspec import parse_run_spec

    with pytest.raises(InvalidRunSpec, match=r"estimator\.name.*No estimator 'doubled'.*Known: reinforce, rebn"):
        parse_run_spec({"name": "a", "estimator": {"name": "doubled"}})
    with pytest.raises(InvalidRunSpec, match=r"selection\.order.*No selection rule 'newest'.*Known: fifo, ready, lifo"):
        parse_run_spec({"name": "a", "selection": {"order": "newest"}})


def test_an_entry_point_that_cannot_be_loaded_or_is_of_another_type_is_named(installed: Path) -> None:
    (installed / "extension-1.0.dist-info" / "entry_points.txt").write_text(
        "[headrace.estimators]\ngone = extension:gone\nodd = extension:newest\n"
    )
    out = printed_by(
        """
        from headrace.errors import InvalidRunSpec
        from headrace.runspec import parse_run_spec

        for name in ("gone", "odd"):
            try:
                parse_run_spec({"name": "a", "estimator": {"name": name}})
            except InvalidRunSpec as error:
                print(error.detail)
        """,
        installed,
    )
    gone, odd = out.splitlines()
    assert "The estimator 'gone' cannot be loaded: its entry point 'extension:gone' raised AttributeError" in gone
    assert "The estimator 'odd' is a SelectionRule, not a Estimator." in odd


def test_an_environment_whose_entry_point_cannot_be_loaded_is_named(installed: Path) -> None:
    (installed / "extension-1.0.dist-info" / "entry_points.txt").write_text(
        "[headrace.environments]\nmy:Gone = extension:gone\nmy:Odd = extension:odd\nmy:Ends = ends:Environment\n"
    )
    (installed / "extension.py").write_text("odd = 5\n")
    (installed / "ends.py").write_text("raise SystemExit(3)\n")
    out = printed_by(
        """
        from headrace.environment import make
        from headrace.errors import SetupError

        for name in ("my:Gone", "my:Odd", "my:Ends"):
            try:
                make(name)
            except SetupError as error:
                print(error.detail)
        """,
        installed,
    )
    gone, odd, ends = out.splitlines()
    assert "The environment 'my:Gone' cannot be loaded: its entry point 'extension:gone' raised AttributeError" in gone
    assert odd == "The environment 'my:Odd' is a int, which cannot be called."
    assert ends.endswith("its entry point 'ends:Environment' raised SystemExit: 3.")
