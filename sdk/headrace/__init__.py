"""Headrace: keeps GPU learners fed. This package is the contract: what learners and environment authors import.

* Learners: ``Client`` or ``AsyncClient``, ``Batch``, ``headrace.layouts``, ``headrace.estimators``, ``score``.
* Environment authors: ``Environment``, ``Step``, ``register``, ``make``.
* Everybody: ``Trajectory`` and its parts, ``RunSpec``, ``open`` for stored data, and the errors of ``headrace.errors``.

Importing the package costs nothing; the first of these names that is used imports them all.

It needs numpy, msgspec and pydantic only. ``AsyncClient`` asks for ``headrace[async]`` when it is used, ``open`` for
``headrace[offline]``.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace._public import *  # noqa: F403
else:  # a checker that saw this would take every name for one of ours

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package."""
        if name != "__all__" and (name.startswith("_") or not name.isidentifier()):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name != "__all__" and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        from headrace import _public

        try:
            found = getattr(_public, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        from headrace import _public

        return sorted({*globals(), *_public.__all__})
