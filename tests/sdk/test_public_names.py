"""The public names of the contract."""

from __future__ import annotations

import importlib
import subprocess
import sys
import types

import pytest

import headrace
from headrace import _public


def test_all_is_what_is_visible() -> None:
    visible = {
        name
        for name, value in vars(_public).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(headrace.__all__) == headrace.__all__
    assert set(headrace.__all__) == visible
    assert all(getattr(headrace, name) is getattr(_public, name) for name in headrace.__all__)


def test_importing_the_package_costs_nothing() -> None:
    assert not loaded_by("import headrace, headrace.errors") & {"numpy", "msgspec", "pydantic"}


def test_a_module_of_the_package_is_there_without_an_import_of_its_own() -> None:
    assert headrace.layouts is importlib.import_module("headrace.layouts")
    assert "numpy" in loaded_by("import headrace; headrace.layouts")


def test_what_there_is_can_be_listed() -> None:
    assert set(headrace.__all__) < set(dir(headrace))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'headrace' has no attribute 'Learner'"):
        headrace.Learner  # noqa: B018
    assert not hasattr(headrace, "layouts.padded")
    with pytest.raises(ImportError, match="cannot import name 'Learner' from 'headrace'"):
        exec("from headrace import Learner")


def test_importing_the_contract_imports_no_service_code_and_no_extra() -> None:
    loaded = loaded_by("from headrace import *")
    assert {"headrace", "numpy", "msgspec", "pydantic"} <= loaded
    assert not loaded & {"headrace_workers", "headrace_orchestrator", "aiohttp", "google_crc32c", "starlette", "torch"}


def test_adapters_to_trainers_import_no_trainer() -> None:
    loaded = loaded_by("from headrace.integrations import prompts, skyrl, trl, trl_grpo")
    assert not loaded & {"trl", "torch", "safetensors", "transformers", "aiohttp"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after it."""
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())
