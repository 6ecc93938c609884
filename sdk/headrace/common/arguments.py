"""Checks of arguments that are names or lists of names.

* A string in place of a list is refused, since each character would be taken as a name.
* An unknown name is refused, and the error lists the known ones.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import InvalidRequest


def sorted_names(argument: str, names: Collection[str]) -> tuple[str, ...]:
    """The names in a list argument, sorted. Raises InvalidRequest for a string in place of a list."""
    if isinstance(names, str):
        raise InvalidRequest(f"{argument} is the string {names!r}, not a list.", hint=f"Write {argument}=[{names!r}].")
    return tuple(sorted(names))


def require_known(argument: str, name: str | None, known: Collection[str]) -> None:
    """Raise InvalidRequest for an unknown name; None is accepted."""
    if name is not None and name not in known:
        raise InvalidRequest(f"The {argument} {name!r} is unknown.", hint=f"Known: {', '.join(known)}.")
