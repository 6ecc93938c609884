"""Both clients have the same methods."""

from __future__ import annotations

import builtins
import inspect
import sys
from typing import Any

import pytest

from headrace.client.async_client import AsyncClient
from headrace.client.sync_client import Client
from headrace.errors import MissingExtra


def test_the_async_client_has_the_methods_of_the_sync_one_with_the_same_arguments() -> None:
    def surface(kind: type) -> dict[str, list[inspect.Parameter]]:
        return {
            name: list(inspect.signature(method).parameters.values())
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") or name == "__init__"
        }

    assert surface(Client) == surface(AsyncClient)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_method_has_the_signature_and_the_docstring_of_its_operation(kind: type) -> None:
    signature = inspect.signature(kind.nack)  # type: ignore[attr-defined]
    assert str(signature) == "(self, batch: 'Batch', reason: 'str') -> 'None'"
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        assert name.startswith("_") or method.__doc__, name


def test_without_aiohttp_the_error_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "aiohttp":
            raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")
        return real(name, *args)

    monkeypatch.delitem(sys.modules, "aiohttp", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install 'headrace\[async\]'"):
        AsyncClient()
