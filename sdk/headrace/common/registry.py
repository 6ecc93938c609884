"""Registries of items by name, which other packages extend by entry points."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from headrace.errors import InvalidRequest

T = TypeVar("T")


class Registry(dict[str, T]):
    """The items of Headrace by name. ``kind`` is the word for an item in errors; each entry point of ``group`` adds
    one of ``item_type``."""

    def __init__(self, kind: str, group: str, item_type: type[T], items: Mapping[str, T]) -> None:
        super().__init__(items)
        self.kind = kind
        self.group = group
        self._item_type = item_type

    def names(self) -> list[str]:
        """All names, including those of installed packages."""
        return [*self, *sorted(installed(self.group).keys() - self.keys())]

    def find(self, name: str) -> T:
        """The item of that name. Raises InvalidRequest."""
        if name in self:
            return self[name]
        point = installed(self.group).get(name)
        if point is None:
            raise InvalidRequest(f"No {self.kind} {name!r}.", hint=f"Known: {', '.join(self.names())}.")
        try:
            item = point.load()
        except (Exception, SystemExit) as error:
            raise InvalidRequest(
                f"The {self.kind} {name!r} cannot be loaded: its entry point {point.value!r} raised "
                f"{type(error).__name__}: {error}.",
                hint=f"Correct the entry point of the group {self.group!r}, and install its package where this runs.",
            ) from error
        if not isinstance(item, self._item_type):
            raise InvalidRequest(
                f"The {self.kind} {name!r} is a {type(item).__name__}, not a {self._item_type.__name__}.",
                hint=f"Its entry point {point.value!r} has to name a {self._item_type.__name__}.",
            )
        return item


@functools.cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}
