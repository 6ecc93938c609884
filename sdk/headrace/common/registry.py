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
    one."""

    def __init__(self, kind: str, group: str, items: Mapping[str, T]) -> None:
        super().__init__(items)
        self.kind = kind
        self.group = group

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
        item: T = point.load()
        return item


@functools.cache
def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name."""
    return {point.name: point for point in entry_points(group=group)}
