"""The lists in CONTRIBUTING.md of the files that a change touches are those of a change in the tree.

A list has a witness: a thing that is there. Its files are those whose code names it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts.check_tree import ROOT

PACKAGES = ("sdk", "sandbox", "workers", "orchestrator")


class Witness(NamedTuple):
    """A thing in the tree: the names by which code refers to it, and in which packages. ``most``: files that a change
    of its kind may touch."""

    names: frozenset[str]
    most: int
    packages: tuple[str, ...] = PACKAGES


WITNESSES = {
    "A route: `set_priorities`": Witness(
        frozenset({"set_priorities", "PrioritiesRequest", "PrioritiesReply", "PrioritiesSet"}), 7
    ),
    "An event of the scheduler: `PrioritiesSet`": Witness(frozenset({"PrioritiesSet"}), 3),
    "A field of the run spec that only workers use: `interrupted`": Witness(
        frozenset({"interrupted"}), 3, ("sdk", "workers")
    ),
    "An estimator: `rloo`": Witness(frozenset({"rloo"}), 2),
    "A selection rule: `lifo`": Witness(frozenset({"lifo"}), 2),
    "An environment: `game:Nim-v0`": Witness(frozenset({"game:Nim-v0", "Nim"}), 3),
    "A sandbox runtime: `gvisor`": Witness(frozenset({"gvisor", "Gvisor"}), 4),
}
"""By heading."""


def listed(heading: str) -> set[str]:
    """The files of the list under a heading of CONTRIBUTING.md; those of a folder for the folder."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)^##", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"CONTRIBUTING.md has no heading {heading!r}"
    return set(re.findall(r"^\| \[`([^`]+)`\]\(\1\) \|", found[1], re.MULTILINE))


def touched(witness: Witness) -> set[str]:
    """The files whose code names the witness."""
    modules = [path for package in witness.packages for path in sorted((ROOT / package).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in modules if not witness.names.isdisjoint(names_in(path))}
    return found | ({"pyproject.toml"} if not witness.names.isdisjoint(names_in(ROOT / "pyproject.toml")) else set())


@cache
def names_in(path: Path) -> frozenset[str]:
    """The identifiers and the words of strings in a file, without its comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return frozenset(words(re.sub(r"#.*", "", text)))
    return frozenset(_names(ast.parse(text)))


def _names(tree: ast.Module) -> Iterator[str]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.alias():
                yield node.name
            case ast.arg() | ast.keyword():
                yield node.arg or ""
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from words(text)
            case _:
                pass


def words(text: str) -> list[str]:
    return re.findall(r"[\w:.-]*\w", text)


def folded(files: set[str], folders: set[str]) -> set[str]:
    """The files, with the listed folder in place of those in it."""
    return {next((folder for folder in folders if file.startswith(folder)), file) for file in files}


@pytest.mark.parametrize("heading", WITNESSES)
def test_the_list_of_a_change_names_the_files_that_its_witness_is_in(heading: str) -> None:
    shown = listed(heading)
    folders = {file for file in shown if file.endswith("/")}
    assert folded(touched(WITNESSES[heading]), folders) == shown


@pytest.mark.parametrize("heading", WITNESSES)
def test_a_change_touches_few_files(heading: str) -> None:
    assert len(touched(WITNESSES[heading])) <= WITNESSES[heading].most


def test_every_list_has_a_witness() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Files of a change\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)$", section, re.MULTILINE) == list(WITNESSES)
