"""Arguments that list names.

* A string in place of a list is refused: its letters are not meant.
* A name that is none of those that there are is refused, and they are named.
"""

from __future__ import annotations

from collections.abc import Collection

from headrace.errors import InvalidRequest


def names(argument: str, given: Collection[str]) -> tuple[str, ...]:
    """The names that an argument lists, sorted. Raises InvalidRequest for a string: its letters are not meant."""
    if isinstance(given, str):
        raise InvalidRequest(f"{argument} is the string {given!r}, not a list.", hint=f"Write {argument}=[{given!r}].")
    return tuple(sorted(given))


def require_one_of(argument: str, given: str | None, known: Collection[str]) -> None:
    """Raises InvalidRequest for a name that is not known; None is fine."""
    if given is not None and given not in known:
        raise InvalidRequest(f"There is no {argument} {given!r}.", hint=f"It is one of {', '.join(known)}.")
