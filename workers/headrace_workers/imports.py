"""Imports of modules and files named on the command line, which register environments.

* A module is imported by name; the folder in which the worker was started is searched, too.
* A path that ends in ``.py`` is imported as a module of the file's name.
* A failed import stops the worker at its start, with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import SetupError


def import_all(names: Iterable[str]) -> None:
    """Import each module or file. Raises SetupError that names the one that failed and why."""
    for name in names:
        try:
            if name.endswith(".py"):
                _import_file(Path(name))
            else:
                _import_module(name)
        except Exception as error:
            raise SetupError(
                f"{name!r} cannot be imported: {type(error).__name__}: {error}.",
                hint="Name a module that Python finds here, or a path that ends in .py.",
            ) from error


def _import_module(name: str) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.import_module(name)


def _import_file(path: Path) -> None:
    if path.stem in sys.modules:
        raise ImportError(f"a module named {path.stem!r} is already imported; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"the file {path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # registered before it runs, so that its classes can be found by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
