"""Headrace orchestrates rollouts for reinforcement learning. This package is the public interface.

* Learners use ``Client`` or ``AsyncClient``, ``Batch``, ``headrace.layouts``, ``headrace.estimators`` and ``score``.
* Environment authors use ``Environment``, ``Step``, ``register`` and ``make``.
* Both use ``Trajectory`` and its parts, ``RunSpec``, ``open`` for stored data, and the errors in ``headrace.errors``.

The modules at the top of the package are public; its subpackages are not, except ``headrace.integrations``. Importing
the package is cheap: the first use of one of these names imports all of them.

It needs only numpy, msgspec and pydantic. ``AsyncClient`` also needs ``headrace[async]``, and ``open`` needs
``headrace[offline]``.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace._public import *  # noqa: F403
else:  # hidden from type checkers, which would accept every name

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package."""
        if name != "__all__" and (name.startswith("_") or not name.isidentifier()):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name != "__all__" and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        from headrace import _public

        try:
            value = getattr(_public, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        from headrace import _public

        return sorted({*globals(), *_public.__all__})
