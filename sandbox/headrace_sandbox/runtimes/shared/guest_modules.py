"""The guest modules: programs of ours for the Python inside a sandbox, that import each other.

* They reveal nothing about this machine: they enter as text, not from where they lie here.
* In an image, which has no folder for them, a loader makes modules from their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace_sandbox import guest

PYTHON = "/usr/bin/python3"
"""The interpreter inside: that of this machine's system, which every user can read."""

PACKAGE = "headrace_sandbox.guest"

GUEST_FOLDER = Path(guest.__file__).parent

LOAD_MODULES = f"""
import sys
def load(texts):
    for name in ("headrace_sandbox", "{PACKAGE}"):
        sys.modules[name] = type(sys)(name)
    for name, text in texts:
        module = sys.modules["{PACKAGE}." + name] = type(sys)(name)
        setattr(sys.modules["{PACKAGE}"], name, module)
        module.__file__ = name
        exec(compile(text, name, "exec"), module.__dict__)
    return module
"""
"""Python that defines ``load``: makes modules from names and texts, and returns the last one."""


def guest_text(name: str) -> str:
    """The source of a guest module."""
    return (GUEST_FOLDER / f"{name}.py").read_text()


def guest_texts(names: Sequence[str]) -> list[tuple[str, str]]:
    """Names and sources of these modules. Each must come after those that it imports."""
    return [(name, guest_text(name)) for name in names]
