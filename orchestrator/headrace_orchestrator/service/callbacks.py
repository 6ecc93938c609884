"""The callback of requests that are answered once their result is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

StoredCallback = Callable[[T | Exception], None]
"""Called with a result when everything it rests on is on disk, or with the error that prevented that."""
