"""Bounded copies of the JSON-able part of an environment's values.

* A copy shares nothing with its original and can be stored as JSON and as MessagePack.
* Depth, items and bytes of a copy are bounded, even if the original contains itself or one part many times.
* Omitted and truncated parts are named by path under ``dropped``.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np

from headrace_workers.unicode_text import is_unicode

MAX_DEPTH = 32
"""Limit on nesting."""

MAX_ITEMS = 20_000
"""Limit on items of one copy, including omitted ones; copying that many takes about 10 ms."""

MAX_TEXT = 1 << 20
"""Limit on characters of all texts and keys of one copy. A record has one info for each turn."""

MAX_NAMED = 100
"""Limit on paths under ``dropped``; the others are only counted."""

MAX_NAME = 80
"""Limit on characters of a key in a path."""

LOWEST_INTEGER, HIGHEST_INTEGER = -(2**63), 2**64 - 1
"""Range of integers that the codec can store."""


def json_part(value: dict[Any, Any]) -> dict[str, Any]:
    """Copy the JSON-able part of a dict deeply; omitted parts are listed by path under ``dropped``."""
    copier = _Copier()
    kept = copier.copy_dict(value)
    dropped = copier.dropped
    if dropped:
        if copier.unnamed:
            dropped.append(f"and {copier.unnamed} more")
        own = kept.get("dropped")
        kept["dropped"] = [*(str(item) for item in (own if isinstance(own, list) else ())), *dropped]
    return kept


_DROP = object()


class _Position(int):
    """A position in a list, as opposed to a numeric key."""


class _Copier:
    """The state of one copy. ``_path`` has the keys and positions, ``_open`` the ids of the enclosing containers."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.unnamed = 0
        self._items_left = MAX_ITEMS
        self._text_left = MAX_TEXT
        self._path: list[Any] = []
        self._open: list[int] = []

    def copy_dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        self._open.append(id(value))
        for key, item in value.items():
            if self._items_left <= 0:
                self._drop_rest()
                break
            self._items_left -= 1
            self._path.append(key)
            if not self._is_kept_text(key):
                self._drop(type(item).__name__)
            elif (copied := self._copy(item)) is not _DROP:
                kept[key] = copied
            self._path.pop()
        self._open.pop()
        return kept

    def _copy_list(self, value: list[Any] | tuple[Any, ...]) -> list[Any]:
        kept: list[Any] = []
        self._open.append(id(value))
        for position, item in enumerate(value):
            if self._items_left <= 0:
                self._drop_rest()
                break
            self._items_left -= 1
            self._path.append(_Position(position))
            copied = self._copy(item)
            # A null in its place keeps the positions of the other items.
            kept.append(None if copied is _DROP else copied)
            self._path.pop()
        self._open.pop()
        return kept

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return value if self._is_kept_text(value) else self._drop("str")
        if kind is int:
            return value if LOWEST_INTEGER <= value <= HIGHEST_INTEGER else self._drop("int")
        if kind is float:
            return value if math.isfinite(value) else self._drop("float")
        if isinstance(value, np.generic):
            plain = value.item()
            return self._drop(kind.__name__) if isinstance(plain, np.generic) else self._copy(plain)
        if isinstance(value, dict | list | tuple):
            return self._copy_container(value)
        return self._drop(kind.__name__)

    def _copy_container(self, value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Any:
        if id(value) in self._open:
            return self._drop(f"{type(value).__name__} that contains itself")
        if len(self._open) > MAX_DEPTH:
            return self._drop(f"{type(value).__name__} below {MAX_DEPTH} levels")
        return self.copy_dict(value) if isinstance(value, dict) else self._copy_list(value)

    def _is_kept_text(self, value: Any) -> TypeGuard[str]:
        if not isinstance(value, str) or len(value) > self._text_left or not is_unicode(value):
            return False
        self._text_left -= len(value)
        return True

    def _drop_rest(self) -> None:
        self._drop(f"the rest, over {MAX_ITEMS} items")

    def _drop(self, reason: str) -> Any:
        """Record the current path as omitted."""
        if len(self.dropped) >= MAX_NAMED:
            self.unnamed += 1
        else:
            path = "".join(_step(key) for key in self._path).removeprefix(".")
            self.dropped.append(f"{path} ({reason})".encode(errors="replace").decode())
        return _DROP


def _step(key: Any) -> str:
    return f"[{int(key)}]" if type(key) is _Position else f".{_short(key)}"


def _short(key: Any) -> str:
    if isinstance(key, str):
        return key if len(key) <= MAX_NAME else key[:MAX_NAME] + "…"
    is_short = key is None or type(key) in (bool, float) or (type(key) is int and abs(key) <= HIGHEST_INTEGER)
    return str(key) if is_short else f"a key of type {type(key).__name__}"
