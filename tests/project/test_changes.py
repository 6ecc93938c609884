"""CONTRIBUTING.md lists the files that each kind of change touches, by an example in the tree.

The files of an example are those whose code contains one of its names.
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


class Example(NamedTuple):
    """An example of a change: the names that it added to the code of some packages. ``most``: the most files that a
    change of its kind may touch."""

    names: frozenset[str]
    most: int
    packages: tuple[str, ...] = PACKAGES


EXAMPLES = {
    "A route: `set_priorities`": Example(
        frozenset({"set_priorities", "PrioritiesRequest", "PrioritiesReply", "PrioritiesSet"}), 7
    ),
    "An event of the scheduler: `PrioritiesSet`": Example(frozenset({"PrioritiesSet"}), 3),
    "A field of the run spec that only workers use: `interrupted`": Example(
        frozenset({"interrupted"}), 3, ("sdk", "workers")
    ),
    "An estimator: `rloo`": Example(frozenset({"rloo"}), 2),
    "A selection rule: `lifo`": Example(frozenset({"lifo"}), 2),
    "An environment: `game:Nim-v0`": Example(frozenset({"game:Nim-v0", "Nim"}), 3),
    "A sandbox runtime: `gvisor`": Example(frozenset({"gvisor", "GvisorRuntime"}), 3),
}
"""By heading."""


def listed(heading: str) -> set[str]:
    """The files and folders that CONTRIBUTING.md lists under a heading."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {re.escape(heading)}\n(.*?)^##", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"CONTRIBUTING.md has no heading {heading!r}"
    return set(re.findall(r"^\| \[`([^`]+)`\]\(\1\) \|", section[1], re.MULTILINE))


def touched(example: Example) -> set[str]:
    """The files whose code names the example."""
    modules = [path for package in example.packages for path in sorted((ROOT / package).rglob("*.py"))]
    files = {str(path.relative_to(ROOT)) for path in modules if not example.names.isdisjoint(names_in(path))}
    return files | ({"pyproject.toml"} if not example.names.isdisjoint(names_in(ROOT / "pyproject.toml")) else set())


@cache
def names_in(path: Path) -> frozenset[str]:
    """The identifiers of a file and the words of its strings, without comments and docstrings."""
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
    """The files, with each listed folder in place of the files in it."""
    return {next((folder for folder in folders if file.startswith(folder)), file) for file in files}


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_list_of_a_change_names_the_files_of_its_example(heading: str) -> None:
    shown = listed(heading)
    folders = {file for file in shown if file.endswith("/")}
    assert folded(touched(EXAMPLES[heading]), folders) == shown


@pytest.mark.parametrize("heading", EXAMPLES)
def test_a_change_touches_few_files(heading: str) -> None:
    assert len(touched(EXAMPLES[heading])) <= EXAMPLES[heading].most


def test_every_list_has_an_example() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Files of a change\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)$", section, re.MULTILINE) == list(EXAMPLES)
